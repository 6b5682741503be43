"""Build: Plan + model -> running parts.

    1  site        which rank this is; open numbers of the configuration resolved                       (site.py)
    2  recipe      how optimizers are made                                                            (recipe.py)
    3  outline     the Plan of all ranks, from the model described; nothing changes until it stands   (outline.py)
    4  model       cut to the Plan; compose/apply.py lists all that is done to a module, in order
    5  stages      of this rank: parameters of its Units, as the Plan says, in flat buffers, under hooks that walk
                   the list                                                                           (stages.py)
    6  parts       what the engine runs                                                            (assembly.py)

A model on ``meta`` gets its weights shard by shard: from ``initial`` rules (or its own ``initial_rules()``), or from
``init_from``; no rank ever holds a whole fp32 model at stage 3. A model that comes initialised takes rank 0's weights
everywhere.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import ConfigError, DamagedError, MismatchError, PlanError, UsageError
from shardwise.base.target import load_target
from shardwise.checkpoint.steps import steps_at
from shardwise.comm.world import World, join, sole_builder
from shardwise.compose.apply import Phase, apply_steps
from shardwise.compose.module_steps import CutRanks, ModelCut, apply_to_model, check_stages
from shardwise.config.run import RunConfig, load
from shardwise.engine.construction.agreement import (
    differing_settings,
    digest_of,
    first_difference,
    stated_program,
    stated_settings,
)
from shardwise.engine.construction.assembly import assemble
from shardwise.engine.construction.handlers import handlers_of
from shardwise.engine.construction.outline import BuildSpec, cut_policies_of, outline_of
from shardwise.engine.construction.recipe import GivenOptimizer, OptimizerRecipe, recipe_of
from shardwise.engine.construction.sharded_init import KeptPiece, deal, take_pieces, world_of
from shardwise.engine.construction.site import (
    site_of,
    with_groups_of_context,
    with_groups_of_experts,
    with_tiers,
)
from shardwise.engine.construction.stages import make_stage, move_buffers
from shardwise.engine.engine import Engine, OnStep
from shardwise.engine.model.held import take_back
from shardwise.engine.model.original import OriginalAttributes
from shardwise.engine.parts.attention_backend import AttentionHold, DeviceKernels, chosen_kernels
from shardwise.engine.parts.deterministic import DeterministicMode, prepare_cublas
from shardwise.engine.parts.guard import with_guard
from shardwise.engine.parts.inputs import Loss, call_model
from shardwise.engine.parts.named import check_named
from shardwise.engine.parts.out_of_memory import told_in_initialize
from shardwise.engine.parts.parts import EngineParts, RuntimeContext, Stage
from shardwise.engine.parts.tables import ModelTables, register_tables, take_over
from shardwise.engine.parts.vocabulary import VocabularyBounds
from shardwise.engine.state.averaging import check_tables
from shardwise.engine.state.start_weights import StartWeights, start_weights, take_rank_0
from shardwise.engine.step.check import FirstStepCheck
from shardwise.engine.step.end import StepEndHandlers
from shardwise.engine.step.old_graphs import cut_under_a_graph, refuse_old_graphs
from shardwise.engine.step.pipeline import PipelineRunner
from shardwise.engine.step.uncut import UncutModel, keep_uncut
from shardwise.kernels.initializers import Initializer
from shardwise.memory.device_clock import clock_of
from shardwise.memory.leftovers import LEFTOVERS
from shardwise.observe.memory import apart_from_the_heap, give_back_free
from shardwise.parallel.pipeline.block_seconds import content_of
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.zero.views import absent
from shardwise.passes.absent import withhold
from shardwise.plan.mesh import Mesh
from shardwise.plan.slices import TensorSlices
from shardwise.plan.trace import Trace
from shardwise.plan.walker import Walker
from shardwise.precision.resolve import resolved

_log = logging.getLogger(__name__)


def initialize(
    model: nn.Module,
    config: "str | Path | Mapping[str, Any] | RunConfig | None" = None,
    *,
    loss: Loss | None = None,
    optimizer: GivenOptimizer = None,
    elementwise: bool = False,
    initial: Mapping[str, Initializer] | None = None,
    world: World | None = None,
    on_step: Sequence[OnStep] = (),
    example: Any = None,
) -> Engine:
    """Build the engine that trains ``model``, and take over the model's parameters. Collective.

    Args:
        model: The model; with a mesh of several stages, layers or experts it may be larger than one rank.
        config: A path (YAML, JSON), a dictionary, or a RunConfig; the same on every rank.
        loss: A function of (model, batch) that returns the loss. None: the model returns the loss.
        optimizer: A torch optimizer on the model's parameters, or a callable that makes one. Its class is built again
            on the shards; lr, betas, momentum and weight decay are read from its ``param_groups`` before every step, so
            that any scheduler of torch or transformers on it works. None: ``config.optimizer``.
        elementwise: True if an unknown optimizer class treats each element independently of the others.
        initial: The initializer of each parameter of a model on ``meta``, by parameter name.
        world: The ranks, from ``comm.world.join``. None: the ranks that the environment describes.
        on_step: Functions that are called with the result of every step.
        example: A small batch. With mesh.pp above 1 it shows in which order the model uses its parts, and the chain of
            stages is compared with the uncut model on it before training.

    Returns:
        The engine; ``engine.close()`` returns the parameters to the model.

    Raises:
        ConfigError: if a key is wrong, does not fit the others, or differs between the ranks.
        MeshError: if the axes of the mesh do not cover the ranks.
        PlanError: if the model cannot be cut as the configuration says, or differs between the ranks.
        UsageError: if an argument is wrong, or another thread of this rank builds an engine.
    """
    _check_arguments(model, config)
    policies = load({} if config is None else config)
    with sole_builder(world or world_of(model)), ExitStack() as refused:
        LEFTOVERS.end_dropped()
        take_back(model)
        world = world or world_of(model)
        if world is None:
            world = join(policy=policies.comm)
            world.ends_with_engine = True
            refused.callback(world.release)
        given = _InitializeArguments(loss, optimizer, elementwise, initial, on_step, example)
        engine = _built(model, policies, world, given, refused)
        refused.pop_all()
    return engine


class _InitializeArguments(NamedTuple):
    """The arguments of ``initialize`` beside the model, the configuration and the ranks."""

    loss: Loss | None
    optimizer: GivenOptimizer
    elementwise: bool
    initial: Mapping[str, Initializer] | None
    on_step: Sequence[OnStep]
    example: Any


def _built(
    model: nn.Module, policies: RunConfig, world: World, given: _InitializeArguments, refused: ExitStack
) -> Engine:
    """Build the engine; ``initialize`` documents the arguments.

    ``refused`` collects the callbacks that release files, reserved space and locks at once if the engine cannot be
    made. Otherwise they would stay as long as the program holds the error, whose traceback refers to them.
    """
    _check_settings_agree(world, policies, given)
    site = _attention(_deterministic(_site(model, world, policies), refused), refused)
    settings, mesh, device = site.settings, site.mesh, site.world.device
    if given.loss is None and settings.loss is not None:
        given = given._replace(loss=load_target("loss.target", settings.loss.target))
    pieces: dict[str, KeptPiece] = {}
    is_cut = mesh.tp * mesh.pp * mesh.ep * mesh.etp > 1
    apply_steps(Phase.GIVEN, {"pieces": lambda: pieces.update(take_pieces(model, is_cut))})
    recipe = recipe_of(model, settings, given.optimizer, given.elementwise)
    apply_steps(Phase.WHOLE, {"layers": lambda: _build_layers(model, mesh)})
    original = OriginalAttributes(model)
    vocabulary = VocabularyBounds(model)
    outline = _agreed_outline(model, site, recipe, given)
    if _cuts_the_model(mesh):
        held = cut_under_a_graph(model, outline.described.spec)
        is_alike = site.groups["world"].all_equal(len(held), "graphs made before initialize", device)
        refuse_old_graphs(held, is_alike)
    site = with_groups_of_context(site, outline.plan)
    site = with_tiers(with_groups_of_experts(site, outline.plan), outline.plan)
    if site.tiers is not None:
        refused.callback(site.tiers.close)
    uncut = _uncut(model, site)
    start = start_weights(model, settings, given.initial, outline.described.spec)
    pieces = {name: piece for name, piece in pieces.items() if name not in start.names}
    start = start.or_later(pieces)
    told = told_in_initialize(site.world.rank, device, settings, mesh.size("data"), site.ledger)
    with told, ExitStack() as memory:
        if site.tiers is not None:
            memory.enter_context(apart_from_the_heap())
        cut, tables = _cut(model, site, outline, start)
        slices = TensorSlices(outline.plan.registry, mesh, site.world.rank)
        start = start.of_pieces(slices)
        walker = Walker({}, Trace(site.traffic, clock_of(device)))
        walker.note = None if site.clock.recorder is None else site.clock.recorder.action
        # made while state that lies on a disk is in memory anyway
        optimizer_of = cache(partial(recipe.optimizer_of, slices=slices, form=settings.offload.state))
        stages = [
            make_stage(index, module, run, site, outline, start, given.loss is not None, walker, optimizer_of)
            for index, (module, run) in cut.stages.items()
        ]
        buckets = [bucket for stage in stages for state in stage.hooks.states for bucket in state.buckets]
        apply_steps(
            Phase.STAGES,
            {"dealt": lambda: deal(pieces, buckets), "other stages": lambda: _forget_foreign(model, stages)},
        )
        original.compare()
        parts = assemble(
            model, site, recipe, optimizer_of, outline, tables, stages, vocabulary, walker, cut.context
        )
        give_back_free(torch.device("cpu"))  # what the model came in
    return _engine(model, with_guard(parts), given, original, uncut, outline, walker)


def _check_settings_agree(world: World, policies: RunConfig, given: _InitializeArguments) -> None:
    """Raise ConfigError if the ranks were given unlike configurations or arguments. Collective."""
    stated = stated_settings(
        policies,
        loss=given.loss is not None,
        optimizer=_kind(given.optimizer) if given.optimizer is not None else None,
        elementwise=given.elementwise,
        initial=sorted(given.initial or ()),
    )
    if (path := policies.pipeline.seconds) is not None:
        stated = {**stated, f"the content of pipeline.seconds {path}": json.dumps(content_of(path))}
    unlike = differing_settings(world, stated, policies.comm.limit_s)
    if unlike:
        raise ConfigError(
            f"config: {unlike}; every rank would update its part of the weights by another rule. Give all ranks the "
            "same configuration and the same arguments of initialize"
        )


def _site(model: nn.Module, world: World, policies: RunConfig) -> RuntimeContext:
    """Return the ranks and their configuration, with the dtypes that the model's modules determine."""
    site = site_of(world, policies)
    check_named(model, site.settings)
    precision, notes = resolved(site.settings.precision, model)
    return site._replace(settings=site.settings.model_copy(update={"precision": precision}), notes=notes)


