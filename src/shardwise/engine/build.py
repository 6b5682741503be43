"""Build: Plan + model -> running parts.

    1  site        which rank this is; open numbers of the configuration resolved
    2  recipe      how optimizers are made
    3  Plan        of all ranks, from the model's description; nothing is changed until it stands
    4  model       cut to the Plan: everything that is done to a module, in the order of compose/apply.py
    5  stages      of this rank: parameters of its Units, as the Plan says, in flat buffers; hooks that walk the list
    6  parts       what the engine runs

A model on ``meta`` gets its weights shard by shard: from ``initial`` rules (or its own ``initial_rules()``), or from
``init_from``; no rank ever holds a whole fp32 model at stage 3. A model that comes initialised takes rank 0's weights
everywhere.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.checkpoint.steps import steps_at
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from shardwise.compose.apply import (
    RunStage,
    Stages,
    apply_to_model,
    apply_to_stage,
    check_stages,
    offload_blocks,
    recompute_blocks,
)
from shardwise.compose.describe import Described, describe_cut
from shardwise.compose.plan import Planned, Policies, dtypes_of, exchanges_of, make_plan, strategies_of
from shardwise.config.auto import resolve
from shardwise.config.run import CompilePolicy, RunConfig, load
from shardwise.engine.accumulation import Accumulation
from shardwise.engine.check import Check, Uncut, keep_uncut
from shardwise.engine.engine import Engine, OnStep
from shardwise.engine.folders import Folders
from shardwise.engine.handlers import handlers_of
from shardwise.engine.held import take_back
from shardwise.engine.inputs import Loss, call_model, cast_inputs
from shardwise.engine.module_profile import ModuleProfile
from shardwise.engine.named import check_named, methods_of
from shardwise.engine.original import Original
from shardwise.engine.parts import Parts, Site, Stage, Trained
from shardwise.engine.pass_context import PassContext
from shardwise.engine.pipeline import Pipeline
from shardwise.engine.program import ActionLists
from shardwise.engine.recipe import GivenOptimizer, Recipe, recipe_of
from shardwise.engine.sharded_init import deal, take_pieces, world_of
from shardwise.engine.shared import SharedGradients
from shardwise.engine.start_weights import StartWeights, start_weights, take_rank_0
from shardwise.engine.step import StepEnd
from shardwise.engine.table_units import TableUnits
from shardwise.engine.tables import Tables, check_mesh, register_tables, take_over
from shardwise.engine.vocabulary import Vocabulary
from shardwise.kernels.initializers import Initializer
from shardwise.memory.absent import withhold
from shardwise.memory.activations import Activations, check_blocks
from shardwise.memory.ledger import Ledger
from shardwise.memory.recompute import chosen
from shardwise.memory.replay import Replay
from shardwise.memory.scratch import DiskScratch
from shardwise.memory.slots import SlotPool
from shardwise.memory.streams import clock_of
from shardwise.memory.tier import Tiers, threads_beside
from shardwise.parallel.expert.apply import mixtures
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.tensor.own_use import OwnUse
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.hooks import UnitHooks
from shardwise.parallel.zero.modules import Holding, check_renormalized, held, repeated_blocks
from shardwise.parallel.zero.order import Order
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.parallel.zero.unit_state import UnitState
from shardwise.parallel.zero.views import absent
from shardwise.parallel.zero.windows import UnitWindows
from shardwise.plan.errors import ConfigError, DamagedError, MismatchError, PlanError, UsageError
from shardwise.plan.lists import Strategy
from shardwise.plan.mesh import DENSE, Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.registry import UpdateRule
from shardwise.plan.slices import Slices
from shardwise.plan.target import load_target
from shardwise.plan.trace import Trace
from shardwise.plan.walker import Walker
from shardwise.precision.loss_scale import LossScale
from shardwise.precision.operations import Operations
from shardwise.precision.policy import PrecisionPolicy
from shardwise.precision.resolve import resolved

_log = logging.getLogger(__name__)

_NEVER_SHARES = 1 << 60
"""More bytes than all Units have."""
_AXES = ("world", "dp", "dp_shard", "dp_replicate", "tp", "pp", "model")
_EXPERT_AXES = ("expert_dp", "edp", "ep", "etp")
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
    world = world or world_of(model)
    if world is None:
        world = join(timeout_s=policies.comm.join_timeout_s, device=policies.comm.device)
        world.ends_with_engine = True
    site = _site(world, policies)
    check_named(model, site.settings)
    precision, notes = resolved(site.settings.precision, model)
    site = site._replace(settings=site.settings.model_copy(update={"precision": precision}), notes=notes)
    settings, mesh, device = site.settings, site.mesh, site.world.device
    if loss is None and settings.loss is not None:
        loss = load_target("loss.target", settings.loss.target)
    pieces = take_pieces(model, is_cut=mesh.tp * mesh.pp * mesh.ep * mesh.etp > 1)
    recipe = recipe_of(model, settings, optimizer, elementwise)
    if mesh.pp == 1 and isinstance(model, Layers):
        model.build_all()
    original = Original(model)
    vocabulary = Vocabulary(model)
    if example is not None and mesh.pp > 1:  # where the model lies now: its buffers move to the device below
        home = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        check_stages(
            model, settings.pipeline, mesh.pp, lambda root: call_model(root, loss, example, home), home
        )
    call = None if example is None else lambda root: call_model(root, loss, example, device)
    share = _share(model, site, recipe, call)
    if not site.groups["world"].all_equal(share.plan.fingerprint, "the Plan", device):
        raise PlanError(
            "model: the ranks were given different models, or use their parts in different orders (example=), "
            "so each would run a Plan of its own; build the same model on every rank, and give all the same kind of "
            "example"
        )
    site = _with_tiers(_with_groups_of_experts(site, share.plan), share.plan)
    uncut = _uncut(model, site)
    start = start_weights(model, settings, initial, share.described.spec)
    pieces = {name: piece for name, piece in pieces.items() if name not in start.names}
    start = start.or_later(pieces)
    cut = _cut(model, site, share, start)
    tables = _tables(model, cut, site, share)
    start = start.of_pieces(Slices(share.plan.registry, mesh, site.world.rank))
    walker = Walker({}, Trace(site.traffic, clock_of(device)))
    stages = [
        _stage(index, module, run, site, share, start, loss is not None, walker)
        for index, (module, run) in cut.items()
    ]
    deal(pieces, [bucket for stage in stages for state in stage.hooks.states for bucket in state.buckets])
    _forget_foreign(model, stages)
    original.compare()
    parts = _parts(model, site, recipe, share, tables, stages, vocabulary, walker)
    pipeline = None
    if mesh.pp > 1:
        peers = site.world.peers(site.groups["pp"], settings.comm, mesh.groups("pp"))
        pipeline = Pipeline(parts, settings.pipeline, loss, peers)
    end = StepEnd(parts)
    schedule = None if pipeline is None else pipeline.schedule
    walker.handlers.update(handlers_of(parts.hooks, end, parts.program.tables, schedule))
    parts.program.begin(parts.program.microbatches)
    site.traffic.clear()
    if site.world.rank == 0 and site.world.size > 1:
        _log.info("the ranks exchange through %s", site.world.transports())
    check = None
    if settings.check_first_step == "auto" and _cuts_the_model(mesh):
        check = Check(parts, settings, loss, uncut, share.to_recompute)
    engine = Engine(parts, original, loss, on_step, end, pipeline, check)
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
    if config.translated and world.rank == 0:
        _log.info("config: %s", config.translated)
    clock, traffic = world.clock(settings.comm), Traffic()
    groups = {axis: world.group(mesh, axis, settings.comm, clock, traffic) for axis in _AXES}
    ledger = Ledger()
    ledger.take("rings", "transports", lambda: world.ring_bytes)
    return Site(world, settings, mesh, groups, clock, traffic, ledger)


def _with_tiers(site: Site, plan: Plan) -> Site:
    """With files and a thread, where the Plan has state off the device. Errors: ConfigError, TierError."""
    wanted: dict[str, dict[str, int]] = {}
    own, policy = plan.own, site.settings.offload
    for (unit, place), rows in own.buffers.items():
        for row in rows:
            if row.tier == "disk":
                bucket, what = own.units[unit].buckets[place], own.units[unit].title_of(place)
                wanted.setdefault(row.kind, {})[what] = row.elements(bucket, plan.mesh) * row.itemsize
    if all(row.tier == "device" for rows in own.buffers.values() for row in rows):
        return site
    scratch = None
    if wanted:
        assert policy.disk_path is not None, "the configuration was checked"
        scratch = DiskScratch(policy.disk_path, site.world.rank, site.world.local_size)
        scratch.reserve(wanted)
    tiers = Tiers(scratch, policy.buffers, threads_beside(site.world.device, site.world.local_size))
    site.ledger.take("loaded", "blocks of state", lambda: tiers.staging.nbytes)
    return site._replace(tiers=tiers)


def _with_groups_of_experts(site: Site, plan: Plan) -> Site:
    """With those that state of experts lies on, where a rank has any."""
    units = (unit for each in plan.classes.values() for unit in each.units)
    if all(unit.axes == DENSE for unit in units):
        return site
    world, settings, mesh, groups, clock, traffic, *_ = site
    made = {axis: world.group(mesh, axis, settings.comm, clock, traffic) for axis in _EXPERT_AXES}
    levels = world.levels(mesh.groups("ep"), "ep", settings.comm, clock, traffic)
    return site._replace(groups={**groups, **made}, levels=levels)


# The Plan ----------------------------------------------------------------------------------------------------------


class _Share(NamedTuple):
    """The model as data, and what is done to it beside the Plan."""

    described: Described
    planned: Planned
    to_recompute: list[str]
    """Names of blocks, of the whole model."""
    to_offload: list[str]
    """Of blocks whose activations wait in host memory."""
    replay: Replay
    loads: ExpertLoads
    operations: Operations
    """Their dtypes."""

    @property
    def plan(self) -> Plan:
        """Of all ranks."""
        return self.planned.plan


def _share(
    model: nn.Module, site: Site, recipe: Recipe, call: Callable[[nn.Module], Any] | None = None
) -> _Share:
    settings, mesh = site.settings, site.mesh
    check_renormalized(model, mesh.size("dp") * mesh.tp)
    check_mesh(model, mesh, settings)
    described = describe_cut(
        model, mesh, settings.zero, settings.tensor, settings.pipeline, call, site.world.device
    )
    policies = policies_of(settings, recipe.group_of(model, described.spec), recipe.updates)
    planned = Planned(described.spec, policies, make_plan(described.spec, mesh, policies, site.world.rank))
    units = [unit for unit in described.spec.units if unit not in described.stacks]
    blocks = (units if isinstance(model, Layers) else ()) or repeated_blocks(model) or units
    operations = Operations(settings.precision)
    to_recompute = chosen(blocks, settings.recompute)
    to_offload = check_blocks(blocks, settings.offload)
    replay = Replay(operations)
    loads = ExpertLoads(described.spec.experts_of, replay)
    return _Share(described, planned, to_recompute, to_offload, replay, loads, operations)


def policies_of(
    settings: RunConfig, group_of: Callable[[str], int], updates: Sequence[UpdateRule]
) -> Policies:
    """Those of a Plan, out of a resolved configuration."""
    microbatches = settings.batch.accumulation or 1
    return Policies(
        settings.zero,
        settings.pipeline,
        settings.precision,
        group_of,
        updates,
        microbatches,
        settings.tokens_per_step,
        settings.experts.exchange == "blocks",
        settings.offload,
    )


# The model, cut to the Plan ----------------------------------------------------------------------------------------


def _cut(model: nn.Module, site: Site, share: _Share, start: StartWeights) -> Stages:
    """This rank's stages."""
    settings, device = site.settings, site.world.device

    def give_start() -> None:
        for note in start.notes if site.world.rank == 0 else ():
            _log.warning("init_from: %s", note)
        take_rank_0(model, device, site.groups["world"], start.names)
        if not isinstance(model, Layers):  # the buffers of layers that are not built yet are on meta
            _move_buffers(model, device)

    return apply_to_model(
        model,
        share.described,
        share.described.spec.stage_starts(settings.pipeline, site.mesh.pp),
        site.groups,
        settings.train.seed,
        share.replay,
        share.loads,
        site.levels,
        settings.experts,
        settings.batch_norm == "synchronized",
        give_start,
        settings.tiles,
        settings.pipeline.keeps_one_pass,
    )


