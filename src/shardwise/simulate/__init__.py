"""Row 5: what a Plan will cost before it runs."""