def _deterministic(site: RuntimeContext, refused: ExitStack) -> RuntimeContext:
    """Return the site with torch's deterministic switches on, if the configuration has the key.

    Raises:
        ConfigError: if cuBLAS cannot compute deterministically in this process any more.
    """
    if not site.settings.deterministic:
        return site
    mode = DeterministicMode()
    refused.callback(mode.end)
    prepare_cublas(site.world.device)
    return site._replace(deterministic=mode)


def _attention(site: RuntimeContext, refused: ExitStack) -> RuntimeContext:
    """Return the site with the attention kernels that the configuration asks for.

    Raises:
        ConfigError: if the device does not have a kernel, or another open engine holds another choice.
    """
    settings = site.settings
    device = DeviceKernels.of(site.world.device)
    names = chosen_kernels(settings.attention.backend, device, settings.deterministic)
    if not names:
        return site
    hold = AttentionHold(names)
    refused.callback(hold.end)
    return site._replace(attention=hold)


def _agreed_outline(
    model: nn.Module, site: RuntimeContext, recipe: OptimizerRecipe, given: _InitializeArguments
) -> BuildSpec:
    """Return the model as data with its Plan, which is the same on all ranks. Collective.

    Raises:
        PlanError: if the model cannot be cut, or differs between the ranks.
    """
    settings, device, pp = site.settings, site.world.device, site.mesh.pp
    loss, example = given.loss, given.example
    if example is not None and pp > 1:  # where the model lies now: its buffers move to the device below
        home = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        check_stages(model, settings.pipeline, pp, lambda root: call_model(root, loss, example, home), home)
    call = None if example is None else lambda root: call_model(root, loss, example, device)
    outline = outline_of(model, site, recipe, call)
    program = stated_program(outline.plan, settings)
    if not site.groups["world"].all_equal(int(digest_of(program)[:16], 16) >> 1, "the Plan", device):
        unlike = first_difference(site.world, program, settings.comm.limit_s)
        raise PlanError(
            "model: the ranks were given different models, or use their parts in different orders (example=), "
            f"so each would run a Plan of its own: {unlike}. Build the same model on every rank, and give all the same "
            "kind of example"
        )
    return outline


