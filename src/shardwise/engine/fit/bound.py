"""Bounds: seconds below which no step of a shape or a point of a search can be, and bytes that a rank holds at least.

    scaled    from passes of other sizes: products at the best rate of their dtype, bytes of other operations, and what
              modules send, in proportion to the samples and, for products, to the slices of the model
    whole     from the shape's own pass of the whole model, whose Units are dealt to the stages
    stages    from the passes of the stages
    point     with what follows from the Plan beside the passes: sums of gradients, gathers, updates, Python

Bounds of a pipeline count the time until the first microbatch reaches a rank and until the last one is back
(simulate/bound.py). On a device, work beside the computation is a bound of its own, because lanes run beside one
another, and the numbers of NORM follow all of them; on CPU ranks all of it stands in line:

    device    max(computation, exchanges, Python) + NORM        CPU    computation + exchanges + Python + NORM

A rank holds at least its model state, and what the forward passes in flight keep when a backward pass begins.

Cost: a Plan of three microbatches for each way in which lists of Actions differ; of a point, a look at each kind of
Unit.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shardwise.base.hardware import Hardware
from shardwise.compose.plan import make_plan
from shardwise.config.run import RunConfig
from shardwise.engine.fit.foresee import JobFacts
from shardwise.engine.parts.tables import register_tables
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.parallel.zero.cost import unit_exchanges
from shardwise.parallel.zero.layout import strategy_of
from shardwise.plan.action import Action, Kind
from shardwise.plan.exchange_calls import ExchangeCall
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import BucketBuffers, Plan, class_of, tier_of_row
from shardwise.plan.unit import Unit, lay_out
from shardwise.simulate.bound import pipeline_bound
from shardwise.simulate.exchange_price import ExchangePrices
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.prices import ActionPrices
from shardwise.simulate.quantities import Quantities
from shardwise.simulate.timeline import near_tiers
from shardwise.simulate.work import peak_dtype

_SHARE_OF_OPERATIONS = 0.98
"""Share of the operations of a pass that a pass scaled from another size, or dealt to stages, has at least."""
_SHARE_OF_BYTES = 0.9
"""Share of the bytes read and written that such a pass has at least."""
_FEW = 3
"""Microbatches of the Plan from which the Actions of any number follow: the first, the last, and one between."""
_ROUNDING = 1 - 1e-9
"""Factor by which a bound stays below a price that sums the same numbers in another order."""


class PassWork(NamedTuple):
    """Least seconds of one microbatch's operations, forward and backward, on one rank, and what it sends."""

    product_s: float = 0.0
    """Seconds of products at their best rate."""
    touched_s: float = 0.0
    """Seconds in which other operations read and write."""
    sent: tuple[ExchangeCall, ...] = ()
    """Exchanges inside the pass."""

    def scaled(self, samples: float, slices: int = 1) -> "PassWork":
        """Return the least work of a pass of another size.

        Args:
            samples: Ratio of the samples on a rank.
            slices: Ranks over which the products of a model on one rank are cut.
        """
        share = _SHARE_OF_OPERATIONS * samples
        sent = tuple(call._replace(elements=int(share * call.elements)) for call in self.sent)
        return PassWork(
            share / slices * self.product_s, _SHARE_OF_BYTES * samples / slices * self.touched_s, sent
        )

    @property
    def seconds(self) -> float:
        """Seconds of the work on the clock that computes, without exchanges."""
        return self.product_s + self.touched_s


def work_of(passed: MeasuredPass, hardware: Hardware, is_cpu: bool) -> PassWork:
    """Return the work of a measured pass.

    Args:
        passed: The pass.
        hardware: Rates of a rank.
        is_cpu: True if ranks compute on CPUs.
    """
    near = "host" if is_cpu else "device"
    product_s = touched = 0.0
    sent: tuple[ExchangeCall, ...] = ()
    for share in passed.shares.values():
        touched += share.touched_bytes
        sent += share.exchanges
        for product, calls in share.work.products.items():
            dtype = peak_dtype(hardware, product.dtype)
            product_s += (
                calls * product.flops / (hardware.peaks[dtype] * hardware.best_share(product.kind, dtype))
            )
    factor = hardware.least_pass_factor
    return PassWork(factor * product_s, factor * touched / hardware.best_bytes_s(near), sent)


