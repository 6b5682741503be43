"""Seconds of a step: the Plan's list, walked by the clocks of units that work beside one another.

    computing    F and B, updates on the device; on CPU ranks also exchanges between ranks, which copy themselves
    exchange     exchanges between ranks, if devices compute
    updates      of state on other tiers: one thread, in the order of the list (tiers/tier.py)
    disk         reads and writes, one after another
    down, up     gradients to the host and weights to the device, if they are two, and what blocks save both ways

An Action begins when its list has reached it, its clock is free, and its inputs are there. Which results it waits for,
and which bytes it moves on which clock, stands in the row of its Kind (plan/kinds.py); the bytes are those of
quantities.py. The computing clock goes on while an Action runs on another clock, and waits where the result is used:
F(u) for the gather and the update of u, ARRIVE(u) and NORM for reductions, RECV for its SEND, all ranks of a pipeline
together. The time that it waits is the cost of the other clocks' work beyond what computation covers. Of three steps
the last counts, because updates of one step run beside the next.

    F, B          operations / flops_s + bytes of other operations / memory rate, including recomputation and tiles
                  + what experts and slices send inside of them / exchange rate (passes.py)
    UNSHARD etc.  bytes of the Plan / rate            (parallel/zero/cost.py, tiers/tier_cost.py)

Rates are given or measured (``rates.py``). The price leaves out what sums and norms send, rows of embedding tables, and
the time that Python takes for each Action.

Cost: a look at each Action of a list, three times.
"""

from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from shardwise.base.hardware import Hardware
from shardwise.compose.plan import PlanPolicies
from shardwise.plan.action import Action, Kind
from shardwise.plan.dataflow import need, result, stages_of
from shardwise.plan.kinds import Lane
from shardwise.plan.plan import Plan, class_of
from shardwise.precision.policy import NAMES
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.quantities import Quantities

_STEPS = 3
"""Number of simulated steps; the first has no update before it."""

Spent = Literal["compute", "update", "exchange", "waits", "bubble"]
"""Use of the computing clock's time."""


class StepSeconds(NamedTuple):
    """Seconds of one rank by use; their sum is the step's."""

    compute: float
    update: float
    """Seconds of updates on the clock on which the model computes."""
    exchange: float
    """Seconds of exchanges between ranks that computation does not cover."""
    waits: float
    """Seconds of waits for other tiers that computation does not cover."""
    bubble: float
    """Seconds of waits for other stages of a pipeline."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)


def step_seconds(
    plan: Plan,
    policies: PlanPolicies,
    passed: Mapping[int, MeasuredPass],
    hardware: Hardware,
    is_cpu: bool,
) -> StepSeconds:
    """Return the seconds of a step on the rank that takes longest.

    Args:
        plan: The Plan.
        policies: Inputs of the Plan.
        passed: Measured pass of one microbatch, by stage.
        hardware: Rates of a rank.
        is_cpu: True if ranks compute on CPUs.
    """
    firsts = plan.mesh.ranks("pp", 0)
    dtype = NAMES[policies.precision.compute_dtype or torch.float32]
    clocks = {
        place: _RankClocks(Quantities(plan, passed, rank), hardware, dtype, is_cpu, policies.offload.leaving)
        for place, rank in enumerate(firsts)
    }
    lists = {place: plan.classes[class_of(plan.mesh, rank)].actions for place, rank in enumerate(firsts)}
    for _ in range(_STEPS):
        for each in clocks.values():
            each.begin_step()
        _walk(lists, clocks)
    slowest = max(clocks.values(), key=lambda each: sum(each.spent.values()))
    return StepSeconds(**slowest.spent)


def _walk(lists: Mapping[int, tuple[Action, ...]], clocks: Mapping[int, "_RankClocks"]) -> None:
    """Simulate one step of all ranks of a pipeline, which wait for one another's messages and at NORM."""
    stages, position = stages_of(lists), dict.fromkeys(lists, 0)  # type: ignore[arg-type]
    sent: dict[tuple[int, ...], float] = {}
    while any(position[place] < len(row) for place, row in lists.items()):
        at_norm = []
        for place, row in lists.items():
            clock = clocks[place]
            while position[place] < len(row):
                action = row[position[place]]
                if action.kind is Kind.NORM:
                    at_norm.append(place)
                    break
                needed = need(action, stages) if action.kind is Kind.RECV else None
                if needed is not None and needed not in sent:
                    break
                clock.run(action, 0.0 if needed is None else sent[needed])
                left = result(action) if action.kind is Kind.SEND else None
                if left is not None:
                    sent[left] = clock.sent_s
                position[place] += 1
        if len(at_norm) == len(lists):
            together = max(clocks[place].all_reduced() for place in at_norm)
            for place in at_norm:
                clocks[place].norm(together)
                position[place] += 1


