"""Build: Plan + model -> running parts.

    1  site        which rank this is; open numbers of the configuration resolved
    2  recipe      how optimizers are made
    3  whole       what ranks know of the model before it is cut; where start weights come from
    4  share       of this rank: slices along "tp", then stages along "pp"; every tensor and table in its place
    5  stages      Units, layouts, Actions; start weights of owned elements alone; hooks: the executor takes over
    6  parts       what the engine runs

A model on ``meta`` gets its weights shard by shard: from ``initial`` rules (or its own ``initial_rules()``), or from
``init_from``; no rank ever holds a whole fp32 model at stage 3. A model that comes initialised takes rank 0's weights
everywhere.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from shardwise.checkpoint.steps import steps_at
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from shardwise.compose.cut import RunStage, check_stages, cut_model, recompute_blocks
from shardwise.compose.draft import Draft, draft, names_of_units
from shardwise.compose.whole import Whole, describe, register
from shardwise.config.auto import resolve
from shardwise.config.run import RunConfig, load
from shardwise.engine.accumulation import Accumulation
from shardwise.engine.check import Check, Uncut, keep_uncut
from shardwise.engine.engine import Engine, OnStep
from shardwise.engine.folders import Folders
from shardwise.engine.held import take_back
from shardwise.engine.inputs import Loss, call_model, cast_inputs
from shardwise.engine.named import check_named, methods_of
from shardwise.engine.original import Original
from shardwise.engine.parts import Parts, Site, Stage, Trained
from shardwise.engine.pass_context import PassContext
from shardwise.engine.pipeline import Pipeline
from shardwise.engine.shared import SharedGradients
from shardwise.engine.start_weights import StartWeights, start_weights, take_rank_0
from shardwise.engine.tables import Tables, check_mesh, register_tables, take_over
from shardwise.engine.vocabulary import Vocabulary
from shardwise.kernels.initializers import Initializer
from shardwise.memory.absent import withhold
from shardwise.memory.ledger import Ledger
from shardwise.memory.recompute import chosen
from shardwise.memory.replay import Replay
from shardwise.memory.slots import SlotPool
from shardwise.optim.flat import FlatOptimizer, Make, from_policy, from_torch, moment_names
from shardwise.optim.groups import OptimizerGroups
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.tensor.own_use import OwnUse
from shardwise.parallel.zero.batch_norm import synchronize_batch_norm
from shardwise.parallel.zero.bucket import BucketState, Fill
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.executor import Executor, UnitState
from shardwise.parallel.zero.layout import strategy_of
from shardwise.parallel.zero.modules import Holding, check_renormalized, repeated_blocks
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.parallel.zero.views import absent
from shardwise.plan.errors import ConfigError, DamagedError, MismatchError, UsageError
from shardwise.plan.mesh import Mesh
from shardwise.plan.registry import Registry
from shardwise.plan.slices import Slices
from shardwise.plan.target import load_target
from shardwise.precision.loss_scale import LossScale
from shardwise.precision.norms import with_wide_norms

GivenOptimizer = optim.Optimizer | Callable[[Iterable[nn.Parameter]], optim.Optimizer] | None

_log = logging.getLogger(__name__)

_NEVER_SHARES = 1 << 30
_AXES = ("world", "dp", "dp_shard", "dp_replicate", "tp", "pp", "model")
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


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
    """Make an engine of ``model``, whose parameters it takes over.

    config     a path (YAML, JSON), a dictionary, or a RunConfig
    loss       function of (model, batch) that returns the loss; left out, the model returns it
    optimizer  a torch optimizer on the model's parameters, or a callable that makes one; its class is rebuilt on the
               shards, and lr, betas, momentum, weight decay are read from its ``param_groups`` before every step, so
               that any scheduler of torch or transformers on it works. Left out, ``config.optimizer``
    elementwise  says of an unknown optimizer class that it treats each element alone
    initial    start rule per parameter name, for a model on ``meta``
    world      from ``comm.world.join``; left out, found in the environment
    example    a small batch: with mesh.pp above 1 it shows in which order the model uses its parts, and the chain of
               stages is first compared on it with the uncut model

    Errors: ConfigError, MeshError, PlanError, UsageError.
    """
    policies = load({} if config is None else config)
    take_back(model)
    if world is None:
        world = join(timeout_s=policies.comm.join_timeout_s, device=policies.comm.device)
        world.ends_with_engine = True
    site = _site(world, policies)
    check_named(model, site.settings)
    precision, notes = with_wide_norms(site.settings.precision, model)
    site = site._replace(settings=site.settings.model_copy(update={"precision": precision}), notes=notes)
    settings, mesh, device = site.settings, site.mesh, site.world.device
    if loss is None and settings.loss is not None:
        loss = load_target("loss.target", settings.loss.target)
    recipe = _recipe(model, settings, optimizer, elementwise)
    if mesh.pp == 1 and isinstance(model, Layers):
        model.build_all()
    original = Original(model)
    vocabulary = Vocabulary(model)
    if example is not None and mesh.pp > 1:  # where the model lies now: its buffers move to the device below
        home = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        check_stages(
            model, settings.pipeline, mesh.pp, lambda root: call_model(root, loss, example, home), home
        )
    uncut = _uncut(model, site)
    whole, start = _whole(model, site, initial)
    call = None if example is None else lambda root: call_model(root, loss, example, device)
    share = _share(model, whole, site, recipe, call)
    start = start.of_pieces(Slices(share.registry, mesh, site.world.rank))
    stages = [
        _stage(index, site, recipe, share, start, casts_output=loss is not None) for index in share.stages
    ]
    _forget_foreign(model, stages)
    original.compare()
    parts = _parts(model, site, recipe, share, stages, vocabulary, original)
    pipeline = None
    if mesh.pp > 1:
        peers = site.world.peers(site.groups["pp"], settings.comm, mesh.groups("pp"))
        pipeline = Pipeline(parts, settings.pipeline, loss, peers, not settings.zero.reshard_after_forward)
    site.traffic.clear()
    if site.world.rank == 0 and site.world.size > 1:
        _log.info("the ranks exchange through %s", site.world.transports())
    check = None
    if settings.check_first_step == "auto" and site.groups["model"].size > 1:
        check = Check(parts, settings, loss, uncut, share.to_recompute)
    engine = Engine(parts, loss, on_step, pipeline, check)
    _start_from_step(engine)
    return engine


def _start_from_step(engine: Engine) -> None:
    """Load the weights of ``init_from`` where that is a checkpoint; all else is as in a fresh run. Collective. Where it
    is refused, the model is the user's again."""
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


