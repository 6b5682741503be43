"""Row 3: the parallel techniques, siblings that never import each other."""