def _engine(
    model: nn.Module,
    parts: EngineParts,
    given: _InitializeArguments,
    original: OriginalAttributes,
    uncut: UncutModel | None,
    outline: BuildSpec,
    walker: Walker,
) -> Engine:
    """Return the engine that runs ``parts``, with the weights of ``init_from``. Collective."""
    settings, site = parts.config, parts.site
    mesh, world, groups = site.mesh, site.world, site.groups
    pipeline = None
    if mesh.pp > 1:
        peers = world.peers(groups["pp"], settings.comm, mesh.groups("pp"))
        pipeline = PipelineRunner(parts, settings.pipeline, given.loss, peers)
    end = StepEndHandlers(parts)
    schedule = None if pipeline is None else pipeline.schedule
    walker.handlers.update(handlers_of(parts, end, schedule))
    parts.program.begin(parts.program.microbatches)
    last = mesh.last_place(settings.pipeline.stages_per_rank)
    outline.replay.draws.share(groups["tp"], groups["pp"], last, model, world.device)
    if outline.fp8 is not None:
        outline.fp8.scales.agree()  # those of the start weights, before the first gather needs them
    site.traffic.clear()
    if world.rank == 0 and world.size > 1:
        _log.info("the ranks exchange through %s", world.transports())
    check = None
    if settings.check_first_step == "auto" and _computes_in_parts(mesh):
        check = FirstStepCheck(parts, settings, given.loss, uncut, outline.to_recompute)
        outline.replay.draws.keeps = uncut is not None
    engine = Engine(parts, original, given.loss, given.on_step, end, pipeline, check)
    _start_from_step(engine)
    return engine


