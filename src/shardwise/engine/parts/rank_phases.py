"""Phases of every rank: how long each rank waited for data, computed, waited for others, updated and saved.

    compute     forward and backward passes, without the waits for other ranks inside
    exchange    waits of the computation for other ranks, by axis (plan/waits.py)
    update      from the last backward pass to the end of the step, without the waits inside
    data, save  seconds that the loop around the engine reports (``count``)
    rest        the other time from the end of the step before to the end of this step

so the phases of a rank add up to its time. Each rank has a row of its own in the numbers that NORM sums, zeros in the
rows of others, and the sums are the rows of all ranks. A row describes the step before, which is over when NORM runs.
In a job on several hosts a row also has the bytes that the rank sent to other hosts, and those that are left to send
when NORM begins, behind the gradients' exchange (comm/watching/link_use.py).

A rank that is slow in its own work lets the others wait for it: their exchange grows, and its compute or data does.
That tells a slow rank from a slow link (observe/diagnosis.py).

In each step the rows also show whether a rank or the cable of a host has become slow (observe/stragglers.py).

Cost: 11 numbers a rank and step in an all-reduce that runs anyway; nothing without ``monitor.rank_seconds``. Above
``MOST_ROWS`` (plan/norm_numbers.py) ranks some consecutive ranks, such as those of a host, share a row: their sum.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from shardwise.observe.stragglers import RankWork, SlowestRank, StragglerWatch
from shardwise.plan.norm_numbers import NUMBERS_OF_ROW, LinkUse, PhaseSeconds, ranks_of_row
from shardwise.plan.trace import Trace

_AXES = ("dp", "tp", "pp", "ep")

Reported = Literal["data", "save"]
"""Phases that the loop around the engine reports."""


class RankPhases:
    """The phases of all ranks, summed over steps.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        part_of: Function from a rank to the number of the part of the model that it computes; None: all compute the
            same.
        hosts: Number of each rank's host; empty: all ranks are on one host.
        link: Function that returns what this rank has sent to other hosts since its last call, and what is left; None:
            there are none.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        part_of: Callable[[int], int] | None = None,
        hosts: Sequence[int] = (),
        link: Callable[[], LinkUse] | None = None,
    ) -> None:
        self._ranks = ranks
        self._shared = ranks_of_row(ranks)
        """Consecutive ranks that share a row."""
        self._row = rank // self._shared
        rows = range(0, ranks, self._shared)
        self._sums = [PhaseSeconds()] * len(rows)
        self._stragglers = StragglerWatch(
            [0 if part_of is None else part_of(each) for each in rows],
            [hosts[each] if hosts else 0 for each in rows],
        )
        self._take_link = link
        self._own = PhaseSeconds()
        self._reported: dict[Reported, float] = {"data": 0.0, "save": 0.0}
        self._ended_s: float | None = None
        self.steps = 0
        """Steps whose phases are in the sums."""

    def count(self, phase: Reported, seconds: float) -> None:
        """Add seconds of a phase that the loop around the engine measures to the running step."""
        self._reported[phase] += seconds

    def end_step(self, trace: Trace) -> None:
        """Measure the step that has just ended. The first step of a process has no beginning and is left out."""
        now_s, before_s = time.perf_counter(), self._ended_s
        data, save = self._reported["data"], self._reported["save"]
        self._reported = {"data": 0.0, "save": 0.0}
        self._ended_s = now_s
        if before_s is None:
            return
        passes = trace.seconds()
        waits, in_update = _waits_of(trace)
        exchange = sum(waits.values())
        compute = max(passes.forward_s + passes.backward_s - (exchange - in_update), 0.0)
        update = max(passes.update_s - in_update, 0.0)
        known = PhaseSeconds(data=data, compute=compute, update=update, save=save, **waits)
        self._own = known._replace(rest=max(now_s - before_s - known.total, 0.0))

    def numbers(self) -> list[float]:
        """Return the rows of all ranks: this rank's last step in its own row, zeros in the others.

        Called once in each step.
        """
        found = [0.0] * (NUMBERS_OF_ROW * len(self._sums))
        link = LinkUse() if self._take_link is None else self._take_link()
        if self._own.total:  # the first step of a process is not measured
            found[self._row * NUMBERS_OF_ROW : (self._row + 1) * NUMBERS_OF_ROW] = (*self._own, *link)
        return found

    @property
    def slowest(self) -> SlowestRank | None:
        """The slowest rank of the last step that is known; None before the second step, and for a rank alone.

        If ranks share a row, the first rank of the row stands for them.
        """
        found = self._stragglers.slowest
        return None if found is None else found._replace(rank=found.rank * self._shared)

    def ranks_of(self, rank: int) -> range:
        """Return the ranks that share the row of a rank."""
        first = rank // self._shared * self._shared
        return range(first, min(first + self._shared, self._ranks))

    def settle(self, sums: Sequence[float]) -> SlowestRank | None:
        """Add the rows of all ranks, as NORM has summed them, and return a rank that has become slow, if there is one.

        Args:
            sums: The rows.
        """
        if not any(sums):
            return None
        phases = len(PhaseSeconds._fields)
        rows = [sums[start : start + NUMBERS_OF_ROW] for start in range(0, len(sums), NUMBERS_OF_ROW)]
        self._sums = [
            PhaseSeconds(*(a + b for a, b in zip(old, new[:phases], strict=True)))
            for old, new in zip(self._sums, rows, strict=True)
        ]
        self.steps += 1
        works = []
        for number, each in enumerate(rows):
            shared = len(self.ranks_of(number * self._shared))
            seconds = PhaseSeconds(*(value / shared for value in each[:phases]))
            link = LinkUse(*each[phases:])
            own = seconds.data, seconds.compute + seconds.update
            works.append(RankWork(*own, seconds.exchange, link.sent_bytes, link.left_bytes))
        found = self._stragglers.look(works)
        return None if found is None else found._replace(rank=found.rank * self._shared)

    def mean(self) -> list[PhaseSeconds]:
        """Return the mean phases of a step by rank; an empty list before the second step."""
        if not self.steps:
            return []
        found: list[PhaseSeconds] = []
        for row in self._sums:
            shared = len(self.ranks_of(len(found)))
            found += [PhaseSeconds(*(seconds / self.steps / shared for seconds in row))] * shared
        return found


def _waits_of(trace: Trace) -> tuple[dict[str, float], float]:
    """Return the waits of a step by axis, and the seconds of those behind the last backward pass.

    On a device the times of the update are not known yet when its step ends, so all waits count to the passes.
    """
    found = dict.fromkeys(_AXES, 0.0)
    behind_s = 0.0
    begin_s = None if trace.clock.runs_behind else trace.update_start()
    for span in trace.waits.spans():
        seconds = span.stop_s - span.start_s
        found[phase_of_axis(span.axis)] += seconds
        if begin_s is not None and span.start_s >= begin_s:
            behind_s += seconds
    return found, behind_s


_PHASE_OF = {"tp": "tp", "pp": "pp", "ep": "ep", "etp": "tp"}


def phase_of_axis(axis: str) -> str:
    """Return the phase to which waits for ranks along an axis count.

    Waits over several axes together, such as NORM's, are waits for any rank, and count as data-parallel.
    """
    return _PHASE_OF.get(axis.partition(" ")[0], "dp")
