"""Seconds of a step: the Plan's list, walked by the clocks of what works beside one another.

    Plan, one pass on shapes, Hardware  ──►  step_timeline  ──►  Timeline  ──►  StepSeconds

The walk does each Action of the list on the clocks of its rank (clocks.py), by the row of its Kind and the bytes and
operations that the Plan and one measured pass give (quantities.py, prices.py). All ranks of a pipeline are walked
together: a RECV waits for its SEND, and at NORM all wait for one another. The time in which a computation waits is the
cost of the other lanes' work beyond what computation covers. Of three steps the last counts, because updates of one
step run beside the next.

The result is a ``Timeline``, as a measured step is one, and ``StepSeconds`` is read off either. ``replay_timeline``
walks the same way with given seconds of passes and messages that take none; ``engine.timeline()`` predicts by it.

A price is a range, because no figure of hardware is exact. By default a rate is taken to be within -10 % and +25 % of
what a step reaches for computation, and wider for everything else. Calibrated figures have a spread of their own: the
factors between which the repeats of the measurements lay, and ``high_s`` is at most 1.4 ``low_s``.

Cost: a look at each Action of a list, three times.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardwise.base.hardware import Hardware
from shardwise.compose.plan import PlanPolicies
from shardwise.plan.action import Action, Kind
from shardwise.plan.dataflow import need, result, stages_of
from shardwise.plan.plan import Plan, class_of
from shardwise.plan.timeline import USES, Span, Timeline, Use
from shardwise.simulate.clocks import RankClocks, StepClocks
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.prices import ActionPrices
from shardwise.simulate.quantities import Quantities

_STEPS = 3
"""Number of simulated steps; the first has no update before it."""
_SPREAD: Mapping[Use, tuple[float, float]] = {
    "compute": (0.9, 1.25),
    "update": (0.85, 1.3),
    "exchange": (0.8, 1.5),
    "waits": (0.7, 1.6),
    "bubble": (0.9, 1.3),
    "data": (0.7, 1.6),
    "rest": (0.8, 1.5),
}
"""Factors on the seconds of each use for the low and the high end of a price whose rates were not measured."""
_WIDEST = 1.4
"""Largest ratio of the high to the low end if the rates were measured."""


class StepSeconds(NamedTuple):
    """Seconds of a step on the rank that takes longest, foreseen or measured."""

    spent: Mapping[Use, float]
    """Seconds by use of the computation's time; their sum is the step's."""
    exposed: Mapping[str, float]
    """Seconds in which the computation stands for ranks of each axis: exchanges, and waits for other stages."""
    low_s: float
    """Low end of the seconds of the step, as far as the rates are uncertain; measured seconds have no spread."""
    high_s: float
    """High end of the seconds of the step."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.spent.values())

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        rank: int | None = None,
        spread: Mapping[Use, tuple[float, float]] | None = None,
        widest: float = math.inf,
    ) -> "StepSeconds":
        """Read the seconds of a step off its timeline.

        Args:
            timeline: The timeline, foreseen or measured.
            rank: The rank; None: the rank whose step takes longest.
            spread: Factors on the seconds of each use for the low and the high end; None: no spread.
            widest: Largest ratio of the high to the low end.
        """
        spent, exposed = dict.fromkeys(USES, 0.0), dict[str, float]()
        for (use, axis), seconds in timeline.uses(timeline.slowest if rank is None else rank).items():
            spent[use] += seconds
            if axis:
                exposed[axis] = exposed.get(axis, 0.0) + seconds
        low, high = (
            sum(seconds * (1.0 if spread is None else spread[use][end]) for use, seconds in spent.items())
            for end in (0, 1)
        )
        total = sum(spent.values())
        if high > widest * low:
            # Both ends move towards the price, in proportion.
            below, above = total / low, high / total
            part = math.log(widest) / math.log(below * above)
            low, high = total / below**part, total * above**part
        return cls(spent, exposed, low, high)


def step_seconds(
    plan: Plan,
    policies: PlanPolicies,
    passed: Mapping[int, MeasuredPass],
    hardware: Hardware,
    device_type: str,
    per_host: int | None = None,
    data_s: float | None = None,
) -> StepSeconds:
    """Return the seconds of a step on the rank that takes longest.

    Args:
        plan: The Plan.
        policies: Inputs of the Plan.
        passed: Measured pass of one microbatch, by stage.
        hardware: Rates of a rank.
        device_type: Type of the device, such as ``cpu``.
        per_host: Ranks of one host; None: all ranks are on one host.
        data_s: Seconds in which the batches of a step are read; None: those of copying them twice in memory.
    """
    timeline = step_timeline(plan, policies, passed, hardware, device_type, per_host, data_s)
    spread = {use: hardware.spread.get(use, ends) for use, ends in _SPREAD.items()}
    is_measured = bool(hardware.spread or hardware.exchanges)
    return StepSeconds.of(timeline, spread=spread, widest=_WIDEST if is_measured else math.inf)


