"""Assembly: the parts that an engine runs, made from the stages and the tables of this rank.

Optimizers of the trained buckets, gradients that ranks share, the memory of state in the ledger, the last notes of the
Plan, and the parts that surround every pass.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from shardwise.base.words import named_ranks
from shardwise.comm.collectives import Group
from shardwise.compose.plan import PlannedModel, exchanges_of
from shardwise.compose.spec import ModelSpec
from shardwise.config.run import RunConfig
from shardwise.engine.construction.outline import BuildSpec, Float8Layers
from shardwise.engine.construction.recipe import OptimizerRecipe
from shardwise.engine.construction.stages import modules_of
from shardwise.engine.construction.warm_up import compile_kernels
from shardwise.engine.parts.accumulation import Accumulation
from shardwise.engine.parts.folders import StepFolders
from shardwise.engine.parts.followers import (
    EditsFollower,
    LoadsFollower,
    OwnUseFollower,
    PhasesFollower,
    ProfileFollower,
    ScalesFollower,
    StepFollower,
    TablesFollower,
    UnitNormsFollower,
)
from shardwise.engine.parts.module_profile import ModuleProfile
from shardwise.engine.parts.parts import EngineParts, RuntimeContext, Stage, TrainedBucket
from shardwise.engine.parts.pass_context import PassContext
from shardwise.engine.parts.program import ActionLists
from shardwise.engine.parts.rank_phases import RankPhases
from shardwise.engine.parts.shared import SharedGradients
from shardwise.engine.parts.table_units import TableUnits
from shardwise.engine.parts.tables import ModelTables
from shardwise.engine.parts.unit_norms import UnitSquares
from shardwise.engine.parts.vocabulary import VocabularyBounds
from shardwise.memory.ledger import Ledger
from shardwise.observe.stragglers import SlowestRank
from shardwise.optim.flat import FlatOptimizer
from shardwise.parallel.context.region import ContextRegion
from shardwise.parallel.expert.apply import mixtures
from shardwise.parallel.tensor.own_use import OwnUse
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.plan import AttentionExchange
from shardwise.plan.slices import TensorSlices
from shardwise.plan.walker import Walker
from shardwise.precision.loss_scale import LossScale

_log = logging.getLogger(__name__)


def assemble(
    model: nn.Module,
    site: RuntimeContext,
    recipe: OptimizerRecipe,
    optimizer_of: Callable[[BucketState], FlatOptimizer],
    outline: BuildSpec,
    tables: ModelTables,
    stages: list[Stage],
    vocabulary: VocabularyBounds,
    walker: Walker,
    context: ContextRegion | None,
) -> EngineParts:
    """Return the parts of one engine. Collective.

    Args:
        model: The whole model.
        site: The ranks and their configuration.
        recipe: The recipe of the optimizers.
        optimizer_of: Function that returns the optimizer of a bucket.
        outline: The model as data, and the Plan.
        tables: The tables of the model.
        stages: This rank's stages, with their weights.
        vocabulary: The vocabulary to which the tokens of a batch belong.
        walker: The walker of this rank's list.
        context: The state of passes whose sequences are cut, or None.
    """
    settings, world, mesh = site.settings, site.world, site.mesh
    owned = _trained_buckets(stages)
    slices = TensorSlices(outline.plan.registry, mesh, world.rank)
    shared = SharedGradients(
        owned,
        slices,
        lambda kin: world.groups_among(kin, "shared", settings.comm, site.clock, site.traffic),
    )
    trained = [TrainedBucket(bucket, optimizer_of(bucket)) for _, bucket in owned]
    _count_state(site.ledger, trained, tables)
    planned = _noted(outline, site, tables)
    orders = {stage.index: stage.hooks.order for stage in stages}
    table_units = TableUnits(tables, planned.plan.own, orders, walker)
    passes = _pass_context(site, outline, stages, vocabulary, walker, context)
    followers = _followers(site, passes, tables, planned, trained, walker, outline.fp8)
    _compile_kernels(site, stages, trained)
    folders = StepFolders(world, settings.checkpoint, world.next_engine())
    site.ledger.take("save", "copies behind training", lambda: folders.copy_bytes)
    return EngineParts(
        model=stages[0].module if mesh.pp == 1 else model,
        site=site,
        program=ActionLists(planned, orders, table_units, walker),
        slices=slices,
        stages=stages,
        trained=trained,
        shared=shared,
        tables=tables,
        accumulation=_accumulation(site, outline),
        optimizer_groups=recipe.groups,
        passes=passes,
        folders=folders,
        followers=followers,
        stage_peers=_stage_peers(site, planned),
    )


def _stage_peers(site: RuntimeContext, planned: PlannedModel) -> Group | None:
    """Return the group of the ranks of one stage if an optimizer needs whole matrices. Collective."""
    if not planned.plan.registry.needs("matrix"):
        return None
    return site.world.group(site.mesh, "stage", site.settings.comm, site.clock, site.traffic)


def _compile_kernels(site: RuntimeContext, stages: Sequence[Stage], trained: Sequence[TrainedBucket]) -> None:
    """Compile the fused kernels of this rank's stages, so that no rank waits for another in the first step."""
    settings = site.settings
    # Compiled blocks run the plain forms, which the compiler fuses.
    modules = [stage.module for stage in stages] if settings.compile.scope == "none" else []
    found = {parameter.dtype for module in modules for parameter in module.parameters()}
    dtypes = found if settings.precision.compute_dtype is None else {settings.precision.compute_dtype}
    if settings.precision.operations is not None:
        dtypes = {*dtypes, torch.float32}
    compile_kernels(modules, trained, dtypes, site.world.device)


