"""Verification that a job on any layout computes what one process computes."""
