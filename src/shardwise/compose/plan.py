"""Plan: (model description, mesh, policies) -> a Plan of all classes of ranks. Pure: no module, no process group.

    1  stages      blocks distributed to stages along "pp"           parallel/pipeline/partition.py
    2  registry    every tensor with its placement on every axis     parallel/zero/layout.py, slices of spec.py
    3  Units       parameters that move together, per stage          names in the description
                   behind them collections of embedding tables, without buckets
    4  buckets     those of one dtype, trained or frozen, and one optimizer group, laid out flat
    5  buffers     of each bucket on the mesh                        parallel/zero/layout.py
    6  Actions     one list for each class of ranks              compose/lists.py
    7  validated                                                     plan/validate.py

Units are numbered through all stages of a rank. Their order inside a pass is that of registration until the first step
has shown the model's own (``with_orders``); tables are fetched behind the F of the innermost Unit around them.

Cost: one look at each tensor of the model and at each Action of each class; nothing per rank.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from shardwise.base.errors import PlanError
from shardwise.base.names import matching
from shardwise.base.words import bytes_text, counted
from shardwise.compose.lists import (
    Orders,
    PassSeconds,
    UnitLists,
    forward_actions_of,
    halved_stages,
    schedule_lists,
    step_actions,
    turning_stages,
)
from shardwise.compose.spec import ModelSpec, ParameterSpec
from shardwise.optim.average import EMA
from shardwise.parallel.context.choice import ContextMethod, sent_elements
from shardwise.parallel.context.choice import chosen as chosen_method
from shardwise.parallel.context.policy import ContextPolicy
from shardwise.parallel.expert.cost import expected_rows, row_bytes
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.zero import layout
from shardwise.parallel.zero.cost import widths_of
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.action import Action
from shardwise.plan.exchange import GradientExchange
from shardwise.plan.exchange_calls import crossing_bytes
from shardwise.plan.lists import is_inside
from shardwise.plan.mesh import DENSE, Mesh, StateAxes
from shardwise.plan.norm_numbers import GUARD_NUMBERS, count_phase_numbers
from shardwise.plan.placement import Partial, PerRank, Placement, Replicate
from shardwise.plan.plan import AttentionExchange, Plan, RankClass, RowExchange, class_of
from shardwise.plan.registry import Needs, Registry, TensorInfo, UpdateRule
from shardwise.plan.slices import TensorSlices
from shardwise.plan.unit import Bucket, BucketKey, Unit, lay_out
from shardwise.plan.validate import validate_plan
from shardwise.precision.policy import BucketDtypes, PrecisionPolicy
from shardwise.tiers.offload import OffloadPolicy

TABLES = "(tables)"
"""Name for the rows of all embedding tables among norms of Units; no module has parentheses in its name."""


class PlanPolicies(NamedTuple):
    """Inputs of a Plan besides model and mesh."""

    zero: ZeroPolicy
    pipeline: PipelinePolicy
    precision: PrecisionPolicy
    group_of: Callable[[str], int]
    """Function from a parameter's first name to its optimizer group."""
    updates: Sequence[UpdateRule] = (UpdateRule(),)
    """Update rule of each optimizer group."""
    microbatches: int = 1
    """Microbatches of one optimizer step."""
    tokens: int | None = None
    """Tokens of one optimizer step, over all ranks; None if unknown."""
    in_blocks: bool = False
    """True if rows go to experts with a capacity in blocks."""
    offload: OffloadPolicy = OffloadPolicy()
    blocks: Collection[str] = ()
    """Names of the blocks whose saved tensors may move."""
    exchanges: Mapping[str, GradientExchange] = MappingProxyType({})
    """The ways to sum gradients over the ranks of an axis, by axis; an axis that is left out lies on one host."""
    context: ContextPolicy = ContextPolicy()
    has_documents: bool = False
    """True if a batch says which documents its sequences are packed from."""
    cp_hosts: tuple[int, ...] = ()
    """Number of the host of each rank along "cp"; empty if all are on one host."""
    unit_norms: bool = False
    """True if each step computes the norm of each Unit's gradient."""
    rank_seconds: bool = False
    """True if each step exchanges the seconds of all ranks by phase."""
    has_guard: bool = False
    """True if each step sums the numbers of the guard."""
    pass_seconds: PassSeconds = MappingProxyType({})
    """Measured seconds of the passes of stages, from which the schedule is made; empty if they are not known."""

    def gather_dtype(self, name: str, axes: StateAxes, mesh: Mesh) -> torch.dtype | None:
        """Return the dtype in which a parameter is gathered, if that is not its compute dtype, else None.

        A weight is gathered in fp8 if it is cut and all state lies on the device, because the ranks agree on the scales
        of all weights at once, and an update on another tier runs beside the next step.

        Args:
            name: Name of the parameter.
            axes: Axes of its state.
            mesh: The mesh.
        """
        is_cut = layout.strategy_of(self.zero, mesh, axes).cuts_weight
        stays = self.offload.optimizer == self.offload.parameters == "device"
        return self.precision.gather_dtype(name) if is_cut and stays else None