def even_bound(seconds: float, ranks: int, virtual: int, microbatches: int) -> float:
    """Return seconds that a step takes at least, however the work of a microbatch is dealt to the stages.

    With one stage a rank the bound of the slowest rank is smallest if each later stage makes up in work for the time
    until the first microbatch reaches it: s_p = s_0 (1 - 1/m)^p.

    Args:
        seconds: Seconds of one microbatch on all stages together.
        ranks: Size of the "pp" axis.
        virtual: Stages of a rank; 2 as well if the schedule computes the gradients of weights apart.
        microbatches: Microbatches of a step.
    """
    if virtual > 1:
        return microbatches * seconds / ranks
    return seconds / (1 - (1 - 1 / microbatches) ** ranks)


class ShapeBound(NamedTuple):
    """Least seconds and bytes of every point of a shape."""

    step_s: float
    """Seconds of a step."""
    stages_s: tuple[float, ...] = ()
    """Seconds of one microbatch, forward and backward, by stage."""
    messages_s: float = 0.0
    """Seconds of a microbatch's messages to the next stage and back."""
    kept: tuple[int, ...] = ()
    """Bytes that forward passes keep at least, by index on "pp"."""


class LaneSeconds(NamedTuple):
    """Seconds of the Actions of one rank beside the operations of its passes, by what they stand in line with."""

    passes_s: float = 0.0
    """On the clock that computes, until NORM."""
    updates_s: float = 0.0
    """On the clock that computes, behind NORM."""
    exchange_s: float = 0.0
    """Of exchanges that run beside the computation."""
    norm_s: float = 0.0
    """Of the exchanges of NORM, which follow everything else."""
    python_s: float = 0.0
    """Of Python, if it runs beside the computation."""

    def plus(self, other: "LaneSeconds", times: float = 1.0) -> "LaneSeconds":
        """Return the sums with ``times`` the other seconds."""
        return LaneSeconds(*(mine + times * more for mine, more in zip(self, other, strict=True)))


class _AlikeUnits(NamedTuple):
    """Units of one rank that hold and do alike."""

    unit: Unit
    """One of the Units."""
    rows: tuple[tuple[BucketBuffers, ...], ...]
    """Its buffers, by bucket."""
    number: int
    """Number of the Units."""
    times: Mapping[Kind, tuple[int, int]]
    """Actions of all the Units by Kind: of a step of few microbatches, and of each further microbatch."""
    whole: tuple[LaneSeconds, LaneSeconds]
    """Seconds of Actions that grow with the whole buckets, for few microbatches and for each further one."""
    cut: tuple[LaneSeconds, LaneSeconds]
    """Seconds of Actions that grow with the rank's shards of the buckets."""


class _StateCosts(NamedTuple):
    """Costs of one rank that follow from its Plan, whatever its passes compute."""

    place: int
    """Index of the rank on "pp"."""
    units: tuple[_AlikeUnits, ...]
    fixed: tuple[LaneSeconds, LaneSeconds]
    """Seconds of other Actions, for few microbatches and for each further one."""
    tables_bytes: int
    """Bytes of embedding tables where the rank computes."""


class PointBound(NamedTuple):
    """Least seconds and bytes of a point."""

    step_s: float
    held_bytes: int
    """Bytes of the memory in which a rank computes."""