def _tables(model: nn.Module, stages: Stages, site: Site, share: _Share) -> Tables:
    settings, mesh = site.settings, site.mesh
    modules = {index: module for index, (module, _) in stages.items()}
    spec = share.planned.spec
    stage_of = spec.stage_of_tables(spec.stage_starts(settings.pipeline, mesh.pp))
    dense_bytes = sum(share.plan.bytes_per_rank().values())
    tables = take_over(
        model, modules, stage_of, settings, site.world, mesh, site.groups, site.clock, dense_bytes
    )
    register_tables(share.plan, tables, share.planned.policies.microbatches)
    return tables


def _cuts_the_model(mesh: Mesh) -> bool:
    """Whether a rank computes with less than the whole model: with a slice, some stages or some experts."""
    return mesh.size("model") * mesh.ep * mesh.etp > 1


def _uncut(model: nn.Module, site: Site) -> Uncut | None:
    """The model as it is before it is cut, where this rank is to compare its first step with it."""
    tp, pp = site.groups["tp"], site.groups["pp"]
    compares = _cuts_the_model(site.mesh) and tp.index == 0 and pp.index == pp.size - 1
    return keep_uncut(model) if compares and site.settings.check_first_step == "auto" else None


def _move_buffers(model: nn.Module, device: torch.device, precision: PrecisionPolicy | None = None) -> None:
    """Onto the device; with ``precision`` in its dtypes."""
    moved: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if buffer.is_meta:
                raise UsageError(
                    f"model: buffer {name!r} of a {type(module).__name__} is on meta, so its values are lost; compute "
                    "it in forward, or build the model off meta"
                )
            path = f"{prefix}.{name}" if prefix else name
            dtype = buffer.dtype if precision is None else precision.buffer_dtype(path, buffer.dtype)
            module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device, dtype))


