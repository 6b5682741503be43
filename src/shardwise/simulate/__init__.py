"""What a Plan costs before it runs: memory by moment, seconds by rate."""
