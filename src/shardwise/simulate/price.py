"""Seconds of a step: the Plan's list, walked by the clocks of what works beside one another.

    computing    F and B, updates on the device; on CPU ranks also what goes between ranks, which they copy themselves
    exchange     what goes between ranks, where devices compute
    updates      of state on other tiers: one thread, in the order of the list (memory/tier.py)
    disk         what is read and written, one after another
    down, up     gradients to the host and weights to the device, where they are two, and what blocks save both ways

An Action begins when its list has come to it, its clock is free, and what it takes is there. The computing clock goes
on where an Action runs by another, and waits where its result is used: F(u) for the gather and the update of u, NORM
for all reductions, RECV for its SEND, all ranks of a pipeline together. What it waits is what the work of the others
costs beyond what computation covers. Of three steps the last counts: updates of one run beside the next.

    F, B          operations / flops_s + bytes of what is no product / memory rate, recomputation and tiles among them
                  + what experts and slices send inside of them / exchange rate (passes.py)
    UNSHARD etc.  bytes of the Plan / rate            (parallel/zero/cost.py, memory/tier_cost.py)

Rates are given or measured on the spot (``rates.py``). What sums and norms send, and rows of embedding tables, is not
among it, nor what Python takes for each Action.

Cost: a look at each Action of a list, three times.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

from shardwise.compose.plan import Policies, strategies_of
from shardwise.memory.tier_cost import unit_traffic
from shardwise.parallel.zero.cost import unit_bytes
from shardwise.plan.action import Action, Kind
from shardwise.plan.dataflow import need, result, stages_of
from shardwise.plan.plan import Plan, class_of
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.rates import Rates

_STEPS = 3
"""The first has no update before it."""

Spent = Literal["compute", "update", "exchange", "waits", "bubble"]
"""What the computing clock does."""


class StepSeconds(NamedTuple):
    """Of one rank; together they are the step's."""

    compute: float
    update: float
    """Where the model computes."""
    exchange: float
    """Between ranks, what computation does not cover."""
    waits: float
    """For other tiers, the same."""
    bubble: float
    """For other stages of a pipeline."""

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(self)


def step_seconds(
    plan: Plan,
    policies: Policies,
    passed: Mapping[int, MeasuredPass],
    rates: Rates,
    is_cpu: bool,
) -> StepSeconds:
    """Of the rank that takes longest. ``passed``: by stage."""
    firsts = plan.mesh.ranks("pp", 0)
    clocks = {
        place: _Clocks(_Quantities(plan, policies, passed, rates, is_cpu, rank))
        for place, rank in enumerate(firsts)
    }
    lists = {place: plan.classes[class_of(plan.mesh, rank)].actions for place, rank in enumerate(firsts)}
    for _ in range(_STEPS):
        for each in clocks.values():
            each.begin_step()
        _walk(lists, clocks)
        for each in clocks.values():
            each.end_step()
    slowest = max(clocks.values(), key=lambda each: sum(each.spent.values()))
    return StepSeconds(**slowest.spent)


def _walk(lists: Mapping[int, tuple[Action, ...]], clocks: Mapping[int, "_Clocks"]) -> None:
    """One step of all ranks of a pipeline, which wait for one another's messages and at NORM."""
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


