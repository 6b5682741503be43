"""The training state: masters and moments by name, saving, loading, averaging, and state that is away."""