class JobBounds:
    """Bounds of the shapes and points of one job.

    Args:
        hardware: Rates of a rank.
        is_cpu: True if ranks compute on CPUs.
        per_host: Ranks of one host; None: all ranks lie on one host.
    """

    def __init__(self, hardware: Hardware, is_cpu: bool, per_host: int | None):
        self._hardware = hardware
        self._is_cpu = is_cpu
        self._per_host = per_host
        self._exchanges: dict[Mesh, ExchangePrices] = {}
        self._costs: dict[Hashable, list[_StateCosts]] = {}
        self._in_flight: dict[Hashable, list[list[Action]]] = {}

    def _sent_s(self, calls: Sequence[ExchangeCall], mesh: Mesh) -> float:
        if mesh not in self._exchanges:
            self._exchanges[mesh] = ExchangePrices(self._hardware, mesh, self._is_cpu, self._per_host)
        return sum(map(self._exchanges[mesh].of, calls))

    # Shapes ----------------------------------------------------------------------------------------------------------

    def scaled(self, work: PassWork, mesh: Mesh, virtual: int, microbatches: int) -> float:
        """Return seconds of a step by the work of a microbatch on all stages together."""
        seconds = work.seconds + self._sent_s(work.sent, mesh)
        return even_bound(seconds, mesh.pp, virtual, microbatches) * _ROUNDING

    def whole(self, passed: MeasuredPass, job: JobFacts) -> ShapeBound:
        """Return the bound by a pass of the whole model, whose Units are dealt to the stages of a job.

        Args:
            passed: The pass.
            job: Facts about the job, without passes.
        """
        stage_of = job.spec.stages(job.starts)
        first: dict[str, int] = {}
        """Stage of the first parameter of each Unit."""
        for unit in job.spec.units:
            stages = [at for name, at in stage_of.items() if name.startswith(f"{unit}.")]
            first[unit] = min(stages, default=0)
        count = len(job.starts) + 1
        seconds, kept = [0.0] * count, [0] * count
        for (kind, name), share in passed.shares.items():
            if count > 1 and name not in first:
                continue  # the root, parts of which lie on several stages
            seconds[first.get(name, 0)] += self._share_s(share, job.mesh, count > 1)
            if kind is Kind.F:
                kept[first.get(name, 0)] += int(share.net_bytes * (_SHARE_OF_BYTES if count > 1 else 1.0))
        return self._shape(seconds, 0.0, kept, job)

    def stages(self, job: JobFacts) -> ShapeBound:
        """Return the bound by the passes of a job's stages."""
        passes = [job.passed[stage] for stage in sorted(job.passed)]
        seconds = [sum(self._share_s(each, job.mesh) for each in one.shares.values()) for one in passes]
        kept = [
            one.batch_bytes + sum(each.net_bytes for (kind, _), each in one.shares.items() if kind is Kind.F)
            for one in passes
        ]
        messages_s = min(
            (self._sent_s((*one.leaves, *one.answered), job.mesh) for one in passes[:-1]), default=0.0
        )
        return self._shape(seconds, messages_s, kept, job)

    def _share_s(self, share: UnitPass, mesh: Mesh, is_dealt: bool = False) -> float:
        near = "host" if self._is_cpu else "device"
        touched = share.touched_bytes * (_SHARE_OF_BYTES if is_dealt else 1.0)
        seconds = self._hardware.least_pass_factor * share.work.seconds(self._hardware, touched, near)
        seconds *= _SHARE_OF_OPERATIONS if is_dealt else 1.0
        return seconds + self._sent_s(share.exchanges, mesh)

    def _shape(
        self, seconds: Sequence[float], messages_s: float, kept: Sequence[int], job: JobFacts
    ) -> ShapeBound:
        count, pp = job.policies.microbatches, job.mesh.pp
        splits = job.settings.pipeline.splits_backward
        step_s = pipeline_bound(seconds, job.mesh.places, count, messages_s, splits) * _ROUNDING
        held = self._kept(kept, pp, count, job.policies.pipeline)
        if job.settings.offload.activations != "device":
            held = [0] * pp
        return ShapeBound(step_s, tuple(seconds), messages_s, tuple(held))

    def _kept(self, kept: Sequence[int], pp: int, count: int, policy: PipelinePolicy) -> list[int]:
        """Return the most bytes that the passes in flight keep when a backward pass begins, by index on "pp"."""
        count = min(count, 2 * len(kept))
        key = pp, count, policy.schedule, policy.stages_per_rank, policy.live, policy.wgrad_delay
        if key not in self._in_flight:
            name = policy.schedule if pp > 1 else "1f1b"
            rows = schedule(
                name, pp, count, policy.virtual_stages, live=policy.live, wgrad_delay=policy.wgrad_delay
            )
            self._in_flight[key] = [list(rows[place]) for place in range(pp)]
        found = []
        for row in self._in_flight[key]:
            held = most = 0
            for action in row:
                most = max(most, held)
                held += kept[action.stage] * {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind, 0)
            found.append(most)
        return found

    # Points ----------------------------------------------------------------------------------------------------------

    def point(self, job: JobFacts, shape: ShapeBound, key: Hashable) -> PointBound:
        """Return the bound of one point; of a point with state on other tiers, that of its shape.

        Args:
            job: Facts about the job, with passes if the model has embedding tables.
            shape: Bound of its shape.
            key: Key that points share whose lists of Actions differ in nothing but the number of microbatches.
        """
        offload = job.settings.offload
        if any(tier != "device" for tier in (offload.optimizer, offload.parameters, offload.activations)):
            return PointBound(shape.step_s, 0)
        count = job.policies.microbatches
        few = min(count, _FEW)
        if (key, few) not in self._costs:
            self._costs[key, few] = self._state_costs(job, few)
        step_s, held = shape.step_s, 0
        for costs in self._costs[key, few]:
            lanes, state = self._of_state(costs, job, count, few)
            here = job.mesh.places.stages_of(costs.place, len(shape.stages_s))
            own_s = count * sum(shape.stages_s[stage] for stage in here) + lanes.passes_s
            ramp_s = sum(shape.stages_s[: costs.place]) + costs.place * shape.messages_s
            if job.settings.pipeline.splits_backward:
                ramp_s = 0.0
            computed_s = own_s + max(ramp_s, lanes.updates_s)
            beside_s = max(computed_s, lanes.exchange_s, lanes.python_s)
            step_s = max(step_s, (beside_s + lanes.norm_s) * _ROUNDING)
            held = max(held, state + shape.kept[costs.place])
        return PointBound(step_s, held)

    def _of_state(self, costs: _StateCosts, job: JobFacts, count: int, few: int) -> tuple[LaneSeconds, int]:
        """Return the seconds of a rank beside its passes, and the bytes of its state without gradients."""
        mesh, policies, more = job.mesh, job.policies, count - few
        total, state = costs.fixed[0].plus(costs.fixed[1], more), costs.tables_bytes
        for alike in costs.units:
            axes = alike.unit.axes
            shards = mesh.size(axes[1])
            buckets = tuple(
                lay_out(each.key, [(slot.name, slot.shape, slot.aliases) for slot in each.slots], shards)
                for each in alike.unit.buckets
            )
            unit = replace(alike.unit, buckets=buckets)
            strategy = strategy_of(policies.zero, mesh, axes, exchange=policies.exchanges.get(axes[1]))
            calls = unit_exchanges(unit, strategy, mesh, count == 1)
            sent = {Kind.UNSHARD: calls.gather, Kind.REDUCE: calls.reduce, Kind.ARRIVE: calls.arrive}
            for kind, (at_first, each_more) in alike.times.items():
                seconds = (at_first + more * each_more) * self._sent_s(sent[kind], mesh)
                stands = self._is_cpu or kind is Kind.ARRIVE
                total = total.plus(
                    LaneSeconds(passes_s=seconds) if stands else LaneSeconds(exchange_s=seconds)
                )
            # On a device, if the list has a SUM, Python runs on while the replicas of shards are summed.
            summed_s = alike.number * self._sent_s(calls.replicas, mesh)
            total = total.plus(
                LaneSeconds(passes_s=summed_s) if self._is_cpu else LaneSeconds(exchange_s=summed_s)
            )
            pairs = list(zip(buckets, alike.unit.buckets, strict=True))
            whole = min((new.elements / old.elements for new, old in pairs), default=1.0)
            cut = min((new.shard_elements / old.shard_elements for new, old in pairs), default=1.0)
            for (first, each), ratio in ((alike.whole, whole), (alike.cut, cut)):
                total = total.plus(first, ratio).plus(each, more * ratio)
            for bucket, rows in zip(buckets, alike.rows, strict=True):
                kept = (row.nbytes(bucket, mesh) for row in rows if row.kind != "grad")
                state += alike.number * sum(kept)
        return total, state

    def _state_costs(self, job: JobFacts, few: int) -> list[_StateCosts]:
        policies = job.policies._replace(microbatches=few)
        plan = make_plan(job.spec, job.mesh, policies)
        register_tables(plan, job.tables, few)
        found = []
        for place in sorted({0, job.mesh.pp - 1}):
            rank = plan.mesh.ranks("pp", 0)[place]
            prices = ActionPrices(
                Quantities(plan, job.passed, rank), self._hardware, plan.mesh, self._is_cpu, self._per_host
            )
            found.append(_costs_of(plan, rank, prices, few == _FEW)._replace(place=place))
        return found