def _check_arguments(model: object, config: object) -> None:
    """Raise UsageError for a model that is none, and for arguments in the wrong order."""
    if isinstance(config, nn.Module):
        raise UsageError(
            f"initialize: the second argument is a {type(config).__name__}, which is a model; call "
            "initialize(model, config)"
        )
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"model: expected an nn.Module, given the class {model.__name__}; make one: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model: expected an nn.Module, given {_kind(model)}; call initialize(model, config)"
        )
    if config is not None and not isinstance(config, str | Path | Mapping | RunConfig):
        raise UsageError(f"config: expected a path, a dictionary or a RunConfig, given {_kind(config)}")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _start_from_step(engine: Engine) -> None:
    """Load only the weights of the checkpoint at ``init_from``. Collective.

    Nothing is loaded if ``init_from`` names no checkpoint. If the checkpoint is refused, the engine is closed, and the
    model belongs to the user again.
    """
    wanted = engine.config.init_from
    folder = None if wanted is None else steps_at(Path(wanted.path))
    if wanted is None or folder is None:
        return
    try:
        engine.load(folder, weights_only=True, missing=wanted.missing, unexpected=wanted.unexpected)
    except (DamagedError, MismatchError, UsageError) as error:  # alike on all ranks: they can close together
        refused = error
    else:
        if engine.is_main:
            _log.info("start weights: those of %s", folder)
        return
    engine.close()
    raise refused


