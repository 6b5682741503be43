"""Rows: some rows of one table outside their store, by key; Tally: how many there are."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Tally(NamedTuple):
    """Rows of one table."""

    rows: int
    """In use."""
    inserted: int = 0
    """Since the start of this process."""
    evicted: int = 0
    """Since the start of this process."""


@dataclass
class Rows:
    """Some rows of one table, by key."""

    keys: Tensor
    """int64 [n]."""
    weights: Tensor
    """[n, columns]."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Optimizer state by name: [n, columns], or [n, 1] where a row has one number."""
    scores: Tensor | None = None
    """Of dynamic tables: int64 [n]."""
    first_column: int = 0
    """Where ``columns`` begin in the table."""
    candidates: Tensor | None = None
    """Keys that wait for admission and their counts, as the store has them: int64 [m, 2]."""

    @classmethod
    def of_weights(cls, keys: Tensor, weights: Tensor) -> "Rows":
        """Rows whose optimizer state is to start anew."""
        return cls(keys, weights)
