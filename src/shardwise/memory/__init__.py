"""Row 2: where bytes live."""