_NOTHING = LaneSeconds()
_SENDING = (Kind.UNSHARD, Kind.REDUCE, Kind.ARRIVE)


def _costs_of(plan: Plan, rank: int, prices: ActionPrices, has_more: bool) -> _StateCosts:
    """Return the costs of one rank, by Units that are alike.

    Args:
        plan: A Plan of few microbatches.
        rank: The rank.
        prices: Prices of the rank's Actions.
        has_more: True if each further microbatch does what the second one does.
    """
    ranks = plan.classes[class_of(plan.mesh, rank)]
    fixed = [_NOTHING, _NOTHING]
    by_unit: dict[int, tuple[list[Counter[Kind]], list[LaneSeconds], list[LaneSeconds]]] = {}
    for unit in ranks.units:
        empty = [Counter[Kind](), Counter[Kind]()]
        by_unit[unit.index] = empty, [_NOTHING, _NOTHING], [_NOTHING, _NOTHING]
    for action in ranks.actions:
        places = (0, 1) if has_more and action.microbatch == 1 else (0,)
        own, python = _seconds_beside(action, prices)
        for number in places:
            fixed[number] = fixed[number].plus(python)
            if action.unit < 0 or ranks.units[action.unit].has_rows:
                fixed[number] = fixed[number].plus(own)
                continue
            times, whole, cut = by_unit[action.unit]
            if action.kind in _SENDING:
                times[number][action.kind] += 1
            grows = whole if action.kind.computes else cut
            grows[number] = grows[number].plus(own)
    groups: dict[str, list[int]] = {}
    for unit in ranks.units:
        rows = [ranks.buffers[unit.index, place] for place in range(len(unit.buckets))]
        layout = [(each.key, [slot.shape for slot in each.slots]) for each in unit.buckets]
        if not unit.has_rows:
            groups.setdefault(repr((layout, rows, by_unit[unit.index])), []).append(unit.index)
    units = []
    for members in groups.values():
        unit = ranks.units[members[0]]
        times, whole, cut = by_unit[unit.index]
        number = len(members)
        units.append(
            _AlikeUnits(
                unit,
                tuple(ranks.buffers[unit.index, place] for place in range(len(unit.buckets))),
                number,
                {kind: (number * times[0][kind], number * times[1][kind]) for kind in times[0]},
                (_NOTHING.plus(whole[0], number), _NOTHING.plus(whole[1], number)),
                (_NOTHING.plus(cut[0], number), _NOTHING.plus(cut[1], number)),
            )
        )
    near = near_tiers("cpu" if prices.is_cpu else "cuda")
    tables = sum(
        size
        for info in plan.registry.of_kind("table")
        for row, size in info.ledger_bytes(plan.mesh, rank).items()
        if tier_of_row(row) in near
    )
    return _StateCosts(0, tuple(units), (fixed[0], fixed[1]), tables)


