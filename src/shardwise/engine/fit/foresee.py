"""Foresee: the Plan and the memory of a job, computed by one process before the job runs.

The Plan is made from the model's description, as in ``build``. The model is also cut, on meta, for one rank of each
pipeline stage, with groups that have ranks and no transport, so that models which cannot be cut are refused. Only names
and shapes take memory, whatever the size of the job.

The Plan gives the bytes of model state (weights, gradients, masters, moments, padding included). With an example batch
the cut model runs one pass on shapes, with all changes to its modules (tiles, recomputation, casts). Walking the Plan's
list with the tensors of that pass gives the peak of a step, by row (simulate/). On a device, the driver, communicators
and the allocator's holes are added to the peak (outside.py).
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.base.errors import CheckpointError
from shardwise.base.words import bytes_text
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.steps import CheckpointFolder, open_step, steps_at
from shardwise.comm.collectives import Group
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.transports import NoTransport, Transport
from shardwise.compose.describe import describe, describe_cut
from shardwise.compose.module_steps import (
    CutRanks,
    ModelCut,
    RunStage,
    Stages,
    apply_to_model,
    defer_products,
    recompute_blocks,
)
from shardwise.compose.plan import PlanPolicies, make_plan
from shardwise.compose.spec import ModelSpec
from shardwise.config.auto import resolve
from shardwise.config.run import InitFromPolicy, RunConfig, load
from shardwise.engine.construction.outline import cut_policies_of, policies_of, with_fp8_layers
from shardwise.engine.construction.recipe import recipe_of
from shardwise.engine.construction.site import groups_of_context
from shardwise.engine.fit.beside_steps import (
    buffer_bytes,
    load_rows,
    ring_bytes,
    rows_of_build,
    save_copy_bytes,
    table_bytes_at_save,
)
from shardwise.engine.fit.hosts import cp_hosts, exchanges_on_hosts
from shardwise.engine.fit.outside import TABLES_ROW, small_share, with_outside
from shardwise.engine.fit.table_code import load_table_code
from shardwise.engine.parts.inputs import Loss, call_model, cast_at_the_root, find_loss
from shardwise.engine.parts.named import check_named, methods_of
from shardwise.engine.parts.tables import (
    ModelTables,
    check_mesh,
    chosen_for,
    register_tables,
    tables_of,
)
from shardwise.engine.state.differences import StepDifferences
from shardwise.engine.state.saving import compare, moments_of
from shardwise.engine.state.start_weights import start_weights
from shardwise.engine.step.check import compared_bytes
from shardwise.kernels.crc import crc32
from shardwise.kernels.deferred import ProductQueue
from shardwise.kernels.philox import words
from shardwise.models import GptPolicy
from shardwise.models.cache import KeyValueCache
from shardwise.models.generate import choose
from shardwise.observe.flops import is_repeated
from shardwise.observe.memory import resident_bytes
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.expert.stacks import find_stacks
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.messages import pack, unpack
from shardwise.parallel.pipeline.stage_module import kind_of
from shardwise.parallel.zero.modules import repeated_blocks
from shardwise.passes.recompute import chosen
from shardwise.passes.replay import BatchPosition, DrawReplay
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Tier
from shardwise.plan.plan import Plan, RankClass, class_of
from shardwise.plan.unit import Unit
from shardwise.precision.operations import OperationDtypes
from shardwise.precision.policy import PrecisionPolicy
from shardwise.precision.resolve import resolved
from shardwise.simulate.exchanges import ExchangeRecord
from shardwise.simulate.exchanges import message as calls_of
from shardwise.simulate.lookups import loads_of
from shardwise.simulate.passes import (
    LaterProducts,
    MeasuredPass,
    NeedsNumbersError,
    UnitPass,
    measure,
    measure_evaluation,
    strip,
    stripped,
    without_numbers,
)
from shardwise.simulate.target_kernels import kernels_like
from shardwise.simulate.timeline import MemoryPoint, RowsBesideSteps, StepMemory, step_memory
from shardwise.simulate.why import MemoryReason, reasons
from shardwise.tiers.activations import check_blocks
from shardwise.tiers.alike import AlikeStorages
from shardwise.tiers.offload import OffloadPolicy

_PROMPT_TOKENS = 16
"""Tokens of the prompt of a sample, if the configuration has none (cli/text_trainer.py)."""


class MemoryEstimate(NamedTuple):
    """The Plan of a job, and the memory that its ranks need."""

    plan: Plan
    """The Plan of all ranks."""
    steps: tuple[StepMemory, ...] = ()
    """Memory of a step on the first rank of each index on "pp"; empty without an example."""
    flops: int = 0
    """Floating-point operations executed in a microbatch on one rank of each index on "pp"; 0 without an example."""
    assumes: tuple[str, ...] = ()
    """Assumptions, as sentences, about what only the values of tensors would decide."""

    @property
    def step(self) -> StepMemory | None:
        """Memory of a step on the rank that needs the most device memory; None without an example."""
        return max(self.steps, key=lambda step: step.bytes_by_tier["device"], default=None)

    @property
    def bytes_by_tier(self) -> dict[Tier, int]:
        """The largest number of bytes of each tier that any rank needs in a step."""
        tiers = {tier for step in self.steps for tier in step.bytes_by_tier}
        return {
            tier: max(step.bytes_by_tier.get(tier, 0) for step in self.steps)
            for tier in get_args(Tier)
            if tier in tiers
        }

    def rows(self, step: StepMemory) -> dict[str, int]:
        """Return the bytes that ``engine.held_bytes()`` is to have on the rank of ``step``, by row, and rows beside it.

        Model state is counted at its most, the rows of a step when the step holds most, and the copy of a save if
        there are saves. Slots of shards that come from another tier are part of the gathered weights, as in the ledger.
        """
        found = dict(step.points["step"].rows) | self.plan.bytes_per_rank(step.rank)
        found["gathered"] = found.get("gathered", 0) + found.pop("brought", 0)
        if step.saves and "save" in step.points:
            found["save"] = step.points["save"].rows.get("save", 0)
        return {row: size for row, size in found.items() if size}

    def bytes_per_rank(self) -> dict[str, int]:
        """Return the bytes of model state by kind, on the rank that holds most.

        Dynamic tables are counted as full; dynamic tables without a limit are left out.
        """
        found: list[dict[str, int]] = []
        plan, mesh = self.plan, self.plan.mesh
        has_tables = bool(plan.registry.of_kind("table"))
        for first in mesh.ranks("pp", 0):
            found += map(plan.bytes_per_rank, mesh.ranks("dp", first) if has_tables else (first,))
        return max(found, key=lambda kinds: sum(kinds.values()))


def foresee(
    make: Callable[[], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    ranks: int = 1,
    device: torch.device | None = None,
    *,
    example: Any = None,
    loss: Loss | None = None,
) -> MemoryEstimate:
    """Return the Plan of a job, and the memory that its ranks need.

    Args:
        make: function that builds the model anew each time, on meta or not.
        config: the configuration, as ``initialize`` takes it.
        ranks: number of ranks of the job.
        device: device of the ranks; None: CPU.
        example: a microbatch, or tensors of its shapes, with which the outlook includes the memory of a step; None:
            no memory of a step.
        loss: the loss function, as ``initialize`` takes it.

    Raises:
        ShardwiseError: as ``initialize``, for everything that does not depend on weights or messages.
    """
    device = device or torch.device("cpu")
    known = read(make, config, ranks, device, example, loss)
    found = known.outlook(known.settings.offload)
    if not known.passed:  # else the stages were cut for their passes
        kinds = kinds_of_stages(found.plan, make(), ())
        for rank in sorted(known.mesh.places.of_each(first_stages(kinds))):
            _cut(make(), known.starts, known.settings, known.mesh, known.mesh.ranks("pp", 0)[rank])
    return found


class JobFacts(NamedTuple):
    """Everything about a job that its outlook depends on, except the tiers of state."""

    settings: RunConfig
    mesh: Mesh
    spec: ModelSpec
    policies: PlanPolicies
    starts: tuple[str, ...]
    """Names at which pipeline stages begin, without the first stage."""
    tables: ModelTables
    blocks: Sequence[str]
    device: torch.device
    passed: Mapping[int, MeasuredPass]
    """Measurements of one microbatch, by stage; empty without an example."""
    has_experts: bool
    process_bytes: int
    """Bytes in a rank's memory beside the engine; on CPU ranks, those of this process when it was measured."""
    draws: bool = False
    """True if start weights are drawn, because the model is on meta."""
    given_bytes: int = 0
    """Bytes of the parameters of a model that comes with its weights."""
    unforeseen: str = ""
    """Sentence on why an example gave no pass; empty if there is a pass, or no example."""
    per_host: int | None = None
    """Ranks of one host; None: all ranks lie on one host."""

    def policies_with(self, offload: OffloadPolicy) -> PlanPolicies:
        """Return the policies of the Plan with this offload policy."""
        return self.policies._replace(offload=offload)

    def outlook(self, offload: OffloadPolicy, only_counted: bool = False) -> "MemoryEstimate":
        """Return the outlook with state and activations on the tiers of ``offload``.

        Args:
            offload: The tiers.
            only_counted: True to leave out saves and loads if they do not count for the peak.

        Raises:
            ConfigError: if ``offload`` does not suit the job.
            PlanError: if no Plan can be made.
        """
        policies = self.policies_with(offload)
        plan = make_plan(self.spec, self.mesh, policies)
        register_tables(plan, self.tables, policies.microbatches)
        plan = replace(plan, notes=(*plan.notes, *self.tables.choices))
        if not self.passed:
            return MemoryEstimate(plan, assumes=(self.unforeseen,) if self.unforeseen else ())
        on, small = self.device.type, small_share(self.passed.values())
        steps = (
            with_outside(
                step_memory(
                    plan, policies, self.passed, on, rank, self.rows_beside(plan, rank, only_counted)
                ),
                plan,
                on,
                small,
            )
            for rank in plan.mesh.ranks("pp", 0)
        )
        return MemoryEstimate(
            plan, tuple(steps), sum(each.flops for each in self.passed.values()), self._assumptions()
        )

    def rows_beside(self, plan: Plan, rank: int, only_counted: bool = False) -> RowsBesideSteps:
        """Return the rows of a rank's memory outside of its passes.

        Args:
            plan: The Plan.
            rank: The rank.
            only_counted: True to leave out saves and loads if they do not count for the peak.
        """
        is_host = self.device.type == "cpu"
        shares = is_host and self.settings.comm.transport != "torch"
        rings = ring_bytes(plan, rank) if shares else 0
        always = {"process": self.process_bytes, "buffers": buffer_bytes(plan, rank), "rings": rings}
        policy = self.settings.checkpoint
        build = rows_of_build(plan, rank, self.draws, self.given_bytes)
        always = {row: size for row, size in always.items() if size}
        if only_counted and policy.every is None:
            return RowsBesideSteps(always=always, build=build)
        unsaved = [name for name, buffer in self.spec.buffers.items() if not buffer[2]]
        copy = save_copy_bytes(plan, rank, unsaved) if policy.asynchronous else 0
        return RowsBesideSteps(
            always=always,
            build=build,
            save={"save": copy, TABLES_ROW: table_bytes_at_save(plan, rank)},
            load=load_rows(plan, rank),
            saves=policy.every is not None,
        )

    def reasons(
        self, plan: Plan, step: StepMemory, point: MemoryPoint | None = None
    ) -> tuple[MemoryReason, ...]:
        """Return the composition of a rank's memory at one moment, the largest entries first.

        Args:
            plan: The Plan of an outlook of this job.
            step: Memory of a rank in that outlook.
            point: Moment of a phase of ``step``; None: its peak.
        """
        policies = self.policies_with(self.settings.offload)
        rank, point = step.rank, point or step.peak
        beside = self.rows_beside(plan, rank)
        return reasons(plan, policies, self.passed, self.device.type, point, rank, beside)

    def _assumptions(self) -> tuple[str, ...]:
        found = []
        if self.device.type == "cuda":
            found.append(
                "kernels: those that torch and this package choose on CUDA with Triton; what a kernel allocates and "
                "frees inside itself is not counted"
            )
        elif self.device.type != "cpu":
            found.append(f"kernels: those of a CPU; what {self.device.type} chooses is not known")
        if self.tables:
            found.append(
                "tables: every rank's batches have as many keys as the example, other keys on every rank, spread "
                "evenly over the ranks that hold rows"
            )
            if self.device.type != "cpu":
                found.append("tables: keys, their indices and rows on the way are not counted in memory")
        return (*found, *self._assumptions_of_experts(), *self._assumptions_of_settings())

    def _assumptions_of_settings(self) -> tuple[str, ...]:
        found = []
        is_cut = self.mesh.size("model") * self.mesh.ep * self.mesh.etp > 1
        if self.settings.check_first_step == "auto" and is_cut and not self.tables:
            size = bytes_text(compared_bytes(self.spec.parameters.values()))
            found.append(
                f"check_first_step: the comparison of the first step with the uncut model holds {size} and a pass of "
                "the whole model, once, if four times as much is free; not counted in memory"
            )
        if self.settings.compile.scope != "none":
            found.append(
                "compile: blocks are counted and priced as if they were not compiled; compiled code keeps and fuses "
                "what torch.compile chooses"
            )
        return tuple(found)

    def _assumptions_of_experts(self) -> tuple[str, ...]:
        if not self.has_experts:
            return ()
        policy = self.settings.experts
        if policy.exchange == "blocks" and self.mesh.ep > 1:
            return ("experts: rows fill the blocks that the routers' capacity allows, whatever is chosen",)
        at_once = "" if policy.rows is None else f", {policy.rows} pairs at most on a rank at once"
        return (
            f"experts: as where routers choose evenly{at_once}; what a skewed one sends to a rank comes on top",
        )