# World and configuration -------------------------------------------------------------------------------------------


def _site(world: World, config: RunConfig) -> Site:
    settings, mesh, _ = resolve(config, world.size, world.device.type)
    clock, traffic = world.clock(settings.comm), Traffic()
    groups = {axis: world.group(mesh, axis, settings.comm, clock, traffic) for axis in _AXES}
    ledger = Ledger()
    ledger.take("rings", "transports", lambda: world.ring_bytes)
    return Site(world, settings, mesh, groups, clock, traffic, ledger)


# Optimizer ---------------------------------------------------------------------------------------------------------


class _Recipe(NamedTuple):
    """How the optimizer of a bucket is made."""

    make: Make
    group_of: Callable[[str], int]
    """Optimizer group of a parameter, by name."""
    moments: tuple[str, ...]
    """Names of the moments, where they are known before the first step."""
    groups: OptimizerGroups
    """Where the numbers of its groups come from, step by step."""

    def optimizer_of(self, bucket: BucketState) -> FlatOptimizer:
        """That of one bucket."""
        assert bucket.weight.master is not None, "a trained bucket has a master"
        return FlatOptimizer(bucket.weight.master, self.make, bucket.layout.key.optimizer_group)


def _recipe(model: nn.Module, settings: RunConfig, given: GivenOptimizer, elementwise: bool) -> _Recipe:
    if callable(given) and not isinstance(given, optim.Optimizer):
        given = given(model.parameters())
    if given is None:
        policy = settings.optimizer
        groups = OptimizerGroups(policy, settings.schedule)
        make = from_policy(policy)
        return _Recipe(make, policy.group_of, moment_names(make), groups)
    if "optimizer" in settings.model_fields_set:
        raise ConfigError(
            "optimizer: given in the configuration and as an argument of initialize(); keep one"
        )
    group_of = {id(p): i for i, group in enumerate(given.param_groups) for p in group["params"]}
    by_name: dict[str, int] = {}
    missing = []
    for name, parameter in model.named_parameters():
        if id(parameter) in group_of:
            by_name[name] = group_of[id(parameter)]
        elif parameter.requires_grad:
            missing.append(name)
    if missing:
        raise UsageError(
            f"optimizer: {len(missing)} trained parameters are not in it: {', '.join(missing[:5])}; give it all of "
            "them, or set requires_grad = False on those that shall not train"
        )
    groups = OptimizerGroups(settings.optimizer, settings.schedule, given)
    make = from_torch(given, elementwise)
    return _Recipe(make, by_name.__getitem__, moment_names(make, len(given.param_groups)), groups)


