"""One training step: forward and backward passes, the exchange of totals, the updates, and the checks on the way."""