@dataclass(frozen=True)
class PlannedModel:
    """A Plan and its inputs."""

    spec: ModelSpec
    policies: PlanPolicies
    plan: Plan

    def in_order(self, orders: Orders, microbatches: int | None = None) -> Plan:
        """Return the Plan with other orders of Units, or another number of microbatches.

        Args:
            orders: Orders of the stages that differ from that of registration.
            microbatches: Microbatches of one optimizer step; None: as before.
        """
        policies = self.policies
        if microbatches is not None:
            policies = policies._replace(microbatches=microbatches)
        return with_orders(self.plan, policies, orders)

    def with_seconds(self, measured: PassSeconds) -> "PlannedModel":
        """Return the same model with a schedule that is made from measured seconds of passes.

        Args:
            measured: Seconds of the passes of all stages, the same on all ranks.
        """
        policies = self.policies._replace(pass_seconds=measured)
        return replace(self, policies=policies, plan=with_orders(self.plan, policies))

    def forward_list(self, orders: Orders, batches: int) -> list[Action]:
        """Return the Actions of this rank for forward passes without a backward pass.

        Args:
            orders: Orders of the stages that differ from that of registration.
            batches: Number of forward passes.
        """
        zero, pipeline, *_ = self.policies
        return forward_actions_of(self.plan, pipeline, zero, orders, batches)

    @cached_property
    def lists(self) -> UnitLists:
        """The maker of the lists of single passes of this rank."""
        return UnitLists(self.plan.own, self.policies.zero)


def make_plan(spec: ModelSpec, mesh: Mesh, policies: PlanPolicies, rank: int = 0) -> Plan:
    """Return the Plan of all ranks of ``mesh``.

    Args:
        spec: Description of the model.
        mesh: The mesh.
        policies: Other inputs of the Plan.
        rank: Rank whose view the Plan shows.

    Raises:
        PlanError: if the model cannot be cut so.
    """
    if mesh.tp > 1 and not spec.slices:
        raise PlanError(
            f"tensor: mesh.tp is {mesh.tp}, but the model's description does not say how to cut it"
        )
    mesh, why = context_mesh(spec, mesh, policies)
    starts = spec.stage_starts(policies.pipeline, mesh.pp)
    stage_of = spec.stages(starts)
    registry = _registry(spec, stage_of, mesh, policies)
    classes = {}
    rows = schedule_lists(mesh.pp, policies.microbatches, policies.pipeline)
    for place in range(mesh.pp):
        own = mesh.places.stages_of(place, len(starts) + 1)
        classes[class_of(mesh, mesh.ranks("pp", 0)[place])] = _class(
            spec, stage_of, own, registry, mesh, policies, _turning(policies, rows[place])
        )
    halved = halved_stages(rows)
    if halved:
        classes = {
            name: replace(each, later_units=_later_units(spec, each, halved))
            for name, each in classes.items()
        }
    exchanges: tuple[RowExchange | AttentionExchange, ...] = (
        *attention_exchanges(spec, mesh, policies, rank),
        *exchanges_of(spec, mesh, registry, in_blocks=policies.in_blocks),
    )
    notes = (
        *_notes(spec, mesh, policies),
        *_notes_of_partition(spec, mesh, policies.pipeline),
        *why,
        *_notes_of_hosts(classes.values()),
        *_notes_of_whole_sums(classes.values(), policies.exchanges),
        *_notes_of_later(spec, classes),
    )
    plan = Plan(mesh, registry, classes, rank, notes, exchanges, policies.tokens, spec.experts_of)
    monitored = len(measured_titles(spec, policies.zero)) if policies.unit_norms else 0
    monitored += count_phase_numbers(mesh.world_size) if policies.rank_seconds else 0
    monitored += GUARD_NUMBERS if policies.has_guard else 0
    plan = replace(plan, monitored=monitored) if monitored else plan
    return with_orders(plan, policies)


