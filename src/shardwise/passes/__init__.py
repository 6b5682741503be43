"""Passes that run again or in pieces: recomputation, random states, tiles, parameters without numbers."""
