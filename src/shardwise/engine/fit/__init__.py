"""Foresight: the memory of a run before it starts, and the largest run that fits."""
