"""Row 0: the five nouns, pure data. Runs on a laptop for 100,000 ranks."""
