"""Row 2: dtypes and the loss scale."""
