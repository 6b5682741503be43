"""Build: Plan + model -> running parts.

    1  world      which rank this is                            4  plan            Units, layouts, placements, Actions
    2  config     open numbers resolved and printed             5  start weights   drawn, read or broadcast, owned
    3  parallel   slices along "tp", then stages along "pp"                        elements alone
                                                                6  hooks           the executor takes over

A model on ``meta`` gets its weights shard by shard: from ``initial`` rules (or its own ``initial_rules()``), or from
``init_from``; no rank ever holds a whole fp32 model at stage 3. A model that comes initialised takes rank 0's weights
everywhere.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.comm.collectives import Clock, Group
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from shardwise.compose.cut import check_stages, cut_model, recompute_blocks
from shardwise.compose.draft import Draft, draft, names_of_units
from shardwise.compose.whole import Whole, describe, register
from shardwise.config.auto import resolve
from shardwise.config.run import RunConfig, load
from shardwise.engine.accumulation import Accumulation
from shardwise.engine.engine import Engine, Loss, OnStep
from shardwise.engine.inputs import call_model, cast_inputs
from shardwise.engine.parts import Parts, Stage
from shardwise.engine.pipeline import Pipeline
from shardwise.engine.shared import SharedGradients
from shardwise.engine.step import Trained
from shardwise.engine.tables import register_tables, take_over
from shardwise.memory.recompute import chosen
from shardwise.memory.replay import Replay
from shardwise.memory.slots import SlotPool
from shardwise.models.gpt import Gpt
from shardwise.models.initial import Rule, draw
from shardwise.models.source import open_weights
from shardwise.optim.flat import FlatOptimizer, Make, from_policy, from_torch, moments_of
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.zero.batch_norm import synchronize_batch_norm
from shardwise.parallel.zero.bucket import BucketState, Fill, Surroundings, absent
from shardwise.parallel.zero.executor import Executor, UnitState
from shardwise.parallel.zero.layout import strategy_of
from shardwise.parallel.zero.modules import Holding, repeated_blocks
from shardwise.plan.errors import ConfigError, UsageError
from shardwise.plan.placement import runs
from shardwise.plan.registry import Registry
from shardwise.plan.target import load_target
from shardwise.plan.unit import Slot
from shardwise.precision.loss_scale import LossScale

_NEVER_SHARES = 1 << 30
_AXES = ("world", "dp", "dp_shard", "dp_replicate", "tp", "pp", "model")
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def initialize(
    model: nn.Module,
    config: "str | Path | Mapping[str, Any] | RunConfig | None" = None,
    *,
    loss: Loss | None = None,
    optimizer: optim.Optimizer | Callable[[Iterable[nn.Parameter]], optim.Optimizer] | None = None,
    elementwise: bool = False,
    initial: Mapping[str, Rule] | None = None,
    world: World | None = None,
    on_step: Sequence[OnStep] = (),
    example: Any = None,
) -> Engine:
    """Make an engine of ``model``, whose parameters it takes over.

    config     a path (YAML, JSON), a dictionary, or a RunConfig
    loss       function of (model, batch) that returns the loss; left out, the model returns it
    optimizer  a torch optimizer on the model's parameters, or a callable that makes one; its class and groups are
               rebuilt on the shards. Left out, ``config.optimizer``
    elementwise  says of an unknown optimizer class that it treats each element alone
    initial    start rule per parameter name, for a model on ``meta``
    world      from ``comm.world.join``; left out, found in the environment
    example    a small batch: with mesh.pp above 1 the chain of stages is first compared on it with the uncut model

    Errors: ConfigError, MeshError, PlanError, UsageError.
    """
    world = join() if world is None else world
    resolved = resolve(load({} if config is None else config), world.size, world.device.type)
    settings, mesh = resolved.config, resolved.mesh
    if loss is None and settings.loss is not None:
        loss = load_target("loss.target", settings.loss.target)
    if callable(optimizer) and not isinstance(optimizer, optim.Optimizer):
        optimizer = optimizer(model.parameters())
    make, group_of, moments = _optimizer(model, settings, optimizer, elementwise)
    clock, traffic = Clock(settings.comm.deadline_s, settings.comm.delay_s), Traffic()
    groups = {axis: world.group(mesh, axis, settings.comm, clock, traffic) for axis in _AXES}
    if settings.batch_norm == "synchronized":
        synchronize_batch_norm(model, groups["dp"])
    whole = describe(model)
    fill, filled = _start_weights(model, settings, initial, whole)
    _take_rank_0(model, world, groups["world"], filled)
    if not isinstance(model, Layers):  # the buffers of layers that are not built yet are on meta
        _move_buffers(model, world.device)
    units = names_of_units(model, settings.zero)
    if example is not None and mesh.pp > 1:
        check_stages(
            model, settings.pipeline, mesh.pp, lambda root: call_model(root, loss, example, world.device)
        )
    to_recompute = chosen(repeated_blocks(model) or units, settings.recompute)
    replay = Replay()
    cut_into = cut_model(
        model,
        whole,
        settings.tensor,
        settings.pipeline,
        groups["tp"],
        groups["pp"],
        settings.train.seed,
        replay,
    )
    strategy = strategy_of(settings.zero, mesh)
    registry = register(whole, strategy, settings.precision, moments)
    tables = take_over(model, settings, world, mesh, groups["dp"], clock)
    register_tables(registry, tables)
    if fill is not None:
        fill = _of_pieces(fill, registry, groups["tp"])
    stages: list[Stage] = []
    trained: list[Trained] = []
    owned: list[tuple[int, BucketState]] = []
    for index, (module, run) in cut_into.items():
        _move_buffers(module, world.device)
        drawn = draft(
            module, whole, registry, mesh, settings.zero, settings.precision, units, group_of, moments
        )
        around = _surroundings(drawn, groups, settings, world.device)
        states = _unit_states(module, drawn, around, fill, filled)
        if settings.compile.scope == "blocks":
            _compile_blocks(states, settings.compile.backend)
        recompute_blocks(module, to_recompute, settings.recompute, replay)
        executor = Executor(states, drawn.strategy, int(settings.zero.prefetch_units))
        plan = replace(drawn.plan, notes=(*drawn.plan.notes, *tables.choices))
        stages.append(Stage(index, module, plan, executor, run))
        for bucket in (bucket for state in states for bucket in state.buckets):
            if bucket.master is not None:
                owned.append((index, bucket))
                optimizer_of = FlatOptimizer(bucket.master, make, bucket.layout.key.optimizer_group)
                trained.append(Trained(bucket, optimizer_of))
        is_last = index == mesh.pp * settings.pipeline.interleave - 1
        _cast_at_the_root(module, settings, world.device, casts_output=loss is not None and is_last)
    _forget_foreign(model, stages)
    shared = SharedGradients(
        owned,
        registry,
        mesh,
        world.rank,
        lambda ranks: world.group_among(ranks, "shared", settings.comm, clock, traffic),
    )
    # Of the whole model: a stage without fp16 of its own scales and skips with the others.
    half = any(
        entry.trained and settings.precision.dtypes(entry.name, entry.dtype).compute == torch.float16
        for entry in whole.parameters.values()
    )
    loss_scale = LossScale(settings.precision.loss_scale) if half else None
    parts = Parts(
        model=stages[0].module if mesh.pp == 1 else model,
        world=world,
        device=world.device,
        mesh=mesh,
        whole=whole,
        registry=registry,
        stages=stages,
        strategy=strategy,
        trained=trained,
        shared=shared,
        tables=tables,
        groups=groups,
        clock=clock,
        traffic=traffic,
        loss_scale=loss_scale,
        accumulation=Accumulation(settings.batch.accumulation or 1, groups["dp"], loss_scale, world.device),
        top_lr=settings.optimizer.lr if optimizer is None else float(optimizer.param_groups[0]["lr"]),
        replay=replay,
        number=world.next_engine(),
    )
    pipeline = None
    if mesh.pp > 1:
        peers = world.peers(groups["pp"], settings.comm)
        pipeline = Pipeline(parts, settings.pipeline, loss, peers, settings.zero.regather == "step")
    traffic.clear()
    return Engine(parts, settings, loss, on_step, pipeline)


def _forget_foreign(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Weights of other stages, which the whole model still holds here, take no memory any more and read as NaN."""
    held = {id(parameter) for stage in stages for parameter in stage.module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in held and not parameter.is_meta:
            parameter.data = absent(tuple(parameter.shape), parameter.dtype, parameter.device)


def _surroundings(
    drawn: Draft, groups: Mapping[str, Group], settings: RunConfig, device: torch.device
) -> Surroundings:
    holds = settings.zero.regather == "step" and groups["pp"].size > 1
    shares = settings.zero.share_memory and not holds
    spare = int(settings.zero.prefetch_units) if shares else _NEVER_SHARES
    return Surroundings(
        strategy=drawn.strategy,
        shard=groups["dp_shard"],
        replicate=groups["dp_replicate"],
        both=groups["dp"],
        weights=SlotPool(device, spare, settings.zero.debug),
        gradients=SlotPool(device, 0, settings.zero.debug),
        device=device,
    )


# Optimizer ---------------------------------------------------------------------------------------------------------


def _optimizer(
    model: nn.Module, settings: RunConfig, given: Any, elementwise: bool
) -> tuple[Make, Callable[[str], int], tuple[str, ...]]:
    if given is None:
        policy = settings.optimizer
        return from_policy(policy), policy.group_of, moments_of(policy)
    if "optimizer" in settings.model_fields_set:
        raise ConfigError(
            "optimizer: given in the configuration and as an argument of initialize(); keep one"
        )
    groups = {id(p): i for i, group in enumerate(given.param_groups) for p in group["params"]}
    by_name: dict[str, int] = {}
    missing = []
    for name, parameter in model.named_parameters():
        if id(parameter) in groups:
            by_name[name] = groups[id(parameter)]
        elif parameter.requires_grad:
            missing.append(name)
    if missing:
        raise UsageError(
            f"optimizer: {len(missing)} trained parameters are not in it: {', '.join(missing[:5])}; give it all of "
            "them, or set requires_grad = False on those that shall not train"
        )
    return from_torch(given, elementwise), by_name.__getitem__, ()


# Start weights -----------------------------------------------------------------------------------------------------


def _start_weights(
    model: nn.Module, settings: RunConfig, initial: Mapping[str, Rule] | None, whole: Whole
) -> tuple[Fill | None, Collection[str]]:
    """How to get any elements of any whole parameter (None where the model holds all already), and which it makes anew.

    What it does not make is the model's own.
    """
    parameters = dict(model.named_parameters())
    if settings.init_from is not None:
        source = open_weights(settings.init_from, model.policy if isinstance(model, Gpt) else None)
        source.check({entry.name: entry.shape for entry in whole.parameters.values()})
        names = list(whole.parameters)
        return lambda slot, start, stop, dtype: source.read(slot.name, start, stop).to(dtype), names
    if isinstance(model, Layers) and initial is None:
        return None, ()  # a LayerSpec's layer comes with its start weights
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if not on_meta and initial is None:
        return None, ()
    own = getattr(model, "initial_rules", None)
    rules = dict(initial or (own() if own is not None else {}))
    without = [name for name in on_meta if name not in rules]
    if without:
        raise UsageError(
            f"model: {len(without)} parameters are on meta and nobody says how they start: {', '.join(without[:5])}; "
            "give initialize(..., initial={name: rule}) (shardwise.models.initial), init_from, or an initialised model"
        )
    seed = settings.train.seed
    return lambda slot, start, stop, dtype: draw(rules[slot.name], seed, slot.name, start, stop, dtype), rules


def _of_pieces(fill: Fill, registry: Registry, tp: Group) -> Fill:
    """The same for elements of this rank's piece on "tp"; padding starts at zero."""

    def fill_piece(slot: Slot, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        info = registry.get("parameter", slot.name)
        out = torch.zeros(stop - start, dtype=dtype)
        for run in runs(info.shape, info.on("tp"), tp.index, tp.size, start, stop):
            part = fill(slot, run.full, run.full + run.elements, dtype)
            if run.elements == stop - start:
                return part
            out[run.local - start : run.local - start + run.elements] = part
        return out

    return fill_piece


def _take_rank_0(model: nn.Module, world: World, both: Any, filled: Collection[str]) -> None:
    """What the model brings, weights and buffers, is the first rank's everywhere; not what is ``filled`` anyway."""
    if both.size == 1:
        return
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_meta or name in filled:
                continue
            whole = tensor.detach().to(world.device).contiguous()
            both.broadcast(whole.view(-1), 0, name).wait()
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


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


# Units -------------------------------------------------------------------------------------------------------------


def _unit_states(
    model: nn.Module, drawn: Draft, around: Surroundings, fill: Fill | None, filled: Collection[str]
) -> list[UnitState]:
    states = []
    for unit, found in zip(drawn.plan.units, drawn.found, strict=True):
        made = []
        for place, layout in enumerate(unit.buckets):
            holdings = [drawn.holdings[slot.name] for slot in layout.slots]
            source = _source(fill, filled, drawn.holdings)
            parameters = [_real(model, holding, layout.key.dtype, around.device) for holding in holdings]
            what = f"Unit {unit.title}" + (f" bucket {place}" if len(unit.buckets) > 1 else "")
            bucket = BucketState(layout, drawn.dtypes[unit.index, place], parameters, what, around)
            bucket.fill(source)
            bucket.attach()
            made.append(bucket)
        trained = sum(len(bucket.parameters) for bucket in made if bucket.layout.key.trained)
        frozen = any(not bucket.layout.key.trained for bucket in made)
        states.append(UnitState(unit, found.module, made, trained, frozen))
    return states


def _source(fill: Fill | None, filled: Collection[str], holdings: Mapping[str, Holding]) -> Fill:
    """Start weights from ``fill`` where it makes them, else from the model as it is now."""

    def read(slot: Slot, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if fill is not None and slot.name in filled:
            return fill(slot, start, stop, dtype)
        return holdings[slot.name].parameter.detach().reshape(-1)[start:stop]

    return read


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


# The root ----------------------------------------------------------------------------------------------------------


def _cast_at_the_root(
    model: nn.Module, settings: RunConfig, device: torch.device, casts_output: bool
) -> None:
    """The 16-bit contract: floating inputs in the compute dtype, and what a loss function gets in fp32."""
    dtype = settings.precision.compute_dtype

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_inputs(args, device, dtype), cast_inputs(kwargs, device, dtype)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_inputs(output, device, torch.float32)

    model.register_forward_pre_hook(before, with_kwargs=True)
    if casts_output and dtype in _SIXTEEN_BITS:
        model.register_forward_hook(after)


def _compile_blocks(states: Sequence[UnitState], backend: str) -> None:
    for state in states[1:]:
        state.module.forward = torch.compile(state.module.forward, backend=backend)  # type: ignore[method-assign]