class _RankClocks:
    """Clocks of one rank, in seconds since the first step."""

    def __init__(self, job: Quantities, hardware: Hardware, dtype: str, is_cpu: bool, leaving: int):
        self._job = job
        self._is_cpu = is_cpu
        self._flops_s = hardware.flops_s(dtype)
        self._bytes_s = hardware.memory_bytes_s
        self._near_bytes_s = self._bytes_s["host" if is_cpu else "device"]
        self._link_bytes_s = hardware.links["device"].bytes_s
        self._exchange_bytes_s = hardware.links["host"].bytes_s
        self.spent: dict[Spent, float] = {}
        self.sent_s = 0.0
        """Time at which the last message has arrived."""
        self._now = 0.0
        self._free: dict[str, float] = dict.fromkeys(("exchange", "updates", "disk", "down", "up"), 0.0)
        self._there: dict[tuple[str, int], float] = {}
        """Time at which a result of a Unit is available, by the result's name in the table of Kinds."""
        self._most_leaving = leaving
        """Most gradients that move to a disk at once."""
        self._leaving: deque[float] = deque()

    def begin_step(self) -> None:
        """Reset the seconds spent."""
        self.spent = dict.fromkeys(("compute", "update", "exchange", "waits", "bubble"), 0.0)

    # Clocks ----------------------------------------------------------------------------------------------------

    def _do(self, seconds: float, what: Spent) -> None:
        self.spent[what] += seconds
        self._now += seconds

    def _wait(self, until_s: float, what: Spent) -> None:
        self._do(max(until_s - self._now, 0.0), what)

    def _beside(self, clock: str, seconds: float, after_s: float = 0.0) -> float:
        """Return the end of work on another clock that starts now; work of no time does not wait for the clock."""
        begin = max(self._now, after_s)
        if not seconds:
            return begin
        self._free[clock] = max(self._free[clock], begin) + seconds
        return self._free[clock]

    def _exchange(self, nbytes: float, after_s: float = 0.0) -> float:
        """Return the time at which so many bytes, available from ``after_s`` on, have been sent to other ranks."""
        seconds = nbytes / self._exchange_bytes_s
        if not self._is_cpu:
            return self._beside("exchange", seconds, after_s)
        if seconds:
            self._wait(after_s, "waits")
            self._do(seconds, "exchange")
            return self._now
        return max(self._now, after_s)

    def _move(self, lane: Lane, nbytes: float, after_s: float) -> float:
        """Return the time at which so many bytes, available from ``after_s`` on, have moved on a lane."""
        if lane == "compute":
            self._do(nbytes / self._near_bytes_s, "update")
            return max(self._now, after_s)
        if lane == "exchange":
            return self._exchange(nbytes, after_s)
        if lane == "updates":
            return self._beside(lane, nbytes / self._bytes_s["host"], after_s)
        if lane == "disk":
            return self._beside(lane, nbytes / self._bytes_s["disk"], after_s)
        if lane == "leaving":
            return self._leave(nbytes, after_s)
        return self._beside(lane, 0.0 if self._is_cpu else nbytes / self._link_bytes_s, after_s)

    def _leave(self, nbytes: float, after_s: float) -> float:
        """Return ``after_s``: gradients go to a disk behind the computation, which waits if too many are going."""
        if nbytes:
            self._leaving.append(self._move("disk", nbytes, after_s))
            while len(self._leaving) > self._most_leaving:
                self._wait(self._leaving.popleft(), "waits")
        return after_s

    # Actions ---------------------------------------------------------------------------------------------------

    def run(self, action: Action, arrived_s: float) -> None:
        """Simulate one Action by the row of its Kind; ``arrived_s`` is the time at which a RECV's message arrived."""
        row, unit = action.kind.row, action.unit
        if row.of == "message":
            self._message(action, arrived_s)
            return
        if unit < 0 or self._job.ranks.units[unit].has_rows:
            return
        for held in row.holds:
            self._wait(self._ready(held, unit), self._waiting_for(held, unit))
        if action.kind.computes:
            self._compute(action)
        there = max((self._ready(each, unit) for each in row.waits_for), default=0.0)
        quantities = self._job.of[unit]
        for lane, quantity, is_aside in row.moves:
            moved = self._move(lane, getattr(quantities, quantity), there)
            there = there if is_aside else moved
        if row.gives:
            self._there[row.gives, unit] = there

    def _ready(self, result: str, unit: int) -> float:
        """Return the time at which a result of a Unit is there: 0.0 if nothing gives it.

        Weights are "updated" when their "update" has ended; updates that count one step late are not waited for.
        """
        if result == "updated":
            return 0.0 if self._job.strategies[unit].is_delayed else self._there.get(("update", unit), 0.0)
        return self._there.get((result, unit), 0.0)

    def _waiting_for(self, result: str, unit: int) -> Spent:
        """Return how a wait of the computation for a result is counted."""
        is_sent = result == "reduced" or (
            result == "gathered" and self._job.strategies[unit].weight_tier == "device"
        )
        return "exchange" if is_sent else "waits"

    def _message(self, action: Action, arrived_s: float) -> None:
        is_sent = action.kind is Kind.SEND
        size = self._job.message(action)
        if not is_sent:
            self._wait(arrived_s, "bubble")
        # On CPU ranks the sender copies the message in and the receiver copies it out.
        if self._is_cpu:
            self._exchange(size / 2)
            self.sent_s = self._now
        elif is_sent:
            self.sent_s = self._exchange(size)

    def _compute(self, action: Action) -> None:
        share = self._job.share(action.kind, action.unit)
        seconds = share.flops / self._flops_s + share.touched_bytes / self._near_bytes_s
        self._do(share.sent_bytes / self._exchange_bytes_s, "exchange")
        if action.kind is Kind.B:
            # The first microbatch writes gradients into their buffer, and later ones add to it.
            times = 3 if action.microbatch > 0 else 2
            seconds += times * self._job.gradients[action.unit] / self._near_bytes_s
        self._do(seconds, "compute")

    def all_reduced(self) -> float:
        """Return the time at which this rank reaches its norm with all gradients summed."""
        return max(self._now, self._free["exchange"])

    def norm(self, together_s: float) -> None:
        """Simulate NORM; ``together_s`` is the time at which the last rank reaches it."""
        self._wait(self._exchange(self._job.over_replicas, self.all_reduced()), "exchange")
        self._wait(together_s, "bubble")
        self._do(sum(self._job.gradients) / self._near_bytes_s, "update")