def _turning(policies: PlanPolicies, row: Sequence[Action]) -> frozenset[int]:
    """Return ``turning_stages``, of which a schedule that may be made anew by measured seconds has none."""
    return frozenset() if policies.pipeline.schedule == "zb_greedy" else turning_stages(row)


def context_mesh(spec: ModelSpec, mesh: Mesh, policies: PlanPolicies) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh with the ranks that exchange heads for tokens, and notes on the choice of the method.

    Args:
        spec: Description of the model.
        mesh: The mesh.
        policies: Other inputs of the Plan.
    """
    facts = spec.attention
    if mesh.cp == 1 or facts is None:
        return mesh, ()
    layers = tuple(facts.layers.values())
    policy = policies.context
    if policies.has_documents and policy.method == "auto" and policy.ulysses is None:
        method, why = ContextMethod(), "which sends least for documents, known only when batches come"
    else:
        method, why = chosen_method(policy, layers, facts.tokens, mesh.cp, facts.parts, policies.cp_hosts)
    note = f"context: {method.name(mesh.cp)} over cp={mesh.cp}, {why}"
    return replace(mesh, cp_heads=method.heads), (note,)


def attention_exchanges(
    spec: ModelSpec, mesh: Mesh, policies: PlanPolicies, rank: int
) -> tuple[AttentionExchange, ...]:
    """Return what ``rank`` sends for each attention layer of the model, if "cp" has several ranks.

    Args:
        spec: Description of the model.
        mesh: The mesh, with the ranks that exchange heads.
        policies: Other inputs of the Plan.
        rank: The rank.
    """
    facts = spec.attention
    if mesh.cp == 1 or facts is None:
        return ()
    method = ContextMethod("ring" if policies.context.method == "ring" else "planned", mesh.cp_heads)
    place = mesh.index("cp", rank)
    found = []
    for name, layer in facts.layers.items():
        sent = sent_elements(method, layer, facts.tokens, mesh.cp, facts.parts)[place]
        found.append(AttentionExchange(name, method.name(mesh.cp), facts.tokens, sent.forward, sent.backward))
    return tuple(found)


def with_orders(plan: Plan, policies: PlanPolicies, orders: Orders | None = None) -> Plan:
    """Return ``plan`` with its lists made anew and validated.

    Args:
        plan: The Plan.
        policies: Inputs of the Plan.
        orders: Orders of stages, if known; others are in the order of registration.

    Raises:
        PlanError: if the lists are not valid.
    """
    rows = schedule_lists(plan.mesh.pp, policies.microbatches, policies.pipeline, policies.pass_seconds)
    classes = {
        name: replace(
            each,
            actions=step_actions(
                each, rows[place], plan, policies.zero, policies.offload.buffers, orders or {}
            ),
        )
        for place, (name, each) in enumerate(plan.classes.items())
    }
    made = replace(plan, classes=classes)
    validate_plan(made, policies.microbatches)
    return made


# What ranks hold ---------------------------------------------------------------------------------------------------


def _registry(spec: ModelSpec, stage_of: Mapping[str, int], mesh: Mesh, policies: PlanPolicies) -> Registry:
    """Return a registry of every persistent tensor with its placement on every axis."""
    registry = Registry(mesh)
    for parameter in spec.parameters.values():
        stages = tuple(sorted({stage_of[name] for name in (parameter.name, *parameter.aliases)}))
        for tensor in _tensors_of(parameter, spec, stages, mesh, policies):
            registry.add(tensor)
    for name, buffer in spec.buffers.items():
        # Statistics follow the batches of their rank, and most other buffers may differ too.
        own: dict[str, Placement] = {} if name in spec.shared_buffers else dict.fromkeys(DENSE, PerRank())
        dtype = policies.precision.buffer_dtype(name, buffer.dtype)
        needs: Needs = "loads" if name in spec.load_buffers else "elements"
        stages = (stage_of[name],)
        registry.add(TensorInfo(name, buffer.shape, dtype, "buffer", own, stages=stages, needs=needs))
    return registry


def _tensors_of(
    parameter: ParameterSpec, spec: ModelSpec, stages: tuple[int, ...], mesh: Mesh, policies: PlanPolicies
) -> Iterator[TensorInfo]:
    """Yield the parameter itself and, if it is trained, its gradient, its master and its moments.

    Raises:
        PlanError: if the parameter's update rule or the form of its state does not fit the parameter.
    """
    name, shape, dtype, trained, aliases = parameter
    dtypes = policies.precision.dtypes(name, dtype)
    moments, needs, wire = policies.updates[policies.group_of(name)] if trained else UpdateRule()
    if needs == "matrix" and (len(shape) != 2 or spec.is_of_experts(name)):
        what = ", one row an expert" * spec.is_of_experts(name)
        raise PlanError(
            f"optimizer: {name!r} has the shape {list(shape)}{what}, but its rule updates matrices of two dims; "
            "give it to another rule (AdamW, say), by a group or an optimizer of its own"
        )
    if moments and policies.offload.state != "fp32" and dtypes.master != torch.float32:
        raise PlanError(
            f"offload.state: {policies.offload.state}: the master of {name!r} is {dtypes.master}, and what is "
            "rounded so is computed in fp32; leave offload.state out, or keep masters in fp32"
        )
    axes = spec.state_axes(name)
    strategy = layout.strategy_of(policies.zero, mesh, axes)
    places = {axis: place for axis, place in spec.slices.get(name, {}).items() if mesh.size(axis) > 1}
    cut = {a: place.placement for a, place in places.items() if not isinstance(place.placement, Replicate)}
    rows = layout.buffers(strategy, dtypes, trained, moments)
    placed = {row.kind: {**row.placement, **cut} for row in rows}
    gradient: dict[str, Placement] = dict.fromkeys(axes, Partial())
    gradient |= {axis: place.gradient for axis, place in places.items()}
    tensor = partial(TensorInfo, name, shape, axes=axes, stages=stages)
    yield tensor(dtypes.compute, "parameter", placed["weight"], gradient, aliases=aliases)
    if trained:
        master = {**dict(zip(strategy.axes, strategy.master, strict=True)), **cut}
        yield tensor(dtypes.grad, "gradient", placed["grad"], gradient)
        yield tensor(dtypes.master, "master", master, needs=needs, wire=wire)
        for moment in moments:
            yield tensor(dtypes.master, "moment", master, label=moment)


def _class(
    spec: ModelSpec,
    stage_of: Mapping[str, int],
    stages: tuple[int, ...],
    registry: Registry,
    mesh: Mesh,
    policies: PlanPolicies,
    turning: frozenset[int],
) -> RankClass:
    """Return the class of ranks that hold ``stages``, without Actions; ``turning`` as in ``RankClass``."""
    slices = TensorSlices(registry, mesh, 0)
    units: list[Unit] = []
    unit_stages: list[int] = []
    held: dict[tuple[int, int], BucketDtypes] = {}
    for stage in stages:
        for name, members in _units_on(spec, stage_of, stage, policies.zero.external_parameters):
            buckets: list[Bucket] = []
            axes = _state_axes(name, members, spec)
            for key, dtypes, names in _grouped(members, spec, registry, policies):
                slots = []
                for each in names:
                    info = registry.get("parameter", each)
                    slots.append((each, slices.local_shape(info), info.aliases))
                held[len(units), len(buckets)] = dtypes
                buckets.append(lay_out(key, slots, mesh.size(axes[1])))
            units.append(Unit(len(units), name, tuple(buckets)))
            unit_stages.append(stage)
    for name in spec.tables:
        if stage_of[name] in stages:
            units.append(Unit(len(units), name, (), has_rows=True))
            unit_stages.append(stage_of[name])
    # A gradient may leave the device only if no sum over ranks of the model follows its reduction.
    leaves = not slices.shares_gradients(stages)
    moving = _moving_activations(units, unit_stages, policies.blocks, turning)
    strategies = layout.strategies_of(
        policies.zero, mesh, units, policies.offload, leaves, moving, policies.exchanges
    )
    buffers = {}
    for (unit, place), dtypes in held.items():
        key = units[unit].buckets[place].key
        moments = policies.updates[key.optimizer_group].moments
        form = policies.offload.state
        buffers[unit, place] = layout.buffers(
            strategies[unit], dtypes, key.trained, moments, form, exact=(EMA,)
        )
    under_way = policies.zero.reductions_under_way
    return RankClass(
        stages,
        tuple(units),
        tuple(unit_stages),
        tuple(strategies),
        buffers,
        0 if under_way == "auto" else int(under_way),
        turning_stages=turning,
    )


def _later_units(spec: ModelSpec, ranks: RankClass, halved: Collection[int]) -> frozenset[int]:
    """Return the Units of stages in ``halved`` with trained weights whose gradients wait for W."""
    return frozenset(
        unit.index
        for unit in ranks.units
        if ranks.unit_stages[unit.index] in halved
        and any(
            slot.name in spec.products and bucket.key.trained
            for bucket in unit.buckets
            for slot in bucket.slots
        )
    )


def _notes_of_later(spec: ModelSpec, classes: Mapping[str, RankClass]) -> Iterator[str]:
    """Yield the matrices whose gradients do not wait for W although the schedule has W."""
    if not any(each.later_units for each in classes.values()):
        return
    at_once = [
        name
        for name, each in spec.parameters.items()
        if each.trained and len(each.shape) > 1 and name not in spec.products
    ]
    if at_once:
        more = " ..." if len(at_once) > 4 else ""
        yield (
            f"computed in I, not in W: the gradients of {', '.join(at_once[:4])}{more}, which are no weights of plain "
            "linear layers or stacked experts, or are tied, compiled, in fp8 or have hooks of their own"
        )


def _moving_activations(
    units: Sequence[Unit], unit_stages: Sequence[int], blocks: Collection[str], turning: Collection[int]
) -> set[int]:
    """Return the Units whose saved activations may move: blocks, but for the last one of a stage in ``turning``."""
    moving: set[int] = set()
    for stage in set(unit_stages):
        here = [unit for unit, at in zip(units, unit_stages, strict=True) if at == stage]
        saving = [unit.index for unit in here if unit.name in blocks]
        moving.update(saving[:-1] if stage in turning else saving)
    return moving


def _state_axes(unit: str, members: Sequence[str], spec: ModelSpec) -> StateAxes:
    """Return the state axes of all parameters of one Unit; raise PlanError if they differ.

    A Unit is reduced at one time, so all its parameters need the same axes.
    """
    by_axes = {spec.state_axes(name): name for name in members}
    if len(by_axes) > 1:
        raise PlanError(
            f"zero: the Unit {unit or '(root)'!r} holds {' and '.join(map(repr, by_axes.values()))}, but an expert's "
            "state lies on other ranks than the rest; leave experts out of zero.external_parameters, and use each "
            "stack inside its own module alone"
        )
    return next(iter(by_axes), DENSE)


def _units_on(
    spec: ModelSpec, stage_of: Mapping[str, int], stage: int, external_parameters: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Return the Units of one stage in order of registration, the root first, with their parameters' first names.

    Units without parameters are left out, except the root. A parameter that several modules of the stage hold belongs
    to the innermost Unit that contains them all, so that its window covers every use; a parameter that
    ``external_parameters`` matches belongs to the root.
    """
    here: dict[str, list[str]] = {}
    for name, first in spec.canonical.items():
        if stage_of[name] == stage:
            here.setdefault(first, []).append(name)
    held: dict[str, list[str]] = {name: [] for name in ("", *spec.units)}
    for first, names in here.items():
        is_the_roots = any(matching(names, pattern) for pattern in external_parameters)
        around = [""] if is_the_roots else [u for u in held if all(is_inside(name, u) for name in names)]
        held[max(around, key=len)].append(first)
    return [(name, members) for name, members in held.items() if members or not name]


