"""Kernels: arithmetic that is written once for speed, each piece with a plain reference that tests compare."""