def read(
    make: Callable[[], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    ranks: int,
    device: torch.device,
    example: Any = None,
    loss: Loss | None = None,
    per_host: int | None = None,
) -> JobFacts:
    """Return everything about a job that does not depend on tiers.

    Args:
        make: function that builds the model, on meta or not.
        config: the configuration, as ``initialize`` takes it.
        ranks: number of ranks of the job.
        device: device of the ranks.
        example: a microbatch, or tensors of its shapes, or None.
        loss: the loss function, as ``initialize`` takes it.
        per_host: ranks of one host; None: all ranks lie on one host.

    Raises:
        ShardwiseError: as ``foresee``, except for errors of cutting the model.
    """
    settings, mesh, _ = resolve(load(config), ranks, device.type)
    model = make()
    check_named(model, settings)
    check_mesh(model, mesh, settings)
    described = describe_cut(model, mesh, settings.zero, settings.tensor, settings.pipeline)
    spec = described.spec
    methods_of({name: model.get_submodule(name) for name in ("", *spec.units)}, settings, mesh)
    blocks = repeated_blocks(model) or spec.units
    to_recompute = chosen(blocks, settings.recompute)
    if settings.init_from is not None:
        _check_start(model, settings, settings.init_from)
    recipe = recipe_of(model, settings)
    precision = resolved(settings.precision, model)[0]
    settings = settings.model_copy(update={"precision": precision})
    settings = with_fp8_layers(settings, model, spec)
    precision = settings.precision
    policies = policies_of(settings, recipe.group_of(model, spec), recipe.updates, blocks)
    hosts = exchanges_on_hosts(mesh, settings.zero.exchange, per_host, device.type)
    policies = policies._replace(exchanges=hosts, cp_hosts=cp_hosts(mesh, per_host))
    starts = spec.stage_starts(settings.pipeline, mesh.pp)
    tables = chosen_for(model, spec.stage_of_tables(starts), settings, mesh.size("dp"), device)
    passed: Mapping[int, MeasuredPass] = {}
    unforeseen = ""
    if example is not None:
        plan = make_plan(spec, mesh, policies._replace(offload=OffloadPolicy()))
        try:
            with kernels_like(device.type, _attention_names(settings)):
                passed = _passes(
                    make, settings, plan, starts, precision, to_recompute, example, loss, blocks, tables
                )
        except NeedsNumbersError as error:
            unforeseen = f"model state alone: {error}"
    check_blocks(blocks, settings.offload)
    beside, draws, given = _given_and_drawn(model, settings, device)
    has_experts = bool(find_stacks(model).stacks)
    parts = (settings, mesh, spec, policies, starts, tables, blocks, device, passed, has_experts)
    return JobFacts(*parts, beside, draws, given, unforeseen, per_host)


def _given_and_drawn(model: nn.Module, settings: RunConfig, device: torch.device) -> tuple[int, bool, int]:
    """Return the bytes of the process, whether start weights are drawn, and the bytes of weights that were given."""
    on_meta = [each.numel() for each in model.parameters() if each.is_meta]
    draws = bool(on_meta) and settings.init_from is None
    beside = 0
    if device.type == "cpu":
        load_table_code(tables_of(model))
        beside = process_bytes(settings.offload.optimizer == "disk", max(on_meta) if draws else 0)
    return beside, draws, 0 if on_meta else sum(each.nbytes for each in model.parameters())


def process_bytes(with_disk: bool, drawn_elements: int = 0) -> int:
    """Return the bytes that this process holds, as an estimate for a rank without its engine.

    Args:
        with_disk: include the code that checksums of a disk load.
        drawn_elements: number of elements of the largest start weight that is drawn in the process, whose temporary
            memory is included.
    """
    words(0, 0, min(drawn_elements, 1 << 20))
    if with_disk:
        crc32(np.zeros(1 << 20, dtype=np.uint8))  # smaller arrays do not load the code
    return resident_bytes() or 0


def _check_start(model: nn.Module, settings: RunConfig, wanted: InitFromPolicy) -> None:
    """Check ``init_from`` by headers and manifests, without reading tensors.

    Raises:
        MismatchError: if the weights are those of another model.
        CheckpointError: if no step can be read.
    """
    whole = describe(model)
    where = steps_at(Path(wanted.path))
    if where is None:
        start_weights(model, settings, None, whole)
        return
    manifest = (
        open_step(where, FileSystem())
        if (where / "manifest.json").is_file()
        else next((each.manifest for each in CheckpointFolder(where, FileSystem()).scan()), None)
    )
    if manifest is None:
        raise CheckpointError(f"init_from: {where}: no step there can be read")
    compare(whole, tables_of(model), manifest, True, StepDifferences(wanted.missing, wanted.unexpected))


def examine_step(make: Callable[[], nn.Module], plan: Plan, where: Path) -> tuple[int, list[str]] | None:
    """Compare the step that a run would resume from with the run's model, by manifests only.

    Args:
        make: function that builds the model, as for ``foresee``.
        plan: the Plan of the run.
        where: a step, or a folder of steps, of which the newest complete step counts.

    Returns:
        (number of the step, sentences on optimizer state that is dropped or starts fresh); None if the folder holds
            no step.

    Raises:
        MismatchError: if the step is of another model or optimizer, as the run would raise it.
    """
    if (where / "manifest.json").is_file():
        manifest: Manifest | None = open_step(where, FileSystem())
    else:
        manifest = next((each.manifest for each in CheckpointFolder(where, FileSystem()).scan()), None)
    if manifest is None:
        return None
    model = make()
    compare(describe(model), tables_of(model), manifest, False, StepDifferences())
    note = moments_of(manifest, plan.registry)[1]
    return manifest.step, [note] if note else []


def _cut(
    model: nn.Module,
    starts: tuple[str, ...],
    settings: RunConfig,
    mesh: Mesh,
    rank: int,
    replay: DrawReplay | None = None,
    transport_of: Callable[[str], Transport | None] = lambda axis: None,
    alike: AlikeStorages | None = None,
    traffic: Traffic | None = None,
) -> Stages:
    """Return the stages of the model as the rank would have them; the whole model if ``starts`` is empty.

    Without ``replay``, the call only checks that the model can be cut.
    """
    described = describe_cut(model, mesh, settings.zero, settings.tensor, settings.pipeline)
    axes = ("dp", "cp", "tp", "pp", "ep", "etp")
    groups = {axis: _silent(mesh, axis, rank, transport_of(axis), traffic) for axis in axes}
    groups |= groups_of_context(
        mesh, lambda axis: groups.get(axis) or _silent(mesh, axis, rank, transport_of(axis), traffic)
    )
    if not starts:
        groups["pp"] = Group.alone("pp")
    replay = replay or DrawReplay()
    loads = ExpertLoads(described.spec.experts_of, replay)
    # On one pretended rank weights have their values, and rows have no owners.
    cut = ModelCut(
        model, described, starts, CutRanks(groups), cut_policies_of(settings), replay, loads, alike
    )
    return apply_to_model(cut, {"start": lambda: None, "tables": lambda: None})


def _passes(
    make: Callable[[], nn.Module],
    settings: RunConfig,
    plan: Plan,
    starts: tuple[str, ...],
    precision: PrecisionPolicy,
    to_recompute: Sequence[str],
    example: Any,
    loss: Loss | None,
    blocks: Sequence[str],
    tables: ModelTables,
) -> dict[int, MeasuredPass]:
    """Return measurements of one microbatch on shapes, by stage; stages that are alike share one measurement."""
    device, operations, traffic = torch.device("cpu"), OperationDtypes(precision), ExchangeRecord()
    replay = DrawReplay(operations, has_numbers=False)
    dtype_of = _dtypes_of(plan, precision)
    alike = AlikeStorages(_silent(plan.mesh, "tp", 0)) if plan.mesh.tp > 1 else None
    whole = make()
    kinds_of, is_list = kinds_of_stages(plan, whole, to_recompute), isinstance(whole, Layers)
    cuts: dict[int, Stages] = {}  # by rank
    measured: dict[Hashable, tuple[MeasuredPass, Sequence[Unit], _Messages, _Messages]] = {}
    found: dict[int, MeasuredPass] = {}
    messages = _Messages(_Message("", []), _Message("", []))
    for stage, kind in sorted(kinds_of.items()):
        ranks = plan.classes[class_of(plan.mesh, plan.mesh.ranks("pp", 0)[plan.mesh.places.place(stage)])]
        units = ranks.units_of(stage)
        before = measured.get(kind)
        if before is not None and before[2].form == messages.form:
            passed, like, _, messages = before
            found[stage] = passed.renamed({a.name: b.name for a, b in zip(like, units, strict=True)})
            continue
        rank = plan.mesh.ranks("pp", 0)[plan.mesh.places.place(stage)]
        if rank not in cuts:
            model = make()
            if tables:
                chosen_for(model, tables.stages, settings, plan.mesh.size("dp"), device)
            cuts[rank] = _cut(
                model, starts, settings, plan.mesh, rank, replay, lambda axis: NoTransport(), alike, traffic
            )
        module, run = cuts[rank][stage]
        with without_numbers():
            batch = stripped(example, device)
            strip(module, dtype_of, device)
            operations.apply_to(module)
            later = _later_products(module, ranks, whole)
            recompute_blocks(module, to_recompute, settings.recompute, replay)
            cast_at_the_root(module, precision, device, loss is not None and stage == max(kinds_of))
            kinds = {unit.name: _kind_of(unit, module, to_recompute) for unit in units if unit.name}
            one, other = (_StageForward(module.train(), run, replay, batch, loss, each) for each in messages)
            passed, tensors = measure(
                module, kinds, batch, one.run, traffic, run is not None, blocks, alike, one.again, later
            )
            evaluated, told = measure_evaluation(module, kinds, other.run)
            sampled = _sampled(module, kinds, settings, other)
        found[stage] = _with_messages(passed, messages.trained, tensors, stage == max(kinds_of))._replace(
            brings_parts=is_list and loss is None, evaluated=evaluated, sampled=sampled
        )
        arrived, messages = messages, _Messages(_Message(one.text, tensors), _Message(other.text, told))
        measured.setdefault(kind, (found[stage], units, arrived, messages))
    return _with_lookups(found, tables, example, plan.mesh.size("dp"))


def _later_products(module: nn.Module, ranks: RankClass, whole: nn.Module) -> LaterProducts | None:
    """Let the gradients of a stage's weights wait for W, if the schedule has W.

    Args:
        module: The stage, stripped of its numbers.
        ranks: The class of ranks that has the stage.
        whole: The whole model, before it is cut.
    """
    if not ranks.later_units:
        return None
    queue = ProductQueue()
    defer_products(module, describe(whole).products, queue)
    unit_of = {
        slot.name: unit.name
        for unit in ranks.units
        if unit.index in ranks.later_units
        for bucket in unit.buckets
        if bucket.key.trained
        for slot in bucket.slots
    }
    here = dict(module.named_parameters())
    return LaterProducts(queue, {here[name]: unit for name, unit in unit_of.items() if name in here})


class StageOnShapes(NamedTuple):
    """One stage of a model, cut for a rank and stripped of its numbers, and its forward pass."""

    stage: int
    module: nn.Module
    batch: Any
    arrives: list[Tensor]
    """Tensors that the stage before sends."""
    forward: Callable[[], list[Tensor]]
    """Runs the forward pass, and returns the loss or the tensors for the next stage."""
    returns_addends: Callable[[], bool]
    """Returns, after the forward pass, whether the next stage sends gradients that are addends over "tp", as it does
    when a pass stays whole in a model whose sequence is cut."""


def visit_stages(
    known: JobFacts,
    make: Callable[[], nn.Module],
    example: Any,
    loss: Loss | None,
    transport_of: Callable[[str], Transport | None],
    visit: Callable[[StageOnShapes], Sequence[Tensor]],
) -> None:
    """Call ``visit`` with each kind of stage of a job, in order, inside a pass without numbers.

    Args:
        known: The job, read without an example.
        make: Function that builds the model anew each time.
        example: A microbatch, or tensors of its shapes.
        loss: The loss function, as ``initialize`` takes it.
        transport_of: Function that returns the transport of an axis.
        visit: Function that runs the stage's forward pass and returns what the forward pass returned.

    Raises:
        ShardwiseError: if the model cannot be cut.
    """
    settings, device = known.settings, torch.device("cpu")
    plan, precision = make_plan(known.spec, known.mesh, known.policies), settings.precision
    operations = OperationDtypes(precision)
    replay = DrawReplay(operations, has_numbers=False)
    kinds_of = kinds_of_stages(plan, make(), ())
    wanted = {*first_stages(kinds_of)}
    cuts: dict[int, Stages] = {}
    arrives = _Message("", [])
    for stage in sorted(kinds_of):
        if stage not in wanted:
            continue  # a stage that is like an earlier one sends what that one sends
        rank = plan.mesh.ranks("pp", 0)[plan.mesh.places.place(stage)]
        if rank not in cuts:
            model = make()
            if known.tables:
                chosen_for(model, known.tables.stages, settings, plan.mesh.size("dp"), device)
            cuts[rank] = _cut(
                model, known.starts, settings, plan.mesh, rank, replay, transport_of, None, ExchangeRecord()
            )
        module, run = cuts[rank][stage]
        with without_numbers():
            batch = stripped(example, device)
            strip(module, _dtypes_of(plan, precision), device)
            operations.apply_to(module)
            cast_at_the_root(module, precision, device, loss is not None and stage == max(kinds_of))
            forward = _StageForward(module.train(), run, replay, batch, loss, arrives)

            def returns_addends(stage: int = stage) -> bool:
                return stage < max(kinds_of) and replay.whole_sequence

            leaving = visit(
                StageOnShapes(stage, module, batch, arrives.tensors, forward.run, returns_addends)
            )
        arrives = _Message(forward.text, list(leaving))


def _dtypes_of(plan: Plan, precision: PrecisionPolicy) -> Callable[[str, Tensor], torch.dtype]:
    """Return a function of (name, tensor) that returns the dtype in which a tensor of the model lies on a rank."""
    dtypes = {
        name: info.dtype for info in plan.registry.of_kind("parameter") for name in (info.name, *info.aliases)
    }
    return lambda name, tensor: dtypes.get(name) or precision.buffer_dtype(name, tensor.dtype)


def _with_messages(
    passed: MeasuredPass, arrived: "_Message", leaving: Sequence[Tensor], is_last: bool
) -> MeasuredPass:
    """Return the pass of a stage with the messages that it receives and sends."""
    back = [] if is_last else [tensor for tensor in leaving if tensor.requires_grad]
    return passed._replace(
        received_bytes=sum(tensor.nbytes for tensor in arrived.tensors),
        answered_bytes=sum(tensor.nbytes for tensor in back),
        leaves=() if is_last else calls_of("activations", leaving),
        answered=calls_of("gradients", back),
    )


def _with_lookups(
    found: Mapping[int, MeasuredPass], tables: ModelTables, example: Any, ranks: int
) -> dict[int, MeasuredPass]:
    """Return the passes with the numbers of keys that the example has for the tables of each stage."""
    loads = {name: loads_of(each, example, ranks) for name, each in tables.everywhere.items()}
    return {
        stage: passed._replace(
            lookups={name: of for name, of in loads.items() if tables.stages[name] == stage}
        )
        for stage, passed in found.items()
    }


def _attention_names(settings: RunConfig) -> tuple[str, ...]:
    """Return the attention kernels that the configuration names; none if the device chooses freely."""
    backend = settings.attention.backend
    if isinstance(backend, str):
        return () if backend in ("auto", "torch") else (backend,)
    return tuple(backend)


class _Message(NamedTuple):
    """The message that one stage sends to the next."""

    text: str
    """The part that is not tensors."""
    tensors: list[Tensor]

    @property
    def form(self) -> Hashable:
        """Value that is equal for messages of equal shapes."""
        return tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in self.tensors)


