"""Rows: some rows of one table outside their store, by key; Tally: the number of rows of a table."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class RowTally(NamedTuple):
    """Numbers of rows of one table."""

    rows: int
    """Rows in use."""
    inserted: int = 0
    """Rows inserted since the start of this process."""
    evicted: int = 0
    """Rows evicted since the start of this process."""


@dataclass
class KeyedRows:
    """Some rows of one table, by key."""

    keys: Tensor
    """Keys of the rows: int64 [n]."""
    weights: Tensor
    """Weights of the rows: [n, columns]."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Optimizer state by name: [n, columns], or [n, 1] if a row has one number."""
    scores: Tensor | None = None
    """Eviction scores of a dynamic table's rows: int64 [n]; None for static tables."""
    first_column: int = 0
    """Column of the table at which ``columns`` begin."""
    candidates: Tensor | None = None
    """Keys that wait for admission and their scores, in the store's encoding: int64 [m, 2]."""

    @classmethod
    def of_weights(cls, keys: Tensor, weights: Tensor) -> "KeyedRows":
        """Build rows whose optimizer state starts anew."""
        return cls(keys, weights)