# Stages ------------------------------------------------------------------------------------------------------------


def _stage(
    index: int,
    module: nn.Module,
    run: RunStage | None,
    site: Site,
    share: _Share,
    start: StartWeights,
    casts_output: bool,
    walker: Walker,
) -> Stage:
    """The stage with its buckets filled and its hooks in place."""
    settings, device, mesh = site.settings, site.world.device, site.mesh
    is_last = index == mesh.pp * settings.pipeline.virtual_stages - 1

    def hooks(states: list[UnitState]) -> UnitHooks:
        first = share.plan.own.units_of(index)[0].index
        windows = UnitWindows(
            states,
            walker,
            first,
            _gathers_once(site),
            int(settings.zero.reductions_under_way),
            overlaps=int(settings.zero.prefetch_bytes) > 0,
        )
        order = Order(
            [state.unit for state in states],
            [state.strategy for state in states],
            int(settings.zero.prefetch_bytes),
            first,
        )
        made = UnitHooks(windows, order, walker, index, is_driven=mesh.pp > 1)
        _gather_around_methods(made, settings.zero, mesh)
        return made

    def recompute(module: nn.Module) -> None:
        share.operations.apply_to(module)  # inside of what runs again
        recompute_blocks(module, share.to_recompute, settings.recompute, share.replay)

    def offload(module: nn.Module) -> None:
        if share.to_offload:
            activations = Activations(module, device, keeps_last=mesh.pp == 1)
            site.ledger.take("activations", f"stage {index}", lambda: activations.bytes.most)
            offload_blocks(module, share.to_offload, activations)

    made, handles = apply_to_stage(
        module,
        buffers=lambda module: _move_buffers(module, device, settings.precision),
        weights=lambda module: _unit_states(module, index, share, _bucket_contexts(site), start),
        compiled=_compiler(settings.compile, device),
        recompute=recompute,
        offload=offload,
        hooks=hooks,
        casts=lambda module: _cast_at_the_root(module, settings, device, casts_output and is_last),
    )
    if settings.compile.cuda_graphs:  # a pass of all blocks is one round of their graphs
        begins = module.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
        handles = [*handles, begins]
    return Stage(index, module, made, run, handles)


