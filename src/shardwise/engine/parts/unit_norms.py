"""Gradient norms of the model's Units, for ``monitor.unit_norms``.

    norm(u) = sqrt(Σ over ranks Σ over the owned elements of u of g²) / divisor        Σ over u of norm(u)² = grad_norm²

NORM adds the squares of every bucket up for the norm of all gradients. This module adds the same squares up by Unit,
and they travel in the same all-reduce. Every rank contributes a number for every Unit of the whole model, 0 for a Unit
on another stage, so that the ranks agree on the positions without an exchange.

A parameter counts for the Unit that it has in the whole model, on any number of stages. The rows of all embedding
tables have one position together, behind the Units.

Cost: 8 bytes a Unit in an all-reduce that runs anyway.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardwise.compose.plan import TABLES, PlannedModel, measured_titles, titles_of_units
from shardwise.engine.parts.sums import Number, number_of
from shardwise.optim.clip import mean_norm
from shardwise.parallel.zero.bucket import BucketState


class UnitSquares:
    """The positions of the Units among the numbers that the ranks sum; empty without ``monitor.unit_norms``.

    Args:
        names: Titles of the trained Units of the whole model, in the order of registration.
        place_of: Position of the Unit of each of this rank's trained buckets.
    """

    def __init__(self, names: Sequence[str] = (), place_of: Mapping[BucketState, int] | None = None):
        self.names = tuple(names)
        """Titles of the trained Units of the whole model, in the order of registration."""
        self._place_of = place_of or {}

    @classmethod
    def of(cls, planned: PlannedModel, buckets: Sequence[BucketState]) -> "UnitSquares":
        """Return the positions of all Units of a Plan, and the positions for this rank's trained buckets."""
        titles, names = titles_of_units(planned), measured_titles(planned.spec, planned.policies.zero)
        # A parameter that several stages share is alone in its bucket, all others of a bucket belong to one Unit.
        place_of = {bucket: names.index(titles[bucket.layout.slots[0].name]) for bucket in buckets}
        return cls(names, place_of)

    def add_up(self, squares: Mapping[BucketState, Sequence[Tensor]], tables: Tensor) -> list[Number]:
        """Return the numbers that this rank contributes: one sum of squares for each name.

        Args:
            squares: Σ g² of the parts of each bucket that this rank counts.
            tables: Σ g² of the table rows that this rank counts.
        """
        found: list[Number] = [0.0] * len(self.names)
        if not found:
            return found
        for bucket, parts in squares.items():
            place = self._place_of[bucket]
            for part in parts:
                found[place] = found[place] + part
        if self.names[-1] == TABLES:
            found[-1] = number_of(tables)
        return found

    def norms(self, totals: Sequence[float], weight: float, divisor: float) -> dict[str, float]:
        """Return the norm of each Unit's mean gradient, by title."""
        return {
            name: mean_norm(squares, weight, divisor)
            for name, squares in zip(self.names, totals, strict=True)
        }
