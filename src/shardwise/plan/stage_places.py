"""StagePlaces: the rank that each pipeline stage lies on, as an index on "pp".

    round robin      stage s of any number lies on rank  s mod p           0 1 2 3 | 0 1 2 3
    folded (V)       stage s of 2p lies on rank          s          s < p  0 1 2 3 | 3 2 1 0
                                                         2p - 1 - s  else

Under a folded placement rank 0 holds the first and the last stage, so that the embedding and the head share a rank, and
the last rank holds two stages that follow each other, which hand over without a message.

Paper: Qi et al. 2024, arXiv:2405.15362 (the V shape).
Cost:  one division per question.
Shapes: p ranks along "pp".
"""

from collections.abc import Iterable
from typing import NamedTuple


class StagePlaces(NamedTuple):
    """The placement of pipeline stages on the ranks along "pp"."""

    ranks: int
    """Size of the "pp" axis."""
    folded: bool = False
    """True if the second half of the stages lies on the ranks in descending order (a V)."""

    def place(self, stage: int) -> int:
        """Return the index on "pp" of the rank that holds ``stage``."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.folded and turn % 2 else place

    def last_place(self, stages: int) -> int:
        """Return the index on "pp" of the rank that holds the last of ``stages`` stages, which computes the loss."""
        return self.place(stages - 1)

    def stages_of(self, place: int, stages: int) -> tuple[int, ...]:
        """Return the stages of one rank, ascending.

        Args:
            place: Index of the rank on "pp".
            stages: Number of stages over all ranks.
        """
        return tuple(stage for stage in range(stages) if self.place(stage) == place)

    def of_each(self, stages: Iterable[int]) -> set[int]:
        """Return the indices on "pp" of the ranks that hold any of ``stages``."""
        return {self.place(stage) for stage in stages}