def titles_of_units(planned: PlannedModel) -> dict[str, str]:
    """Return the title of the Unit of each parameter of the whole model, on any stage, in order of Units.

    A parameter that several stages hold belongs to the Unit that it would have on one.
    """
    return _titles(planned.spec, planned.policies.zero)


def measured_titles(spec: ModelSpec, zero: ZeroPolicy) -> list[str]:
    """Return the titles of the trained Units of the whole model, and ``TABLES`` behind them if it has tables."""
    titles = _titles(spec, zero)
    trained = (title for name, title in titles.items() if spec.parameters[name].trained)
    return [*dict.fromkeys(trained), *([TABLES] if spec.tables else [])]


def _titles(spec: ModelSpec, zero: ZeroPolicy) -> dict[str, str]:
    units = _units_on(spec, dict.fromkeys(spec.canonical, 0), 0, zero.external_parameters)
    return {name: Unit(-1, unit, ()).title for unit, members in units for name in members}


def _grouped(
    names: Sequence[str], spec: ModelSpec, registry: Registry, policies: PlanPolicies
) -> list[tuple[BucketKey, BucketDtypes, list[str]]]:
    """Return the parameters of one Unit by bucket."""
    groups: dict[BucketKey, list[str]] = {}
    dtypes: dict[BucketKey, BucketDtypes] = {}
    for name in names:
        entry = spec.parameters[name]
        own = policies.precision.dtypes(name, entry.dtype)
        tie = name if entry.trained and len(registry.get("parameter", name).stages) > 1 else ""
        group = policies.group_of(name) if entry.trained else 0
        axes = spec.state_axes(name)
        gathered = policies.gather_dtype(name, axes, registry.mesh)
        key = BucketKey(own.compute, entry.trained, group, tie, own.reduce, axes, own.grad, gathered)
        groups.setdefault(key, []).append(name)
        dtypes[key] = own
    return [(key, dtypes[key], members) for key, members in groups.items()]


