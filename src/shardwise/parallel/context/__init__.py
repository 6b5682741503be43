"""Context parallelism: the tokens of every sequence are cut over ranks, which exchange keys and values."""
