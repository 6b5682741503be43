"""Row 6: all policies together, the rules that span them, and what "auto" becomes."""