def dtypes_of(bucket: Bucket, spec: ModelSpec, precision: PrecisionPolicy) -> BucketDtypes:
    """Return the dtypes of the buffers of a bucket.

    Args:
        bucket: The bucket.
        spec: Description of the model.
        precision: Keys under ``precision:``.
    """
    last = spec.parameters[bucket.slots[-1].name]
    return precision.dtypes(last.name, last.dtype)


def exchanges_of(
    spec: ModelSpec, mesh: Mesh, registry: Registry, hosts: int = 1, in_blocks: bool = False
) -> tuple[RowExchange, ...]:
    """Return the rows that each mixture sends along "ep"; rows have the dtype in which the experts compute.

    Args:
        spec: Description of the model.
        mesh: The mesh.
        registry: The registered tensors.
        hosts: Number of hosts, for exchanges in two levels.
        in_blocks: True if experts with a capacity get rows in blocks.
    """
    if mesh.ep == 1:
        return ()
    parameters = registry.of_kind("parameter")
    found = []
    for name, (experts, top_k, width, capacity) in spec.experts.items():
        capacity = capacity if in_blocks else None
        stack = f"{name}.experts." if name else "experts."
        itemsize = next(info.dtype.itemsize for info in parameters if info.name.startswith(stack))
        rows, crossing = (
            expected_rows(1, top_k, experts, mesh.ep, hosts, capacity),
            expected_rows(1, top_k, experts, hosts, capacity=capacity),
        )
        sent = row_bytes(width, top_k, itemsize)
        found.append(RowExchange(name, experts, top_k, rows, sent, crossing, capacity is not None))
    return tuple(found)


