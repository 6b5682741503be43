"""Stragglers: a rank whose own work takes longer than that of ranks with the same work, named once, with its phase.

    reading     waits for batches
    computing   passes and updates, without the waits inside
    waiting     waits for other ranks: no rank is late in its own work, and the exchange itself takes the time

For each rank r with peers, which compute the same part of the model on other data,

    own(r)   = reading + computing                                 the others wait for it
    late(r)  = own(r) / median over its peers of own               1 for a rank like the others

and r is slow once late(r) >= ``SLOW`` in at least ``_ENOUGH`` of the last ``_WINDOW`` steps and in their mean. The
phase is the one in which r differs most. A single slow step (a collection of garbage, an evaluation of another process)
is no straggler.

[Note: false alarms] With times that vary by 10 % and do not depend on the step before, one step is late by chance in
about one of ten; ten of twelve are in one of 10^8. The test draws them.

[Note: a slow link] All ranks of a collective wait until the slowest link has done its part: their waits are alike, and
no sum of seconds tells whose link it is. The phase is then ``waiting``, and the rank the one that waited longest.

Cost: one look at each rank and step; nothing is sent, because NORM brings the seconds (engine/parts/rank_phases.py).
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

SlowPhase = Literal["reading", "computing", "waiting"]

SLOW = 1.15
"""Least ratio of a rank's own work to that of its peers."""
_WINDOW, _ENOUGH = 12, 10
_EXCHANGE = 0.1
"""Least share of a step that waits take if ``waiting`` is the slowest phase."""
_TINY_S = 1e-9


class RankWork(NamedTuple):
    """Seconds of one rank in one step."""

    reading: float
    computing: float
    waiting: float

    @property
    def own(self) -> float:
        """Seconds of the rank's own work."""
        return self.reading + self.computing


class SlowestRank(NamedTuple):
    """The rank that was slowest in one step."""

    rank: int
    phase: SlowPhase
    ratio: float
    """Its own work over that of its peers."""
    more_s: float
    """Seconds by which its own work, or its waiting, exceeds that of its peers."""


class StragglerWatch:
    """Finds stragglers in the seconds of all ranks, step by step.

    Args:
        parts: Number of the part of the model that each rank computes; ranks with equal numbers are peers.
    """

    def __init__(self, parts: Sequence[int]):
        self._peers = [
            [other for other, part in enumerate(parts) if part == own and other != rank]
            for rank, own in enumerate(parts)
        ]
        self._late: deque[list[float]] = deque(maxlen=_WINDOW)
        self._named: set[int] = set()
        self.slowest: SlowestRank | None = None
        """The slowest rank of the last step; None before the first step, and without peers."""

    def look(self, works: Sequence[RankWork]) -> SlowestRank | None:
        """Take the seconds of one step, and return a straggler that was not named before.

        Args:
            works: Seconds of each rank.
        """
        late = [self._ratio(rank, works) for rank in range(len(works))]
        self._late.append(late)
        self.slowest = self._slowest(works, late)
        slow = [rank for rank in range(len(works)) if self._is_slow(rank)]
        self._named &= {rank for rank in self._named if self._may_be_slow(rank)}
        new = [rank for rank in slow if rank not in self._named]
        if not new:
            return None
        rank = max(new, key=late.__getitem__)
        self._named.add(rank)
        return self._judged(rank, works, fmean(row[rank] for row in self._late))

    def _ratio(self, rank: int, works: Sequence[RankWork]) -> float:
        peers = self._peers[rank]
        if not peers:
            return 1.0
        usual = median(works[other].own for other in peers)
        return works[rank].own / usual if usual > _TINY_S else 1.0

    def _is_slow(self, rank: int) -> bool:
        rows = [row[rank] for row in self._late]
        often = sum(ratio >= SLOW for ratio in rows) >= _ENOUGH
        return often and fmean(rows) >= SLOW

    def _may_be_slow(self, rank: int) -> bool:
        """Return False once a rank is like the others again, so that it may be named again."""
        return sum(row[rank] >= SLOW for row in self._late) >= _WINDOW - _ENOUGH

    def _slowest(self, works: Sequence[RankWork], late: Sequence[float]) -> SlowestRank | None:
        judged = [rank for rank in range(len(works)) if self._peers[rank]]
        if not judged:
            return None
        rank = max(judged, key=late.__getitem__)
        waits = max(judged, key=lambda each: works[each].waiting)
        whole = works[waits].own + works[waits].waiting
        if late[rank] < SLOW and works[waits].waiting >= _EXCHANGE * whole:
            return SlowestRank(waits, "waiting", late[waits], works[waits].waiting)
        return self._judged(rank, works, late[rank])

    def _judged(self, rank: int, works: Sequence[RankWork], ratio: float) -> SlowestRank:
        """Return a rank with the phase in which its last step differs most from that of its peers."""
        peers = self._peers[rank]
        reading = works[rank].reading - median(works[other].reading for other in peers)
        computing = works[rank].computing - median(works[other].computing for other in peers)
        phase: SlowPhase = "reading" if reading > computing else "computing"
        return SlowestRank(rank, phase, ratio, reading + computing)
