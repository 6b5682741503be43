"""The proof that a layout computes what one process computes."""