def _notes_of_hosts(classes: Iterable[RankClass]) -> Iterator[str]:
    """Yield what ranks send to other hosts to sum gradients, by the way in which they do it."""
    crossing: Counter[tuple[str, str, int]] = Counter()
    for each in classes:
        for unit, strategy in zip(each.units, each.strategies, strict=True):
            exchange = strategy.exchange
            for bucket in unit.buckets if strategy.cuts_master and exchange.hosts > 1 else ():
                if bucket.key.trained:
                    widths = widths_of(bucket.key, strategy)
                    key = (strategy.axes[1], exchange.way(widths), exchange.hosts)
                    crossing[key] += exchange.crossing_bytes(bucket.elements, widths)
    for (axis, way, hosts), nbytes in crossing.items():
        yield (
            f"zero.exchange: {way} sums gradients along {axis!r} over {hosts} hosts; {bytes_text(nbytes)} leave a host "
            "for each sum of all Units"
        )


def _notes_of_partition(spec: ModelSpec, mesh: Mesh, policy: PipelinePolicy) -> Iterator[str]:
    """Yield what stages are cut by, if measured seconds are asked for."""
    if mesh.pp > 1 and policy.partition == "measured" and spec.blocks is not None:
        found = spec.blocks.seconds is not None
        yield (
            f"pipeline.partition: measured: stages are cut by the seconds in {policy.seconds}"
            if found
            else f"pipeline.partition: measured: there is no {policy.seconds} yet, so stages are cut by parameters; "
            "the second step is measured and written there, and the next run cuts by it"
        )


