"""Stragglers: a rank whose own work takes longer than that of ranks with the same work, or whose host has a slow cable.

    reading     waits for batches
    computing   passes and updates, without the waits inside
    waiting     waits for other ranks: no rank is late in its own work, and the exchange itself takes the time

For each rank r with peers, which compute the same part of the model on other data,

    own(r)   = reading + computing                                 the others wait for it
    late(r)  = own(r) / median over its peers of own               1 for a rank like the others

and r is slow once late(r) >= ``SLOW`` in at least ``_ENOUGH`` of the last ``_WINDOW`` steps and in their mean. The
phase is the one in which r differs most. A single slow step (a collection of garbage, an evaluation of another process)
is no straggler.

All ranks of a collective wait until the slowest cable has done its part, so their waits are alike and do not tell whose
cable it is. But when a rank has all from the others, its own last bytes are still queued if the cable of its host is
the slow one, and have arrived if it is not (comm/watching/link_use.py). With

    left(h)  = bytes that the ranks of host h have left to send when their gradients' exchange is over

host h is behind in a step if waits take ``_EXCHANGE`` of it, and left(h) is ``_LEFT_BYTES`` or more and ``_FAR`` times
as much as on any other host. It has a slow cable if it was behind in ``_OFTEN`` of the last ``_WINDOW`` steps: not in
all of them, because a rank that is late for another reason lets its bytes drain. The phase is ``waiting``, and the rank
is the one of h with the most left.

[Note: false alarms] With times that vary by 10 % and do not depend on the step before, one step is late by chance in
about one of ten; ten of twelve are in one of 10^8. The test draws them.

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
_LEFT_BYTES, _FAR, _OFTEN = 1 << 14, 4.0, 6
_BEHIND = 2.0
"""Ratio of a host that is behind, beside 1 for the others."""


class RankWork(NamedTuple):
    """Seconds of one rank in one step."""

    reading: float
    computing: float
    waiting: float
    sent_bytes: float = 0.0
    """Bytes that the rank sent to other hosts."""
    left_bytes: float = 0.0
    """Bytes that the rank had left to send when its gradients' exchange was over."""

    @property
    def own(self) -> float:
        """Seconds of the rank's own work."""
        return self.reading + self.computing

    @property
    def whole(self) -> float:
        """Seconds of the step."""
        return self.own + self.waiting


class SlowestRank(NamedTuple):
    """The rank that was slowest in one step."""

    rank: int
    phase: SlowPhase
    ratio: float
    """Its own work over that of its peers."""
    more_s: float
    """Seconds by which its own work, or its waiting, exceeds that of its peers; for a slow cable, the seconds that what
    is left to send takes.
    """


class _Lateness:
    """Finds which of several ranks or hosts is late in many steps of a window, once until it recovers.

    Args:
        enough: Number of the window's steps.
    """

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self._rows: deque[list[float]] = deque(maxlen=_WINDOW)
        self._named: set[int] = set()

    def add(self, ratios: list[float]) -> None:
        """Take the ratios of one step, 1 for a rank or host like the others."""
        self._rows.append(ratios)
        self._named = {each for each in self._named if self._late_steps(each) >= _WINDOW - _ENOUGH}

    def name(self) -> tuple[int, float] | None:
        """Return the number and the mean ratio of one that has become late and was not named before."""
        last = self._rows[-1]
        new = [each for each in range(len(last)) if each not in self._named and self._is_late(each)]
        if not new:
            return None
        found = max(new, key=last.__getitem__)
        self._named.add(found)
        return found, self._mean(found)

    def _is_late(self, each: int) -> bool:
        return self._late_steps(each) >= self._enough and self._mean(each) >= SLOW

    def _late_steps(self, each: int) -> int:
        return sum(row[each] >= SLOW for row in self._rows)

    def _mean(self, each: int) -> float:
        return fmean(row[each] for row in self._rows)


