"""Numbers that monitors of a run add to those that NORM sums over the ranks in every step.

With ``monitor.rank_seconds`` these are the seconds of each rank by phase (engine/parts/rank_phases.py), with ``guard``
the sums that show whether copies differ (engine/parts/guard.py). The Plan counts them among what a step sends.
"""

from typing import NamedTuple

MOST_RANKS = 4096
"""Ranks above which no rows are exchanged, because the rows would cost more than what they measure."""

GUARD_NUMBERS = 5
"""Numbers of the guard: four for copies, one for state at rest."""


class PhaseSeconds(NamedTuple):
    """Seconds of one rank by phase; they add up to the time of its steps."""

    data: float = 0.0
    """Waits for batches."""
    compute: float = 0.0
    dp: float = 0.0
    """Waits for data-parallel ranks, and for all ranks together."""
    tp: float = 0.0
    pp: float = 0.0
    ep: float = 0.0
    update: float = 0.0
    save: float = 0.0
    """Waits for checkpoints."""
    rest: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self)

    @property
    def exchange(self) -> float:
        """Seconds of waits for other ranks on all axes."""
        return self.dp + self.tp + self.pp + self.ep


def count_phase_numbers(ranks: int) -> int:
    """Return how many numbers the rows of all ranks have; 0 if there are too many ranks to exchange them."""
    return ranks * len(PhaseSeconds._fields) if ranks <= MOST_RANKS else 0