# The whole model ---------------------------------------------------------------------------------------------------


def _whole(
    model: nn.Module, site: Site, initial: Mapping[str, Initializer] | None
) -> tuple[Whole, StartWeights]:
    """The model as all ranks have it in common."""
    if site.settings.batch_norm == "synchronized":
        synchronize_batch_norm(model, site.groups["dp"])
    check_renormalized(model, site.mesh.size("dp") * site.mesh.tp)
    whole = describe(model)
    start = start_weights(model, site.settings, initial, whole)
    for note in start.notes if site.world.rank == 0 else ():
        _log.warning("init_from: %s", note)
    take_rank_0(model, site.world.device, site.groups["world"], start.names)
    if not isinstance(model, Layers):  # the buffers of layers that are not built yet are on meta
        _move_buffers(model, site.world.device)
    return whole, start


def _uncut(model: nn.Module, site: Site) -> Uncut | None:
    """The model as it is before it is cut, where this rank is to compare its first step with it."""
    tp, pp = site.groups["tp"], site.groups["pp"]
    compares = tp.size * pp.size > 1 and tp.index == 0 and pp.index == pp.size - 1
    return keep_uncut(model) if compares and site.settings.check_first_step == "auto" else None


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if buffer.is_meta:
                raise UsageError(
                    f"model: buffer {name!r} of a {type(module).__name__} is on meta, so its values are lost; compute "
                    "it in forward, or build the model off meta"
                )
            module._buffers[name] = buffer.to(device)


# This rank's share -------------------------------------------------------------------------------------------------


class _Share(NamedTuple):
    """This rank's share of the model: slices of matrices, in some of the stages."""

    whole: Whole
    units: list[str]
    """Names of the modules that become Units, of the whole model."""
    to_recompute: list[str]
    """Names of blocks, of the whole model."""
    replay: Replay
    stages: Mapping[int, tuple[nn.Module, RunStage | None]]
    registry: Registry
    tables: Tables


def _share(
    model: nn.Module,
    whole: Whole,
    site: Site,
    recipe: _Recipe,
    call: Callable[[nn.Module], Any] | None = None,
) -> _Share:
    settings, mesh, groups, replay = site.settings, site.mesh, site.groups, Replay()
    check_mesh(model, mesh, settings)
    units = names_of_units(model, settings.zero)
    to_recompute = chosen(repeated_blocks(model) or units, settings.recompute)
    stages = cut_model(
        model,
        whole,
        settings.tensor,
        settings.pipeline,
        groups["tp"],
        groups["pp"],
        settings.train.seed,
        replay,
        call,
        site.world.device,
    )
    registry = register(whole, mesh, strategy_of(settings.zero, mesh), settings.precision, recipe.moments)
    modules = {index: module for index, (module, _) in stages.items()}
    tables = take_over(model, modules, whole.stages, settings, site.world, mesh, groups, site.clock)
    register_tables(registry, tables, mesh.size("dp"))
    return _Share(whole, units, to_recompute, replay, stages, registry, tables)