class StragglerWatch:
    """Finds stragglers in the seconds of all ranks, step by step.

    Args:
        parts: Number of the part of the model that each rank computes; ranks with equal numbers are peers.
        hosts: Number of each rank's host; empty: all ranks are on one host.
    """

    def __init__(self, parts: Sequence[int], hosts: Sequence[int] = ()):
        self._peers = [
            [other for other, part in enumerate(parts) if part == own and other != rank]
            for rank, own in enumerate(parts)
        ]
        by_host: dict[int, list[int]] = {}
        for rank in range(len(parts)):
            by_host.setdefault(hosts[rank] if hosts else 0, []).append(rank)
        self._hosts = list(by_host.values())
        """Ranks of each host."""
        self._late, self._slow_links = _Lateness(_ENOUGH), _Lateness(_OFTEN)
        self.slowest: SlowestRank | None = None
        """The slowest rank of the last step; None before the first step, and without peers."""

    def look(self, works: Sequence[RankWork]) -> SlowestRank | None:
        """Take the seconds of one step, and return a straggler that was not named before.

        A rank that is slow in its own work is named before a host that has a slow cable.

        Args:
            works: Seconds of each rank.
        """
        late = [self._ratio(rank, works) for rank in range(len(works))]
        links = [_BEHIND if self._is_behind(host, works) else 1.0 for host in range(len(self._hosts))]
        self._late.add(late)
        self._slow_links.add(links)
        self.slowest = self._slowest(works, late, links)
        found = self._late.name()
        if found is not None:
            return self._judged(found[0], works, found[1])
        found = self._slow_links.name()
        return None if found is None else self._of_link(found[0], works, late)

    def _ratio(self, rank: int, works: Sequence[RankWork]) -> float:
        peers = self._peers[rank]
        if not peers:
            return 1.0
        usual = median(works[other].own for other in peers)
        return works[rank].own / usual if usual > _TINY_S else 1.0

    def _is_behind(self, host: int, works: Sequence[RankWork]) -> bool:
        """Return whether a host has far more left to send than the others, in a step in which the exchange matters."""
        left = [sum(works[rank].left_bytes for rank in ranks) for ranks in self._hosts]
        others = max((each for other, each in enumerate(left) if other != host), default=0.0)
        waits = median(each.waiting for each in works) >= _EXCHANGE * median(each.whole for each in works)
        return waits and left[host] >= max(_LEFT_BYTES, _FAR * others)

    def _slowest(
        self, works: Sequence[RankWork], late: Sequence[float], links: Sequence[float]
    ) -> SlowestRank | None:
        judged = [rank for rank in range(len(works)) if self._peers[rank]]
        if not judged:
            return None
        rank = max(judged, key=late.__getitem__)
        waits = max(judged, key=lambda each: works[each].waiting)
        if late[rank] < SLOW and _BEHIND in links:
            return self._of_link(links.index(_BEHIND), works, late)
        if late[rank] < SLOW and works[waits].waiting >= _EXCHANGE * works[waits].whole:
            return SlowestRank(waits, "waiting", late[waits], works[waits].waiting)
        return self._judged(rank, works, late[rank])

    def _of_link(self, host: int, works: Sequence[RankWork], late: Sequence[float]) -> SlowestRank:
        ranks = self._hosts[host]
        rank = max(ranks, key=lambda each: works[each].left_bytes)
        sent_bytes, left_bytes = (
            sum(getattr(works[each], name) for each in ranks) for name in ("sent_bytes", "left_bytes")
        )
        more_s = works[rank].waiting * left_bytes / sent_bytes if sent_bytes else 0.0
        return SlowestRank(rank, "waiting", late[rank], more_s)

    def _judged(self, rank: int, works: Sequence[RankWork], ratio: float) -> SlowestRank:
        """Return a rank with the phase in which its last step differs most from that of its peers."""
        peers = self._peers[rank]
        reading = works[rank].reading - median(works[other].reading for other in peers)
        computing = works[rank].computing - median(works[other].computing for other in peers)
        phase: SlowPhase = "reading" if reading > computing else "computing"
        return SlowestRank(rank, phase, ratio, reading + computing)
