"""Row 2: dtypes, dtypes by operation, and the loss scale."""