def _accumulation(site: RuntimeContext, outline: BuildSpec) -> Accumulation:
    """Return the microbatches of the running step."""
    microbatches, scale = (
        site.settings.batch.accumulation or 1,
        _loss_scale(site.settings, outline.described.spec),
    )
    return Accumulation(microbatches, site.groups["dp"], scale, site.world.device)


def _trained_buckets(stages: Sequence[Stage]) -> list[tuple[int, BucketState]]:
    """Return the buckets that optimizers update, each with the index of its stage."""
    return [
        (stage.index, bucket)
        for stage in stages
        for state in stage.hooks.states
        for bucket in state.buckets
        if bucket.layout.key.trained
    ]


def _count_state(ledger: Ledger, trained: Sequence[TrainedBucket], tables: ModelTables) -> None:
    """Register the memory of moments and of tables."""
    for bucket, made in trained:
        if bucket.state is None:
            ledger.take("moments", bucket.what, made.state.count_bytes)
    if tables:
        ledger.take("tables", "rows and their moments", lambda: tables.nbytes)
        if tables.step_bytes:
            ledger.take("table steps", "of each row", tables.step_bytes)
    if tables.is_tiered:
        ledger.take("table cache", "rows in memory and their moments", lambda: tables.tier_bytes["memory"])
        ledger.take("table indexes", "of rows in memory and on disk", lambda: tables.tier_bytes["indexes"])
        ledger.take("tables on disk", "rows and their moments", lambda: tables.tier_bytes["disk"])
    if tables.is_dynamic:
        ledger.take("dynamic tables", "rows in use", lambda: tables.dynamic_bytes)


def _noted(outline: BuildSpec, site: RuntimeContext, tables: ModelTables) -> PlannedModel:
    """Return the Plan with the notes of the dtypes and the tables, and with the exchanges of experts between levels."""
    spec, exchanges = outline.described.spec, outline.plan.exchanges
    if site.levels:
        in_blocks = outline.planned.policies.in_blocks
        attention = [each for each in exchanges if isinstance(each, AttentionExchange)]
        rows = exchanges_of(spec, site.mesh, outline.plan.registry, site.levels[0].size, in_blocks)
        exchanges = (*attention, *rows)
    notes = (*outline.plan.notes, *site.notes, *tables.choices)
    return replace(outline.planned, plan=replace(outline.plan, notes=notes, exchanges=exchanges))


def _loss_scale(settings: RunConfig, spec: ModelSpec) -> LossScale | None:
    """Return the scale of the loss if any part of the whole model computes in fp16, else None.

    A stage without fp16 of its own scales and skips with the others.
    """
    half = settings.precision.operations == "fp16" or any(
        entry.trained and settings.precision.dtypes(entry.name, entry.dtype).compute == torch.float16
        for entry in spec.parameters.values()
    )
    return LossScale(settings.precision.loss_scale) if half else None