def step_timeline(
    plan: Plan,
    policies: PlanPolicies,
    passed: Mapping[int, MeasuredPass],
    hardware: Hardware,
    device_type: str,
    per_host: int | None = None,
    data_s: float | None = None,
) -> Timeline:
    """Return the foreseen timeline of a step, with one rank of each index on "pp".

    The arguments are those of ``step_seconds``, which reads its seconds off this timeline.
    """
    is_cpu = device_type == "cpu"
    if data_s is None:
        batch = max((each.batch_bytes for each in passed.values()), default=0)
        data_s = hardware.touched_s(2 * 2 * batch * policies.microbatches, "host")
    clocks: dict[int, RankClocks] = {}
    lists: dict[int, tuple[Action, ...]] = {}
    for rank in plan.mesh.ranks("pp", 0):
        job = Quantities(plan, passed, rank)
        prices = ActionPrices(job, hardware, plan.mesh, is_cpu, per_host)
        clocks[rank] = RankClocks(rank, job, prices, policies.offload.leaving, data_s)
        lists[rank] = plan.classes[class_of(plan.mesh, rank)].actions
    windows: dict[int, tuple[float, float]] = {}
    for number in range(_STEPS):
        for rank, each in clocks.items():
            if number == _STEPS - 2:  # what began in the step before may reach into the last
                each.spans.clear()
            each.begin_step(lists[rank][0])
        walk(lists, clocks)
        windows = {rank: each.end_step() for rank, each in clocks.items()}
    return Timeline(
        {rank: tuple(_within(each.spans, *windows[rank])) for rank, each in clocks.items()}, windows
    )


def _within(spans: Sequence[Span], start_s: float, stop_s: float) -> list[Span]:
    """Return the spans inside a range of time, by start."""
    found = [
        span._replace(start_s=max(span.start_s, start_s), stop_s=min(span.stop_s, stop_s))
        if span.start_s < start_s or span.stop_s > stop_s
        else span
        for span in spans
        if span.start_s < stop_s and span.stop_s > start_s
    ]
    return sorted(found, key=lambda span: (span.start_s, -span.stop_s))


def walk(lists: Mapping[int, Sequence[Action]], clocks: Mapping[int, StepClocks]) -> None:
    """Walk one step of all ranks of a pipeline, which wait for one another's messages and at NORM.

    Args:
        lists: Actions by rank.
        clocks: Clocks of each rank.
    """
    stages, position = stages_of(lists), dict.fromkeys(lists, 0)
    sent: dict[tuple[int, ...], float] = {}
    while any(position[rank] < len(row) for rank, row in lists.items()):
        at_norm: dict[int, Action] = {}
        for rank, row in lists.items():
            clock = clocks[rank]
            while position[rank] < len(row):
                action = row[position[rank]]
                if action.kind is Kind.NORM:
                    at_norm[rank] = action
                    break
                needed = need(action, stages) if action.kind is Kind.RECV else None
                if needed is not None and needed not in sent:
                    break
                clock.run(action, 0.0 if needed is None else sent[needed])
                left = result(action) if action.kind is Kind.SEND else None
                if left is not None:
                    sent[left] = clock.sent_s
                position[rank] += 1
        if len(at_norm) == len(lists):
            together = max(clocks[rank].reach_norm(action) for rank, action in at_norm.items())
            for rank, action in at_norm.items():
                clocks[rank].norm(action, together)
                position[rank] += 1


def replay_timeline(lists: Mapping[int, Sequence[Action]], seconds: Callable[[Action], float]) -> Timeline:
    """Return the timeline of passes that take given seconds, as if messages took no time.

    Args:
        lists: Passes and messages by the rank's index on "pp".
        seconds: Seconds of a pass.
    """
    clocks = {rank: _GivenClocks(rank, seconds) for rank in lists}
    walk(lists, clocks)
    return Timeline.of(span for each in clocks.values() for span in each.spans)


class _GivenClocks:
    """The clock of one rank whose passes take given seconds."""

    def __init__(self, rank: int, seconds: Callable[[Action], float]):
        self._rank = rank
        self._seconds = seconds
        self.spans: list[Span] = []
        self.sent_s = 0.0

    def run(self, action: Action, arrived_s: float) -> None:
        """Do one Action; messages take no time."""
        if action.kind is Kind.RECV and arrived_s > self.sent_s:
            self._add(arrived_s, Span(self._rank, action, self.sent_s, arrived_s, "wait", "pp", True))
        elif action.kind.computes and action.unit < 0:
            stop_s = self.sent_s + self._seconds(action)
            self._add(stop_s, Span(self._rank, action, self.sent_s, stop_s))

    def _add(self, stop_s: float, span: Span) -> None:
        self.spans.append(span)
        self.sent_s = stop_s

    def reach_norm(self, action: Action) -> float:
        """Return the time of NORM, which ends the passes."""
        return self.sent_s

    def norm(self, action: Action, together_s: float) -> None:
        """Do nothing, because passes and messages alone take time."""