class _Messages(NamedTuple):
    """Messages of one stage to the next: along "tp" a sequence that is cut in training is whole in an evaluation."""

    trained: _Message
    evaluated: _Message

    @property
    def form(self) -> Hashable:
        """Value that is equal for messages of equal shapes."""
        return self.trained.form, self.evaluated.form


def kinds_of_stages(plan: Plan, model: nn.Module, to_recompute: Collection[str]) -> dict[int, Hashable]:
    """Return a value for each stage that is equal for stages which hold and compute alike.

    The first and the last stage are like no other.

    Args:
        plan: The Plan.
        model: The whole model, before it is cut.
        to_recompute: Names of the blocks that compute again in the backward pass.
    """
    found: dict[int, Hashable] = {}
    for ranks in plan.classes.values():
        for stage in ranks.stages:
            units = tuple(
                (
                    _class_of(model.get_submodule(unit.name)),
                    unit.name in to_recompute,
                    tuple(
                        (
                            bucket.key,
                            tuple((_within(slot.name, unit.name), slot.shape) for slot in bucket.slots),
                        )
                        for bucket in unit.buckets
                    ),
                )
                for unit in ranks.units_of(stage)
            )
            found[stage] = stage if ranks.tables_of(stage) else units
    ends = {min(found), max(found)}
    return {stage: stage if stage in ends else kind for stage, kind in found.items()}


