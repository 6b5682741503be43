"""Row 6: all policies together, the rules that span several policies, and the resolution of "auto"."""
