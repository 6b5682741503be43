"""Cost of a Plan before it runs: memory by moment, seconds by rate."""