# Stages ------------------------------------------------------------------------------------------------------------


def _stage(
    index: int, site: Site, recipe: _Recipe, share: _Share, start: StartWeights, casts_output: bool
) -> Stage:
    """The stage laid out, its buckets filled, its hooks in place."""
    settings, device = site.settings, site.world.device
    module, run = share.stages[index]
    _move_buffers(module, device)
    drawn = draft(
        module,
        share.whole,
        share.registry,
        site.mesh,
        settings.zero,
        settings.precision,
        share.units,
        recipe.group_of,
        recipe.moments,
    )
    states = _unit_states(module, drawn, _bucket_context(drawn, site), start.or_own(drawn.holdings))
    if settings.compile.scope == "blocks":
        _compile_blocks(states, settings.compile.backend)
    recompute_blocks(module, share.to_recompute, settings.recompute, share.replay)
    executor = Executor(states, drawn.strategy, int(settings.zero.prefetch_units))
    _gather_around_methods(executor, settings.zero, site.mesh)
    is_last = index == site.mesh.pp * settings.pipeline.virtual_stages - 1
    handles = _cast_at_the_root(module, settings, device, casts_output and is_last)
    plan = replace(drawn.plan, notes=(*drawn.plan.notes, *site.notes, *share.tables.choices))
    return Stage(index, module, plan, executor, run, handles)


def _gather_around_methods(executor: Executor, zero: ZeroPolicy, mesh: Mesh) -> None:
    """Errors: ConfigError where a pattern names no method of a Unit."""
    units = {state.unit.name: index for index, state in enumerate(executor.states)}
    modules = {name: executor.states[index].module for name, index in units.items()}
    for name, method in methods_of(modules, zero, mesh):
        if executor.strategy.cuts_weight:
            executor.gather_around(units[name], method)


def _bucket_context(drawn: Draft, site: Site) -> BucketContext:
    zero, groups, device = site.settings.zero, site.groups, site.world.device
    holds = not zero.reshard_after_forward and groups["pp"].size > 1
    shares = zero.reuse_buffers and not holds
    spare = int(zero.prefetch_units) if shares else _NEVER_SHARES
    weights, gradients = SlotPool(device, spare, zero.debug), SlotPool(device, 0, zero.debug)
    site.ledger.take("gathered", "slots of weights", lambda: weights.bytes)
    site.ledger.take("staging", "slots of gradients", lambda: gradients.bytes)
    return BucketContext.of(
        strategy=drawn.strategy,
        group_over=lambda axes: groups[site.mesh.name_of(axes)],
        weights=weights,
        gradients=gradients,
        ledger=site.ledger,
        device=device,
    )


def _unit_states(model: nn.Module, drawn: Draft, around: BucketContext, start: Fill) -> list[UnitState]:
    states = []
    for unit, found in zip(drawn.plan.units, drawn.found, strict=True):
        made = []
        for place, layout in enumerate(unit.buckets):
            holdings = [drawn.holdings[slot.name] for slot in layout.slots]
            parameters = [_real(model, holding, layout.key.dtype, around.device) for holding in holdings]
            what = f"Unit {unit.title}" + (f" bucket {place}" if len(unit.buckets) > 1 else "")
            bucket = BucketState(layout, drawn.dtypes[unit.index, place], parameters, what, around)
            bucket.fill(start)
            bucket.weight.attach()
            made.append(bucket)
        trained = sum(len(bucket.parameters) for bucket in made if bucket.layout.key.trained)
        frozen = any(not bucket.layout.key.trained for bucket in made)
        states.append(UnitState(unit, found.module, made, trained, frozen))
    return states


def _real(model: nn.Module, holding: Holding, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """The Parameter object that the engine will point at the buffers; one on meta is replaced in every module."""
    if not holding.parameter.is_meta:
        return holding.parameter
    real = nn.Parameter(
        torch.empty(0, dtype=dtype, device=device), requires_grad=holding.parameter.requires_grad
    )
    for name in (holding.name, *holding.aliases):
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, real)
    return real