class _Quantities:
    """What the Actions of one rank take."""

    def __init__(
        self,
        plan: Plan,
        policies: Policies,
        passed: Mapping[int, MeasuredPass],
        rates: Rates,
        is_cpu: bool,
        rank: int,
    ):
        self.tp = plan.mesh.tp
        self.ranks = plan.classes[class_of(plan.mesh, rank)]
        self.strategies = strategies_of(self.ranks, plan.registry, policies)
        saving = [unit for unit, each in enumerate(self.strategies) if each.saved_tier != "device"]
        self.kept = saving[-1] if saving and plan.mesh.pp == 1 else -1
        """The Unit whose saved tensors stay all the same: its backward comes at once."""
        self.passed = passed
        self.rates = rates
        self.is_cpu = is_cpu
        self.near_bytes_s = rates.host_bytes_s if is_cpu else rates.device_bytes_s
        self.counts_late = policies.offload.step == "delayed"
        self.waits_at_end = policies.offload.step == "at_end"
        self.leaving = 2 * policies.offload.buffers
        """Gradients on their way to a disk at once."""
        self.moved = unit_traffic(self.ranks, plan.mesh, self.strategies)
        self.between = [
            unit_bytes(unit, strategy, plan.mesh)
            for unit, strategy in zip(self.ranks.units, self.strategies, strict=True)
        ]
        self.times = Counter((action.kind, action.unit) for action in self.ranks.actions)
        self.gradients = [0] * len(self.ranks.units)
        """Bytes of them, by Unit."""
        for (unit, bucket), rows in self.ranks.buffers.items():
            laid_out = self.ranks.units[unit].buckets[bucket]
            self.gradients[unit] += sum(row.nbytes(laid_out, plan.mesh) for row in rows if row.kind == "grad")

    def share(self, kind: Kind, unit: int) -> UnitPass:
        """Of a Unit in a pass of one microbatch."""
        return self.passed[self.ranks.unit_stages[unit]].of(kind, self.ranks.units[unit].name)

    def saved(self, unit: int) -> tuple[int, int]:
        """Bytes that a Unit's forward saves elsewhere: on this rank's host, and of parts on those of others on "tp"."""
        if unit == self.kept:
            return 0, 0
        name, passed = self.ranks.units[unit].name, self.passed[self.ranks.unit_stages[unit]]
        alike = passed.alike_bytes.get(name, 0)
        others = alike - -(-alike // self.tp)
        return max(self.share(Kind.F, unit).net_bytes - others, 0), others

    def message(self, action: Action) -> int:
        """Bytes of a SEND or RECV."""
        first, last = sorted((action.stage, action.other))
        return (
            self.passed[first].answered_bytes if action.carries_gradient else self.passed[last].received_bytes
        )


class _Clocks:
    """Of one rank, in seconds since the first step."""

    def __init__(self, job: _Quantities):
        self._job = job
        self.spent: dict[Spent, float] = {}
        self.sent_s = 0.0
        """When the last message has arrived."""
        self._now = 0.0
        self._free: dict[str, float] = dict.fromkeys(("exchange", "updates", "disk", "down", "up"), 0.0)
        self._there: dict[tuple[str, int], float] = {}
        """When something of a Unit is there: "gathered", "brought", "recalled", "loaded", "updated"."""
        self._leaving: deque[float] = deque()

    def begin_step(self) -> None:
        """What was spent before does not count."""
        self.spent = dict.fromkeys(("compute", "update", "exchange", "waits", "bubble"), 0.0)

    # The computing clock -------------------------------------------------------------------------------------------

    def _do(self, seconds: float, what: Spent) -> None:
        self.spent[what] += seconds
        self._now += seconds

    def _wait(self, until_s: float, what: Spent) -> None:
        self._do(max(until_s - self._now, 0.0), what)

    def _beside(self, clock: str, seconds: float, after_s: float = 0.0) -> float:
        """When work is over that another clock does from now on; on what takes no time it does not wait."""
        begin = max(self._now, after_s)
        if not seconds:
            return begin
        self._free[clock] = max(self._free[clock], begin) + seconds
        return self._free[clock]

    def _exchange(self, nbytes: float, after_s: float = 0.0) -> float:
        """When so many bytes have gone to other ranks. ``after_s``: when they are there."""
        seconds = nbytes / self._job.rates.exchange_bytes_s
        if not self._job.is_cpu:
            return self._beside("exchange", seconds, after_s)
        if seconds:
            self._wait(after_s, "waits")
            self._do(seconds, "exchange")
            return self._now
        return max(self._now, after_s)

    def _link(self, clock: str, nbytes: float, after_s: float = 0.0) -> float:
        """When so many bytes have gone between device and host."""
        return self._beside(
            clock, 0.0 if self._job.is_cpu else nbytes / self._job.rates.link_bytes_s, after_s
        )

    def _disk(self, nbytes: float, after_s: float = 0.0) -> float:
        return self._beside("disk", nbytes / self._job.rates.disk_bytes_s, after_s)

    # Actions -------------------------------------------------------------------------------------------------------

    def run(self, action: Action, arrived_s: float) -> None:
        """``arrived_s``: of a RECV, when its message was there."""
        kind, unit = action.kind, action.unit
        if kind in (Kind.SEND, Kind.RECV):
            self._message(action, arrived_s)
        elif unit < 0 or self._job.ranks.units[unit].has_rows:
            return
        elif kind is Kind.BRING:
            self._there["brought", unit] = self._bring(unit)
        elif kind is Kind.UNSHARD:
            self._unshard(unit)
        elif kind in (Kind.F, Kind.B):
            self._compute(action)
        elif kind is Kind.RECALL:
            own, others = self._job.saved(unit)
            self._there["recalled", unit] = self._exchange(others, self._link("up", own))
        elif kind is Kind.REDUCE:
            self._reduce(unit)
        elif kind is Kind.ADOPT:
            self._wait(self._there.get(("updated", unit), 0.0), "waits")
        elif kind is Kind.LOAD:
            self._there["loaded", unit] = self._disk(self._job.moved[unit].read)
        elif kind is Kind.STEP:
            self._step(unit)
        elif kind is Kind.STORE:
            self._disk(self._job.moved[unit].written, self._there.get(("updated", unit), 0.0))

    def _message(self, action: Action, arrived_s: float) -> None:
        is_sent = action.kind is Kind.SEND
        size = self._job.message(action)
        if not is_sent:
            self._wait(arrived_s, "bubble")
        # On CPU ranks one end copies it in, the other one out.
        if self._job.is_cpu:
            self._exchange(size / 2)
            self.sent_s = self._now
        elif is_sent:
            self.sent_s = self._exchange(size)

    def _bring(self, unit: int) -> float:
        moved, windows = self._job.moved[unit], self._job.times[Kind.UNSHARD, unit]
        there = self._disk(moved.weights_read / windows, self._updated(unit))
        return self._link("up", moved.weights_brought / windows, there)

    def _unshard(self, unit: int) -> None:
        strategy, there = self._job.strategies[unit], self._updated(unit)
        if strategy.weight_tier != "device":
            there = (
                self._there.pop(("brought", unit)) if ("brought", unit) in self._there else self._bring(unit)
            )
        self._there["gathered", unit] = self._exchange(self._job.between[unit].gather, there)

    def _updated(self, unit: int) -> float:
        """When the weights of a Unit are those of the step; those that count late are not waited for."""
        return 0.0 if self._job.counts_late else self._there.get(("updated", unit), 0.0)

    def _compute(self, action: Action) -> None:
        unit, rates = action.unit, self._job.rates
        self._wait(self._updated(unit), "waits")
        is_brought = self._job.strategies[unit].weight_tier != "device"
        self._wait(self._there.pop(("gathered", unit), 0.0), "waits" if is_brought else "exchange")
        self._wait(self._there.pop(("recalled", unit), 0.0), "waits")
        share = self._job.share(action.kind, unit)
        seconds = share.flops / rates.flops_s + share.touched_bytes / self._job.near_bytes_s
        self._do(share.sent_bytes / rates.exchange_bytes_s, "exchange")
        if (
            action.kind is Kind.B
        ):  # gradients go into their buffer, those of later microbatches to what is there
            times = 3 if action.microbatch > 0 else 2
            seconds += times * self._job.gradients[unit] / self._job.near_bytes_s
        self._do(seconds, "compute")
        if action.kind is Kind.F and self._job.strategies[unit].saved_tier != "device":
            self._link("down", self._job.saved(unit)[0])

    def _reduce(self, unit: int) -> None:
        moved, times = self._job.moved[unit], self._job.times[Kind.REDUCE, unit]
        there = self._exchange(self._job.between[unit].reduce)
        there = self._link("down", moved.down / times, there)
        self._link("up", moved.gradients_brought / times, there)
        if moved.gradients_written:
            self._leaving.append(self._disk((moved.gradients_written + moved.gradients_read) / times, there))
            while len(self._leaving) > self._job.leaving:
                self._wait(self._leaving.popleft(), "waits")

    def all_reduced(self) -> float:
        """When this rank comes to its norm with all its gradients summed."""
        return max(self._now, self._free["exchange"])

    def norm(self, together_s: float) -> None:
        """``together_s``: when the last rank has come."""
        self._wait(self.all_reduced(), "exchange")
        self._wait(together_s, "bubble")
        self._do(sum(self._job.gradients) / self._job.near_bytes_s, "update")

    def _step(self, unit: int) -> None:
        moved = self._job.moved[unit]
        self._do(moved.updated_on_device / self._job.near_bytes_s, "update")
        if not moved.updated_on_host:
            return
        there = self._there.get(("loaded", unit), 0.0)
        there = self._beside("updates", moved.updated_on_host / self._job.rates.host_bytes_s, there)
        self._there["updated", unit] = self._link("up", moved.up, there)

    def end_step(self) -> None:
        """What is not to run beside the next step is over."""
        if self._job.waits_at_end:
            updated = (at_s for (what, _), at_s in self._there.items() if what == "updated")
            self._wait(max(updated, default=0.0), "waits")
