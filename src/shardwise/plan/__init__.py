"""Import row 0: the five nouns as pure data, which a laptop can compute for 100,000 ranks."""