def _cast_at_the_root(
    model: nn.Module, settings: RunConfig, device: torch.device, casts_output: bool
) -> list[Any]:
    """The 16-bit contract: floating inputs in the compute dtype, and what a loss function gets in fp32."""
    dtype = settings.precision.compute_dtype

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_inputs(args, device, dtype), cast_inputs(kwargs, device, dtype)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_inputs(output, device, torch.float32)

    handles = [model.register_forward_pre_hook(before, with_kwargs=True)]
    if casts_output and dtype in _SIXTEEN_BITS:
        handles.append(model.register_forward_hook(after))
    return handles


def _compile_blocks(states: Sequence[UnitState], backend: str) -> None:
    for state in states[1:]:
        state.module.forward = torch.compile(state.module.forward, backend=backend)  # type: ignore[method-assign]


# Parts -------------------------------------------------------------------------------------------------------------


def _forget_foreign(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Weights of other stages, which the whole model still holds here, take no memory any more and read as NaN."""
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


def _own_use(whole: Whole, stages: Sequence[Stage], compiled: bool) -> OwnUse:
    """What looks for uses of slices by others than their owners. A compiled block is looked at from outside."""
    owned: list[tuple[str, nn.Parameter, nn.Module]] = []
    names: dict[nn.Module, str] = {}
    for stage in stages if whole.owners else ():
        modules = dict(stage.module.named_modules(remove_duplicate=False))
        blocks = [state.unit.name for state in stage.executor.states[1:]] if compiled else []
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            if name not in whole.owners:
                continue
            owner = whole.owners[name]
            owner = next((each for each in blocks if f"{owner}.".startswith(f"{each}.")), owner)
            owned.append((name, parameter, modules[owner]))
            names.setdefault(modules[owner], owner or "the model")
    return OwnUse(owned, names)


def _parts(
    model: nn.Module,
    site: Site,
    recipe: _Recipe,
    share: _Share,
    stages: list[Stage],
    vocabulary: Vocabulary,
    original: Original,
) -> Parts:
    settings, world, mesh, groups = site.settings, site.world, site.mesh, site.groups
    owned = [
        (stage.index, bucket)
        for stage in stages
        for state in stage.executor.states
        for bucket in state.buckets
        if bucket.layout.key.trained
    ]
    slices = Slices(share.registry, mesh, world.rank)
    shared = SharedGradients(
        owned,
        slices,
        lambda kin: world.groups_among(kin, "shared", settings.comm, site.clock, site.traffic),
    )
    trained = [Trained(bucket, recipe.optimizer_of(bucket)) for _, bucket in owned]
    for bucket, made in trained:
        site.ledger.take("moments", bucket.what, made.count_bytes)
    if share.tables:
        site.ledger.take("tables", "rows and their moments", lambda: share.tables.nbytes)
    if share.tables.is_dynamic:
        site.ledger.take("dynamic tables", "rows in use", lambda: share.tables.dynamic_bytes)
    # Of the whole model: a stage without fp16 of its own scales and skips with the others.
    half = any(
        entry.trained and settings.precision.dtypes(entry.name, entry.dtype).compute == torch.float16
        for entry in share.whole.parameters.values()
    )
    loss_scale = LossScale(settings.precision.loss_scale) if half else None
    return Parts(
        model=stages[0].module if mesh.pp == 1 else model,
        site=site,
        whole=share.whole,
        slices=slices,
        stages=stages,
        trained=trained,
        shared=shared,
        tables=share.tables,
        loss_scale=loss_scale,
        accumulation=Accumulation(settings.batch.accumulation or 1, groups["dp"], loss_scale, world.device),
        optimizer_groups=recipe.groups,
        passes=PassContext(
            dp=groups["dp"],
            tp=groups["tp"],
            clock=site.clock,
            replay=share.replay,
            vocabulary=vocabulary,
            own_use=_own_use(share.whole, stages, settings.compile.scope == "blocks"),
        ),
        original=original,
        folders=Folders(world, settings.checkpoint, world.next_engine()),
    )