def first_stages(kinds: Mapping[int, Hashable]) -> list[int]:
    """Return the first stage of each kind."""
    firsts: dict[Hashable, int] = {}
    for stage, kind in sorted(kinds.items()):
        firsts.setdefault(kind, stage)
    return sorted(firsts.values())


def _within(name: str, unit: str) -> str:
    return name.removeprefix(f"{unit}.") if unit else name


def _class_of(module: nn.Module) -> str:
    """Return the name of a module's class; a stage gives its modules classes of their own, of the same name."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _sampled(
    module: nn.Module, kinds: Mapping[str, Hashable], settings: RunConfig, forward: "_StageForward"
) -> Mapping[str, UnitPass]:
    """Return the shares of the pass of a sample that holds most; empty if the run generates none, or with a pipeline.

    A sample has one sequence. Its longest pass fills the cache with the prompt, or with half a context if the text
    grows beyond the context (models/generate.py).
    """
    policy, train = settings.model, settings.train
    if not isinstance(policy, GptPolicy) or not train.sample_tokens or settings.mesh.pp > 1:
        return {}
    tokens = len((train.sample_prompt or "").encode()) or _PROMPT_TOKENS
    if tokens + train.sample_tokens > policy.context:
        tokens = max(min(tokens, policy.context), policy.context // 2)
    return measure_evaluation(module, kinds, partial(forward.sample, tokens, policy.context))[0]


class _StageForward:
    """Runs the forward pass of one stage, or of a whole model if ``run`` is None.

    ``arriving`` is the message that the stage before sends.
    """

    def __init__(
        self,
        module: nn.Module,
        run: RunStage | None,
        replay: DrawReplay,
        batch: Any,
        loss: Loss | None,
        arriving: _Message,
    ):
        self._module = module
        self._run = run
        self._replay = replay
        self._batch = batch
        self._loss = loss
        self._arrives = arriving
        self.text = ""
        """The part of the message to the next stage that is not tensors."""

    def run(self) -> list[Tensor]:
        """Return the loss, or the tensors for the next stage."""
        text, tensors = self._arrives
        with self._replay.at(BatchPosition(0, 0)):
            if self._run is None:
                return [self._loss_of(self._module)]
            received = unpack(text, [tensor.detach() for tensor in tensors]) if text else None
            self.text, leaving = pack(self._run(self._loss_of, received, kind_of(self._batch)))
        return leaving

    def sample(self, tokens: int, context: int) -> list[Tensor]:
        """Return the token that a model of text chooses behind a prompt.

        Args:
            tokens: Number of tokens of the prompt.
            context: Capacity of the cache of keys and values.
        """
        with self._replay.at(BatchPosition(0, 0)):
            prompt = torch.empty(1, tokens, dtype=torch.int64)
            logits = self._module(prompt, cache=KeyValueCache(context))[:, -1]
            return [choose(logits, temperature=1.0, top_k=1, seed=0, step=0)]

    def again(self) -> bool:
        """Return True while a backward pass computes a forward pass again."""
        return self._replay.runs_again > 0 or is_repeated()

    def _loss_of(self, module: nn.Module) -> Tensor:
        return find_loss(call_model(module, self._loss, self._batch, torch.device("cpu")))


def _kind_of(unit: Unit, module: nn.Module, to_recompute: Collection[str]) -> Hashable:
    """Return a value that is equal for Units which hold and compute alike."""
    own = module.get_submodule(unit.name)
    parameters = tuple((name, tuple(each.shape), each.dtype) for name, each in own.named_parameters())
    return _class_of(own), parameters, unit.name in to_recompute


def _silent(
    mesh: Mesh, axis: str, rank: int, transport: Transport | None = None, traffic: Traffic | None = None
) -> Group:
    """Return the group of the ranks along an axis, with ``transport`` if there are several ranks."""
    ranks = mesh.ranks(axis, rank)
    between = transport if len(ranks) > 1 else None
    return Group(axis, ranks, ranks.index(rank), between, StepClock(0.0), traffic or Traffic())