# The model, cut to the Plan ----------------------------------------------------------------------------------------


def _build_layers(model: nn.Module, mesh: Mesh) -> None:
    """Build the layers of a list of layers, unless each is built on its stage."""
    if mesh.pp == 1 and isinstance(model, Layers):
        model.build_all()


def _cut(
    model: nn.Module, site: RuntimeContext, outline: BuildSpec, start: StartWeights
) -> tuple[ModelCut, ModelTables]:
    """Cut the model to the Plan, and place its tables. Collective."""
    settings, device = site.settings, site.world.device
    cut = ModelCut(
        model,
        outline.described,
        outline.described.spec.stage_starts(settings.pipeline, site.mesh.pp),
        CutRanks(site.groups, site.levels),
        cut_policies_of(settings),
        outline.replay,
        outline.loads,
        outline.alike,
    )
    placed: list[ModelTables] = []

    def give_start() -> None:
        for note in start.notes if site.world.rank == 0 else ():
            _log.warning("init_from: %s", note)
        take_rank_0(model, device, site.groups["world"], start.names)
        if not isinstance(model, Layers):  # the buffers of layers that are not built yet are on meta
            move_buffers(model, device)

    apply_to_model(cut, {"start": give_start, "tables": lambda: placed.append(_tables(cut, site, outline))})
    return cut, placed[0]


def _tables(cut: ModelCut, site: RuntimeContext, outline: BuildSpec) -> ModelTables:
    """Place the tables of the model. Collective."""
    settings, mesh = site.settings, site.mesh
    modules = {index: module for index, (module, _) in cut.stages.items()}
    spec = outline.planned.spec
    stage_of = spec.stage_of_tables(spec.stage_starts(settings.pipeline, mesh.pp))
    dense_bytes = sum(outline.plan.bytes_per_rank().values())
    tables = take_over(
        cut.model, modules, stage_of, settings, site.world, mesh, site.groups, site.clock, dense_bytes
    )
    register_tables(outline.plan, tables, outline.planned.policies.microbatches)
    check_tables(settings.ema is not None, bool(tables))
    return tables


def _cuts_the_model(mesh: Mesh) -> bool:
    """Return True if a rank computes with a slice, some stages or some experts of the model."""
    return mesh.size("model") * mesh.ep * mesh.etp > 1


def _computes_in_parts(mesh: Mesh) -> bool:
    """Return True if a rank computes with a part of the model, or of each sample."""
    return _cuts_the_model(mesh) or mesh.cp > 1


def _uncut(model: nn.Module, site: RuntimeContext) -> UncutModel | None:
    """Return a copy of the uncut model if this rank compares its first step with the copy, else None."""
    tp, pp = site.groups["tp"], site.groups["pp"]
    has_loss = pp.index == site.mesh.last_place(site.settings.pipeline.stages_per_rank)
    compares = _computes_in_parts(site.mesh) and tp.index == 0 and has_loss
    return keep_uncut(model) if compares and site.settings.check_first_step == "auto" else None


def _forget_foreign(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Free the weights of other stages, which the whole model still holds on this rank; they read as NaN."""
    held = {id(parameter) for stage in stages for parameter in stage.module.parameters()}
    foreign: list[nn.Parameter] = []
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held and not parameter.is_meta:
            parameter.data = absent(tuple(parameter.shape), parameter.dtype, parameter.device)
            foreign.append(parameter)
            names[id(parameter)] = name
    withhold(
        foreign,
        lambda parameter: (
            f"parameter {names.get(id(parameter), '')!r}, which lives on another stage,\n"
            "Use the parameters of the module that the loss is given, on their own stage, or engine.full_parameters()"
        ),
        {},
    )