def _followers(
    site: RuntimeContext,
    passes: PassContext,
    tables: ModelTables,
    planned: PlannedModel,
    trained: Sequence[TrainedBucket],
    walker: Walker,
    fp8: Float8Layers | None,
) -> tuple[StepFollower, ...]:
    """Return the techniques of the run that take part in every step. Collective."""
    units = _unit_squares(site, planned, trained)
    found: list[StepFollower] = [*EditsFollower.watching(bucket for bucket, _ in trained)]
    if tables:
        found.append(TablesFollower(tables))
    if passes.loads.layers:
        found.append(LoadsFollower(passes.loads, site.world.device, walker, site.groups["cp"]))
    if fp8 is not None:
        found.append(ScalesFollower(fp8.scales, walker))
    if units is not None:
        found.append(UnitNormsFollower(units))
    if _exchanges_phases(site):
        world, mesh = site.world, site.mesh
        meter = world.link_meter()
        take = None if meter is None else meter.take
        phases = RankPhases(world.rank, world.size, lambda rank: mesh.index("pp", rank), world.hosts, take)
        found.append(PhasesFollower(phases, partial(_tell_slow, site)))
    if site.mesh.tp > 1:
        found.append(OwnUseFollower(passes.own_use))
    if passes.is_profiled:
        found.append(ProfileFollower(passes.profile))
    return tuple(found)


def _exchanges_phases(site: RuntimeContext) -> bool:
    """Return True if any rank asks for the seconds of all ranks. Collective."""
    asks = bool(site.settings.monitor.rank_seconds)
    agree = site.groups["world"].all_equal(int(asks), "monitor.rank_seconds", site.world.device)
    return asks or not agree


def _tell_slow(site: RuntimeContext, slow: SlowestRank, ranks: range) -> None:
    """Log, on rank 0, which rank has become slow, and keep it for ``shardwise doctor``."""
    who = named_ranks(list(ranks))
    verb = "takes" if len(ranks) == 1 else "take"
    said = (
        f"{who} {verb} {slow.ratio:.2f} times as long as the others for the own work of a step, {slow.more_s:.3g} s "
        f"more, most of it {slow.phase}: the other ranks wait"
    )
    if slow.phase == "waiting":
        said = (
            f"the host of {who} has a slow cable: when its ranks have all from the other hosts, what they send is "
            f"still on its way, for about {slow.more_s:.3g} s in a step; all ranks wait for it"
        )
    site.clock.tell_slow(slow.rank, slow.phase, said)
    if site.world.rank == 0:
        _log.warning("%s", said)


def _unit_squares(
    site: RuntimeContext, planned: PlannedModel, trained: Sequence[TrainedBucket]
) -> UnitSquares | None:
    """Return the positions of the Units' squares if any rank asks for them, else None. Collective."""
    # Rank 0 alone writes them, so a script may ask for them there alone; the squares come from all ranks.
    asks = site.settings.monitor.unit_norms
    if not site.groups["world"].all_equal(int(asks), "monitor.unit_norms", site.world.device) or asks:
        return UnitSquares.of(planned, [bucket for bucket, _ in trained])
    return None


def _pass_context(
    site: RuntimeContext,
    outline: BuildSpec,
    stages: Sequence[Stage],
    vocabulary: VocabularyBounds,
    walker: Walker,
    context: ContextRegion | None,
) -> PassContext:
    """Return what surrounds every pass of the stages."""
    settings = site.settings
    outline.loads.routers = {
        name: layer.router
        for stage in stages
        for name, layer in mixtures(stage.module, by_first_name=True).items()
    }
    profile = ModuleProfile(
        settings, site.world, outline.plan.registry, modules_of(stages), walker.trace.clock
    )
    return PassContext(
        data=site.groups["data"],
        tp=site.groups["tp"],
        clock=site.clock,
        replay=outline.replay,
        loads=outline.loads,
        vocabulary=vocabulary,
        profile=profile,
        context=context,
        is_profiled=settings.module_profile is not None,
        own_use=_own_use(outline.described.owners, stages, settings.compile.scope == "blocks"),
    )


def _own_use(owners: Mapping[str, str], stages: Sequence[Stage], compiled: bool) -> OwnUse:
    """Return the object that finds uses of slices by modules that do not own them.

    The owner of every slice inside a compiled block is the block.
    """
    owned: list[tuple[str, nn.Parameter, nn.Module]] = []
    names: dict[nn.Module, str] = {}
    for stage in stages if owners else ():
        modules = dict(stage.module.named_modules(remove_duplicate=False))
        blocks = [state.unit.name for state in stage.hooks.states[1:]] if compiled else []
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            if name not in owners:
                continue
            owner = owners[name]
            owner = next((each for each in blocks if f"{owner}.".startswith(f"{each}.")), owner)
            owned.append((name, parameter, modules[owner]))
            names.setdefault(modules[owner], owner or "the model")
    return OwnUse(owned, names)