def _compiler(
    policy: CompilePolicy, device: torch.device
) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """What compiles a block's forward; None where nothing is. Errors: ConfigError for CUDA graphs elsewhere."""
    if policy.cuda_graphs and device.type != "cuda":
        raise ConfigError(f"compile.cuda_graphs: this rank computes on {device.type}; leave it out there")
    if policy.scope == "none":
        return None
    options = {"triton.cudagraphs": True} if policy.cuda_graphs else None
    return partial(torch.compile, backend=policy.backend, options=options)


def _gathers_once(site: Site) -> bool:
    """Whether weights stay gathered through a step."""
    return not site.settings.zero.reshard_after_forward and site.mesh.pp > 1


def _gather_around_methods(hooks: UnitHooks, zero: ZeroPolicy, mesh: Mesh) -> None:
    """Errors: ConfigError where a pattern names no method of a Unit."""
    units = {state.unit.name: index for index, state in enumerate(hooks.states)}
    modules = {name: hooks.states[index].module for name, index in units.items()}
    for name, method in methods_of(modules, zero, mesh):
        if hooks.states[units[name]].has_windows:
            hooks.gather_around(units[name], method)


def _bucket_contexts(site: Site) -> Callable[[Strategy], BucketContext]:
    """Those of the Units of a stage, by how their state lies."""
    zero, groups, device = site.settings.zero, site.groups, site.world.device
    shares = zero.reuse_buffers and not _gathers_once(site)
    ahead_bytes = int(zero.prefetch_bytes) if shares else _NEVER_SHARES
    weights, gradients = SlotPool(device, ahead_bytes, zero.debug), SlotPool(device, 0, zero.debug)
    site.ledger.take("gathered", "slots of weights", lambda: weights.bytes)
    site.ledger.take("staging", "slots of gradients", lambda: gradients.bytes)

    @cache
    def around(strategy: Strategy) -> BucketContext:
        return BucketContext.of(
            strategy=strategy,
            group_over=lambda axes: groups[site.mesh.name_of(axes)],
            weights=weights,
            gradients=gradients,
            ledger=site.ledger,
            device=device,
            tiers=site.tiers,
        )

    return around