def _seconds_beside(action: Action, prices: ActionPrices) -> tuple[LaneSeconds, LaneSeconds]:
    """Return the seconds of an Action beside the operations of passes and the exchanges of state, and of Python.

    Messages, and sums over ranks of a model, are left out.
    """
    row, kind, is_cpu = action.kind.row, action.kind, prices.is_cpu
    own_s = prices.python_s(kind)
    python = LaneSeconds(passes_s=own_s) if is_cpu else LaneSeconds(python_s=own_s)
    if row.of == "message" or (kind.computes and action.unit < 0) or kind is Kind.SUM:
        return _NOTHING, python
    computed_s = norm_s = exchange_s = 0.0
    for move in row.moves or ():
        if move.quantity in ("work", "saved") or (kind.computes and move.lane == "exchange"):
            continue
        if is_cpu and move.quantity.startswith("updated_on_"):
            continue  # fewer bytes have another rate, so that seconds do not grow with shards
        if move.lane == "exchange" and kind not in _SENDING:
            sent_s = sum(
                prices.exchange_s(call)
                for call in prices.sent(action)
                if kind is not Kind.NORM or call.purpose == "control"
            )
            if kind is Kind.NORM:
                norm_s += sent_s
            elif is_cpu:
                computed_s += sent_s
            else:
                exchange_s += sent_s
        elif move.lane == "compute" or (is_cpu and move.lane in ("down", "up")):
            computed_s += prices.seconds(action, move)
    if kind.updates:
        return LaneSeconds(0.0, computed_s, exchange_s, norm_s), python
    return LaneSeconds(computed_s, 0.0, exchange_s, norm_s), python


def state_key(config: RunConfig, ranks: int, mesh: Mesh) -> Hashable:
    """Return a key that configurations share whose lists differ in nothing but the number of microbatches.

    Args:
        config: The configuration of a point.
        ranks: Number of ranks.
        mesh: Its mesh.
    """
    alike = {"batch", "recompute", "tiles", "experts", "train", "data", "model", "mesh"}
    values: dict[str, Any] = config.model_dump(mode="json", exclude=alike)
    if config.pipeline.stages_per_rank == 1 and not config.pipeline.splits_backward:
        values["pipeline"].pop("schedule", None)
    values["zero"].pop("exchange", None)
    cuts = [mesh.size(axis) > 1 for axis in ("dp_replicate", "dp_shard", "edp")]
    axes = [mesh.size(axis) for axis in ("pp", "tp", "ep", "etp")]
    return ranks, *axes, *cuts, repr(sorted(values.items()))
