"""Observation of a run: numbers per step, the places they are written to, the terminal, the logs."""
