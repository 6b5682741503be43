"""Seconds of a step: the Plan's list, walked by the clocks of units that work beside one another.

    computing    F and B, updates on the device; on CPU ranks also exchanges between ranks, which copy themselves
    exchange     exchanges between ranks, if devices compute
    updates      of state on other tiers: one thread, in the order of the list (tiers/tier.py)
    disk         reads and writes, one after another
    down, up     gradients to the host and weights to the device, if they are two, and what blocks save both ways

An Action begins when its list has reached it, its clock is free, and its inputs are there. The computing clock goes
on while an Action runs on another clock, and waits where the result is used: F(u) for the gather and the update of u,
NORM for all reductions, RECV for its SEND, all ranks of a pipeline together. The time that it waits is the cost of the
other clocks' work beyond what computation covers. Of three steps the last counts, because updates of one step run
beside the next.

    F, B          operations / flops_s + bytes of other operations / memory rate, including recomputation and tiles
                  + what experts and slices send inside of them / exchange rate (passes.py)
    UNSHARD etc.  bytes of the Plan / rate            (parallel/zero/cost.py, tiers/tier_cost.py)

Rates are given or measured (``rates.py``). The price leaves out what sums and norms send, rows of embedding tables, and
the time that Python takes for each Action.

Cost: a look at each Action of a list, three times.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

from shardwise.compose.plan import Policies
from shardwise.parallel.zero.cost import unit_bytes
from shardwise.plan.action import Action, Kind
from shardwise.plan.dataflow import need, result, stages_of
from shardwise.plan.plan import Plan, class_of
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.rates import Rates
from shardwise.tiers.tier_cost import unit_traffic

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
    policies: Policies,
    passed: Mapping[int, MeasuredPass],
    rates: Rates,
    is_cpu: bool,
) -> StepSeconds:
    """Return the seconds of a step on the rank that takes longest.

    Args:
        plan: The Plan.
        policies: Inputs of the Plan.
        passed: Measured pass of one microbatch, by stage.
        rates: Rates of the hardware.
        is_cpu: True if ranks compute on CPUs.
    """
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


class _Quantities:
    """Bytes and operations of the Actions of one rank."""

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
        self.strategies = self.ranks.strategies
        saving = [unit for unit, each in enumerate(self.strategies) if each.saved_tier != "device"]
        self.kept = saving[-1] if saving and plan.mesh.pp == 1 else -1
        """Unit whose saved tensors stay on the device, because its backward comes at once; -1: none."""
        self.passed = passed
        self.rates = rates
        self.is_cpu = is_cpu
        self.near_bytes_s = rates.host_bytes_s if is_cpu else rates.device_bytes_s
        self.counts_late = policies.offload.step == "delayed"
        self.waits_at_end = policies.offload.step == "at_end"
        self.leaving = 2 * policies.offload.buffers
        """Most gradients that move to a disk at once."""
        self.moved = unit_traffic(self.ranks, plan.mesh, self.strategies)
        self.between = [
            unit_bytes(unit, strategy, plan.mesh)
            for unit, strategy in zip(self.ranks.units, self.strategies, strict=True)
        ]
        self.times = Counter((action.kind, action.unit) for action in self.ranks.actions)
        self.gradients = [0] * len(self.ranks.units)
        """Bytes of gradients, by Unit."""
        for (unit, bucket), rows in self.ranks.buffers.items():
            laid_out = self.ranks.units[unit].buckets[bucket]
            self.gradients[unit] += sum(row.nbytes(laid_out, plan.mesh) for row in rows if row.kind == "grad")

    def share(self, kind: Kind, unit: int) -> UnitPass:
        """Return the part of a Unit in a pass of one microbatch."""
        return self.passed[self.ranks.unit_stages[unit]].of(kind, self.ranks.units[unit].name)

    def saved(self, unit: int) -> tuple[int, int]:
        """Return the bytes that a Unit's forward saves elsewhere.

        The first number is for this rank's host, the second for parts on the hosts of other ranks on "tp".
        """
        if unit == self.kept:
            return 0, 0
        name, passed = self.ranks.units[unit].name, self.passed[self.ranks.unit_stages[unit]]
        alike = passed.alike_bytes.get(name, 0)
        others = alike - -(-alike // self.tp)
        return max(self.share(Kind.F, unit).net_bytes - others, 0), others

    def message(self, action: Action) -> int:
        """Return the bytes of a SEND or RECV."""
        first, last = sorted((action.stage, action.other))
        return (
            self.passed[first].answered_bytes if action.carries_gradient else self.passed[last].received_bytes
        )


class _Clocks:
    """Clocks of one rank, in seconds since the first step."""

    def __init__(self, job: _Quantities):
        self._job = job
        self.spent: dict[Spent, float] = {}
        self.sent_s = 0.0
        """Time at which the last message has arrived."""
        self._now = 0.0
        self._free: dict[str, float] = dict.fromkeys(("exchange", "updates", "disk", "down", "up"), 0.0)
        self._there: dict[tuple[str, int], float] = {}
        """Time at which a result of a Unit is available: "gathered", "brought", "recalled", "loaded", "updated"."""
        self._leaving: deque[float] = deque()

    def begin_step(self) -> None:
        """Reset the seconds spent."""
        self.spent = dict.fromkeys(("compute", "update", "exchange", "waits", "bubble"), 0.0)

    # The computing clock -------------------------------------------------------------------------------------------

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
        seconds = nbytes / self._job.rates.exchange_bytes_s
        if not self._job.is_cpu:
            return self._beside("exchange", seconds, after_s)
        if seconds:
            self._wait(after_s, "waits")
            self._do(seconds, "exchange")
            return self._now
        return max(self._now, after_s)

    def _link(self, clock: str, nbytes: float, after_s: float = 0.0) -> float:
        """Return the time at which so many bytes have moved between device and host."""
        return self._beside(
            clock, 0.0 if self._job.is_cpu else nbytes / self._job.rates.link_bytes_s, after_s
        )

    def _disk(self, nbytes: float, after_s: float = 0.0) -> float:
        return self._beside("disk", nbytes / self._job.rates.disk_bytes_s, after_s)

    # Actions -------------------------------------------------------------------------------------------------------

    def run(self, action: Action, arrived_s: float) -> None:
        """Simulate one Action; ``arrived_s`` is the time at which the message of a RECV arrived."""
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
        # On CPU ranks the sender copies the message in and the receiver copies it out.
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
        """Return the time at which a Unit's weights are up to date; delayed updates are not waited for."""
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
        ):  # the first microbatch writes gradients into their buffer, later ones add to it
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
        """Return the time at which this rank reaches its norm with all gradients summed."""
        return max(self._now, self._free["exchange"])

    def norm(self, together_s: float) -> None:
        """Simulate NORM; ``together_s`` is the time at which the last rank reaches it."""
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
        """Wait for the work that must not run beside the next step."""
        if self._job.waits_at_end:
            updated = (at_s for (what, _), at_s in self._there.items() if what == "updated")
            self._wait(max(updated, default=0.0), "waits")