def _unit_states(
    module: nn.Module,
    index: int,
    share: _Share,
    around_of: Callable[[Strategy], BucketContext],
    start: StartWeights,
) -> list[UnitState]:
    """Errors: PlanError where ``module`` is not what the Plan says."""
    spec, precision = share.planned.spec, share.planned.policies.precision
    own = share.plan.own
    units, strategies = own.units_of(index), strategies_of(own, share.plan.registry, share.planned.policies)
    parameters_here = held(module, units, spec.canonical, f"stage {index}")
    fill, modules = start.or_own(parameters_here), dict(module.named_modules(remove_duplicate=False))
    states: list[UnitState] = []
    for unit in units:
        around, made = around_of(strategies[unit.index]), []
        for place, layout in enumerate(unit.buckets):
            holdings = [parameters_here[slot.name] for slot in layout.slots]
            parameters = [_real(module, holding, layout.key.dtype, around.device) for holding in holdings]
            what = unit.title_of(place)
            moments = [row.kind for row in own.buffers[unit.index, place] if row.is_moment]
            bucket = BucketState(
                layout, dtypes_of(layout, spec, precision), parameters, what, around, moments
            )
            bucket.fill(fill)
            bucket.weight.attach()
            made.append(bucket)
        trained = sum(len(bucket.parameters) for bucket in made if bucket.layout.key.trained)
        frozen = any(not bucket.layout.key.trained for bucket in made)
        numbered = replace(unit, index=len(states))  # hooks number the Units of its stage
        states.append(UnitState(numbered, modules[unit.name], made, trained, frozen, around.strategy))
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
    """The 16-bit contract: floating inputs in the compute dtype, but for the targets of a list of layers; and what a
    loss function gets in fp32."""
    dtype = settings.precision.compute_dtype
    of_targets = None if isinstance(model, Layers) else dtype

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        by_name = {
            name: cast_inputs(value, device, of_targets if name == "targets" else dtype)
            for name, value in kwargs.items()
        }
        return (*cast_inputs(args[:1], device, dtype), *cast_inputs(args[1:], device, of_targets)), by_name

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_inputs(output, device, torch.float32)

    handles = [model.register_forward_pre_hook(before, with_kwargs=True)]
    if casts_output and (dtype in _SIXTEEN_BITS or settings.precision.operations is not None):
        handles.append(model.register_forward_hook(after))
    return handles