def _notes_of_whole_sums(
    classes: Iterable[RankClass], exchanges: Mapping[str, GradientExchange]
) -> Iterator[str]:
    """Yield what CPU ranks send to other hosts to sum gradients that every rank keeps whole.

    Args:
        classes: The classes of ranks.
        exchanges: The ranks of each axis as they lie on hosts.
    """
    crossing: Counter[tuple[str, int]] = Counter()
    for each in classes:
        for unit, strategy in zip(each.units, each.strategies, strict=True):
            lying = exchanges.get(strategy.axes[1], GradientExchange())
            if strategy.cuts_master or lying.hosts == 1 or lying.is_native:
                continue
            for bucket in unit.buckets:
                if bucket.key.trained:
                    wire = (bucket.key.reduce_dtype or bucket.key.dtype).itemsize
                    sent = crossing_bytes("all_reduce", bucket.elements, wire, lying.hosts)
                    crossing[strategy.axes[1], lying.hosts] += sent
    for (axis, hosts), nbytes in crossing.items():
        yield (
            f"zero.stage 0: all-reduces sum gradients along {axis!r} over {hosts} hosts; {bytes_text(nbytes)} leave a "
            "host for each sum of all Units"
        )


def _notes(spec: ModelSpec, mesh: Mesh, policies: PlanPolicies) -> tuple[str, ...]:
    notes, zero, offload = [], policies.zero, policies.offload
    if zero.units == "auto":
        blocks = sum(name.rpartition(".")[2].isdecimal() for name in spec.units)
        beside = len(spec.units) - blocks
        others = f" and {counted(beside, 'module')} beside them" if beside else ""
        notes.append(
            f"{counted(blocks, 'repeated block')}{others} became Units; what lies outside them belongs to the root"
            if spec.units
            else "no repeated blocks found: the whole model is one Unit (name modules in zero.units to cut it)"
        )
    tied = [alias for entry in spec.parameters.values() for alias in entry.aliases]
    if tied:
        notes.append(
            f"tied: {', '.join(tied[:4])}{' ...' if len(tied) > 4 else ''} share another parameter's slot"
        )
    in_fp8 = policies.precision.fp8_layers
    if in_fp8:
        gathers = policies.gather_dtype(f"{in_fp8[0]}.weight", DENSE, mesh) is not None
        verb, more = "multiply" if len(in_fp8) > 1 else "multiplies", " ..." if len(in_fp8) > 4 else ""
        travel = ", and their weights are gathered in fp8" if gathers else ""
        layers = counted(len(in_fp8), "linear layer")
        notes.append(f"{layers} {verb} in fp8: {', '.join(in_fp8[:4])}{more}{travel}")
    if (
        zero.stage in (1, 2)
        and mesh.dp_shard > 1
        and offload.optimizer != "device"
        and offload.step == "before_use"
    ):
        notes.append(
            f"offload.optimizer: {offload.optimizer}: at stage {zero.stage} ranks send each other what they have "
            "updated in the step's end, which waits for it; at zero.stage 3 updates hide behind the next forward pass"
        )
    return tuple(notes)
