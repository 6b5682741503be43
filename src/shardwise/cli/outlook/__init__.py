"""What is foreseen of a run on the command line, and what came of it: shapes without data, plans, outcomes."""