def _modules_of(stages: Sequence[Stage]) -> list[tuple[str, nn.Module]]:
    """Modules of all stages here, each once."""
    found = {id(m): (name, m) for stage in stages for name, m in stage.module.named_modules()}
    return list(found.values())


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


def _own_use(owners: Mapping[str, str], stages: Sequence[Stage], compiled: bool) -> OwnUse:
    """What looks for uses of slices by others than their owners. A compiled block is looked at from outside."""
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


def _parts(
    model: nn.Module,
    site: Site,
    recipe: Recipe,
    share: _Share,
    tables: Tables,
    stages: list[Stage],
    vocabulary: Vocabulary,
    walker: Walker,
) -> Parts:
    settings, world, mesh, groups = site.settings, site.world, site.mesh, site.groups
    owned = [
        (stage.index, bucket)
        for stage in stages
        for state in stage.hooks.states
        for bucket in state.buckets
        if bucket.layout.key.trained
    ]
    slices = Slices(share.plan.registry, mesh, world.rank)
    shared = SharedGradients(
        owned,
        slices,
        lambda kin: world.groups_among(kin, "shared", settings.comm, site.clock, site.traffic),
    )
    trained = [Trained(bucket, recipe.optimizer_of(bucket)) for _, bucket in owned]
    for bucket, made in trained:
        if bucket.state is None:
            site.ledger.take("moments", bucket.what, made.count_bytes)
    if tables:
        site.ledger.take("tables", "rows and their moments", lambda: tables.nbytes)
        if tables.step_bytes:
            site.ledger.take("table steps", "of each row", tables.step_bytes)
    if tables.is_dynamic:
        site.ledger.take("dynamic tables", "rows in use", lambda: tables.dynamic_bytes)
    # Of the whole model: a stage without fp16 of its own scales and skips with the others.
    half = settings.precision.operations == "fp16" or any(
        entry.trained and settings.precision.dtypes(entry.name, entry.dtype).compute == torch.float16
        for entry in share.described.spec.parameters.values()
    )
    loss_scale = LossScale(settings.precision.loss_scale) if half else None
    spec, exchanges = share.described.spec, share.plan.exchanges
    if site.levels:
        in_blocks = share.planned.policies.in_blocks
        exchanges = exchanges_of(spec, mesh, share.plan.registry, site.levels[0].size, in_blocks)
    notes = (*share.plan.notes, *site.notes, *tables.choices)
    noted = replace(share.plan, notes=notes, exchanges=exchanges)
    planned = share.planned._replace(plan=noted)
    peers = None
    if noted.registry.needs("matrix"):
        peers = world.group(mesh, "stage", settings.comm, site.clock, site.traffic)
    orders = {stage.index: stage.hooks.order for stage in stages}
    share.loads.routers = {
        name: layer.router
        for stage in stages
        for name, layer in mixtures(stage.module, by_first_name=True).items()
    }
    folders = Folders(world, settings.checkpoint, world.next_engine())
    site.ledger.take("save", "copies behind training", lambda: folders.copy_bytes)
    return Parts(
        model=stages[0].module if mesh.pp == 1 else model,
        site=site,
        program=ActionLists(planned, orders, TableUnits(tables, noted.own, orders, walker), walker),
        slices=slices,
        stages=stages,
        trained=trained,
        shared=shared,
        tables=tables,
        accumulation=Accumulation(settings.batch.accumulation or 1, groups["dp"], loss_scale, world.device),
        optimizer_groups=recipe.groups,
        passes=PassContext(
            dp=groups["dp"],
            tp=groups["tp"],
            clock=site.clock,
            replay=share.replay,
            loads=share.loads,
            vocabulary=vocabulary,
            profile=ModuleProfile(
                settings, world, share.plan.registry, _modules_of(stages), walker.trace.clock
            ),
            own_use=_own_use(share.described.owners, stages, settings.compile.scope == "blocks"),
        ),
        folders=folders,
        stage_peers=peers,
    )
