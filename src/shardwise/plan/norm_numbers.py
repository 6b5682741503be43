"""Numbers that monitors of a run add to those that NORM sums over the ranks in every step.

With ``monitor.rank_seconds`` these are the seconds of each rank by phase and what it sends to other hosts
(engine/parts/rank_phases.py), with ``guard`` the sums that show whether copies differ (engine/parts/guard.py). The Plan
counts them among what a step sends.
"""

from typing import NamedTuple

MOST_ROWS = 512
"""Most rows that are exchanged, because more would cost more than what they measure: 44 KiB."""

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


class LinkUse(NamedTuple):
    """Bytes of one rank for ranks of other hosts."""

    sent_bytes: float = 0.0
    """Bytes that the other hosts have acknowledged in one step."""
    left_bytes: float = 0.0
    """Bytes that they have not acknowledged when the gradients' exchange is over for the rank."""


NUMBERS_OF_ROW = len(PhaseSeconds._fields) + len(LinkUse._fields)
"""Numbers of one rank."""


def ranks_of_row(ranks: int) -> int:
    """Return how many ranks share a row: consecutive ranks, as those of one host are. One up to ``MOST_ROWS`` ranks."""
    return -(-ranks // MOST_ROWS)


def count_phase_numbers(ranks: int) -> int:
    """Return how many numbers the rows of all ranks have."""
    return -(-ranks // ranks_of_row(ranks)) * NUMBERS_OF_ROW
