"""Stages of this rank: their parameters in flat buffers, as the Plan describes them, under hooks that walk the list."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import ConfigError, UsageError
from shardwise.compose.apply import Phase, Step, apply_steps
from shardwise.compose.module_steps import (
    RunStage,
    defer_products,
    multiply_in_fp8,
    offload_blocks,
    recompute_blocks,
)
from shardwise.compose.plan import dtypes_of
from shardwise.config.run import CompilePolicy, RunConfig
from shardwise.engine.construction.outline import BuildSpec
from shardwise.engine.parts.inputs import cast_at_the_root
from shardwise.engine.parts.named import methods_of
from shardwise.engine.parts.out_of_memory import making
from shardwise.engine.parts.parts import RuntimeContext, Stage
from shardwise.engine.parts.program import StageLists
from shardwise.engine.state.start_weights import StartWeights
from shardwise.kernels.deferred import ProductQueue
from shardwise.memory.gradient_memory import GradientMemory
from shardwise.memory.slots import SlotPool
from shardwise.observe.memory import HeapTrimmer
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.hooks import UnitHooks
from shardwise.parallel.zero.modules import NamedParameter, held
from shardwise.parallel.zero.order import UnitOrder
from shardwise.parallel.zero.scales import GatheredWeight, WeightScales
from shardwise.parallel.zero.windows import UnitState, UnitWindows
from shardwise.plan.action import Kind
from shardwise.plan.mesh import Mesh
from shardwise.plan.state_form import stored_dtype, stored_elements
from shardwise.plan.strategy import Strategy
from shardwise.plan.walker import Walker
from shardwise.precision.policy import PrecisionPolicy
from shardwise.tiers.activations import ActivationOffload
from shardwise.tiers.tier import TierTensor

_NEVER_SHARES = 1 << 60
"""A limit of more bytes than all Units have, under which no Units share a slot."""


def make_stage(
    index: int,
    module: nn.Module,
    run: RunStage | None,
    site: RuntimeContext,
    outline: BuildSpec,
    start: StartWeights,
    casts_output: bool,
    walker: Walker,
    filled: Callable[[BucketState], object],
) -> Stage:
    """Build a stage with its buckets filled and its hooks in place.

    Args:
        index: Index of the stage in the model.
        module: The stage's part of the model.
        run: Calls the stage in a pipeline; None without a pipeline.
        site: The ranks and their configuration.
        outline: The model as data, and the Plan.
        start: The source of the start weights.
        casts_output: True if the outputs of the last stage are cast.
        walker: The walker of this rank's list.
        filled: Callback with each trained bucket as soon as the bucket has its start weights, while its state is in
            memory.

    Returns:
        The stage.

    Raises:
        ConfigError: if a policy does not fit the device or the model.
        PlanError: if ``module`` is not the module that the Plan describes.
    """
    steps = _StageSteps(index, module, site, outline, walker)
    is_last = index == site.mesh.pp * site.settings.pipeline.stages_per_rank - 1

    def lay_out() -> None:
        scales = None if outline.fp8 is None else outline.fp8.scales
        steps.states = _unit_states(module, index, outline, _bucket_contexts(site, scales), start, filled)

    apply_steps(
        Phase.STAGE,
        {**steps.by_name, "weights": lay_out, "casts": lambda: steps.cast(casts_output and is_last)},
    )
    return Stage(index, module, steps.hooks, run, steps.handles)


class _StageSteps:
    """The steps of one stage in the list of ``compose/apply.py``, and what they leave behind."""

    def __init__(
        self, index: int, module: nn.Module, site: RuntimeContext, outline: BuildSpec, walker: Walker
    ) -> None:
        self._index = index
        self._module = module
        self._site = site
        self._outline = outline
        self._walker = walker
        self._activations: ActivationOffload | None = None
        has_w = any(action.kind is Kind.W for action in outline.plan.own.actions)
        # With another number of microbatches the schedule may have W on this rank where the Plan's list has none.
        self._queue = ProductQueue() if has_w or site.settings.pipeline.splits_backward else None
        """The products that wait for W, if the schedule has W."""
        self.states: list[UnitState] = []
        """The stage's Units, after the step "weights"."""
        self.hooks: UnitHooks
        """The hooks of the Units, after the step "hooks"."""
        self.handles: list[Any] = []
        """Handles of the hooks that do not belong to Units."""

    @property
    def by_name(self) -> dict[str, Step]:
        """The steps that need nothing else, by the names of their rows."""
        site, module = self._site, self._module
        return {
            "buffers": lambda: move_buffers(module, site.world.device, site.settings.precision),
            "compile": self._compile,
            "fp8": self._multiply_in_fp8,
            "products": self._defer_products,
            "operations": lambda: self._outline.operations.apply_to(module),
            "recompute": self._recompute,
            "activations": self._offload,
            "hooks": self._hook,
            "methods": lambda: _gather_around_methods(self.hooks, site.settings, site.mesh),
            "graphs": self._mark_passes,
        }

    def cast(self, casts_output: bool) -> None:
        """Register the casts of inputs, and of outputs if ``casts_output``."""
        site = self._site
        self.handles += cast_at_the_root(
            self._module, site.settings.precision, site.world.device, casts_output
        )

    def _compile(self) -> None:
        compiled = _compiler(self._site.settings.compile, self._site.world.device)
        if compiled is None:
            return
        for state in self.states[1:]:
            own: Any = state.module
            if not getattr(own.forward, "runs_uncompiled", False):
                own.forward = compiled(own.forward)

    def _multiply_in_fp8(self) -> None:
        fp8 = self._outline.fp8
        if fp8 is None:
            return
        sources = {
            slot.name: GatheredWeight(bucket.weight, place)
            for state in self.states
            for bucket in state.buckets
            if bucket.layout.key.gather_dtype is not None
            for place, slot in enumerate(bucket.layout.slots)
        }
        multiply_in_fp8(self._module, fp8.names, fp8.products, sources, self._site.groups["tp"])

    def _defer_products(self) -> None:
        queue, plan = self._queue, self._outline.plan.own
        if queue is not None and any(plan.unit_stages[unit] == self._index for unit in plan.later_units):
            first = plan.units_of(self._index)[0].index
            queue.own(
                {
                    parameter: state.unit.index
                    for state in self.states
                    for bucket in state.buckets
                    if first + state.unit.index in plan.later_units and bucket.layout.key.trained
                    for parameter in bucket.parameters
                }
            )
            defer_products(self._module, self._outline.planned.spec.products, queue)
            self._site.ledger.take(
                "activations", f"stage {self._index}: products for W", lambda: queue.most_bytes
            )

    def _recompute(self) -> None:
        outline = self._outline
        recompute_blocks(self._module, outline.to_recompute, self._site.settings.recompute, outline.replay)

    def _offload(self) -> None:
        """Let the activations of the stage's blocks wait in host memory."""
        site, outline = self._site, self._outline
        if not outline.to_offload:
            return
        keeps_last = self._index in outline.plan.own.turning_stages
        activations = ActivationOffload(self._module, site.world.device, keeps_last, outline.alike)
        site.ledger.take("activations", f"stage {self._index}", lambda: activations.bytes.most)
        offload_blocks(self._module, outline.to_offload, activations)
        self._activations = activations

    def _hook(self) -> None:
        made = _hooks(
            self._index, self._module, self.states, self._site, self._outline, self._walker, self._queue
        )
        self.hooks = made
        if self._activations is not None:
            self._activations.microbatch = lambda: made.microbatch
            self._activations.listed = {
                state.unit.name for state in self.states if state.strategy.saved_tier != "device"
            }
            made.windows.activations = self._activations
            self._activations.on_missed_offload = made.windows.note_missed_offload
            self._activations.on_missed_reload = made.windows.note_missed_reload

    def _mark_passes(self) -> None:
        """Begin a new step of CUDA graphs with each pass of the stage."""
        if self._site.settings.compile.cuda_graphs:
            self.handles.append(self._module.register_forward_pre_hook(_begin_graphs))


def _begin_graphs(module: nn.Module, arguments: Any) -> None:
    torch.compiler.cudagraph_mark_step_begin()


def _hooks(
    index: int,
    module: nn.Module,
    states: list[UnitState],
    site: RuntimeContext,
    outline: BuildSpec,
    walker: Walker,
    queue: ProductQueue | None,
) -> UnitHooks:
    """Return the hooks that walk the list when the Units of a stage run."""
    settings, mesh = site.settings, site.mesh
    first = outline.plan.own.units_of(index)[0].index
    windows = UnitWindows(
        states,
        walker,
        first,
        _gathers_once(site),
        outline.plan.own.under_way,
        overlaps=int(settings.zero.prefetch_bytes) > 0,
    )
    order = UnitOrder([state.unit for state in states])
    lists = StageLists(outline.planned, index, order)
    is_compiled = settings.compile.scope != "none" or any(
        hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None
        for each in module.modules()
    )
    return UnitHooks(windows, lists, walker, index, mesh.pp > 1, is_compiled, queue)


def _compiler(
    policy: CompilePolicy, device: torch.device
) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return the function that compiles a block's forward; None if blocks are not compiled.

    Raises:
        ConfigError: for CUDA graphs on another device.
    """
    if policy.cuda_graphs and device.type != "cuda":
        raise ConfigError(f"compile.cuda_graphs: this rank computes on {device.type}; leave it out there")
    if policy.scope == "none":
        return None
    options = {"triton.cudagraphs": True} if policy.cuda_graphs else None
    return partial(torch.compile, backend=policy.backend, options=options)


def _gathers_once(site: RuntimeContext) -> bool:
    """Return whether weights stay gathered through a step."""
    return not site.settings.zero.reshard_after_forward and site.mesh.pp > 1


def _gather_around_methods(hooks: UnitHooks, settings: RunConfig, mesh: Mesh) -> None:
    """Gather the weights of Units around the methods that ``zero.forward_methods`` names.

    Raises:
        ConfigError: if a pattern names no method of a Unit.
    """
    units = {state.unit.name: index for index, state in enumerate(hooks.states)}
    modules = {name: hooks.states[index].module for name, index in units.items()}
    for name, method in methods_of(modules, settings, mesh):
        if hooks.states[units[name]].has_windows:
            hooks.gather_around(units[name], method)


def _bucket_contexts(
    site: RuntimeContext, scales: WeightScales | None
) -> Callable[[Strategy], BucketContext]:
    """Return a function from a Unit's strategy to the context of its buckets."""
    zero, groups, device = site.settings.zero, site.groups, site.world.device
    shares = zero.reuse_buffers and not _gathers_once(site)
    ahead_bytes = int(zero.prefetch_bytes) if shares else _NEVER_SHARES
    weights = SlotPool(device, ahead_bytes, zero.debug)
    shards, gradients = SlotPool(device, 0, zero.debug), SlotPool(device, 0, zero.debug)
    between = GradientMemory(device)
    site.ledger.take("gathered", "slots of weights", lambda: weights.bytes + shards.bytes)
    site.ledger.take("staging", "slots of gradients", lambda: gradients.bytes)

    @cache
    def around(strategy: Strategy) -> BucketContext:
        return BucketContext.of(
            strategy=strategy,
            group_over=lambda axes: groups[site.mesh.name_of(axes)],
            weights=weights,
            shards=shards,
            gradients=gradients,
            gradient_memory=between,
            ledger=site.ledger,
            device=device,
            tiers=site.tiers,
            scales=scales,
        )

    return around


def _unit_states(
    module: nn.Module,
    index: int,
    outline: BuildSpec,
    around_of: Callable[[Strategy], BucketContext],
    start: StartWeights,
    filled: Callable[[BucketState], object],
) -> list[UnitState]:
    """Build the state of every Unit of a stage.

    The weights of an initialised model are copied bucket by bucket, and the model's own memory is released.

    Raises:
        PlanError: if ``module`` is not the module that the Plan describes.
    """
    spec, precision = outline.planned.spec, outline.planned.policies.precision
    own = outline.plan.own
    units, strategies = own.units_of(index), own.strategies
    parameters_here = held(module, units, spec.canonical, f"stage {index}")
    fill, modules = start.or_own(parameters_here), dict(module.named_modules(remove_duplicate=False))
    states: list[UnitState] = []
    freed = HeapTrimmer()
    for unit in units:
        around, made = around_of(strategies[unit.index]), []
        for place, layout in enumerate(unit.buckets):
            holdings = [parameters_here[slot.name] for slot in layout.slots]
            parameters = [_real(module, holding, layout.key.dtype, around.device) for holding in holdings]
            what = unit.title_of(place)
            dtypes = dtypes_of(layout, spec, precision)
            moments = {
                row.kind: TierTensor(
                    stored_elements(row.form, row.elements(layout, outline.plan.mesh)),
                    stored_dtype(row.form, dtypes.master),
                )
                for row in own.buffers[unit.index, place]
                if row.is_moment
            }
            with making(f"the state of {what}"):
                bucket = BucketState(layout, dtypes, parameters, what, around, moments)
                own_bytes = sum(parameter.nbytes for parameter in parameters)
                with bucket.opened(changes=True):
                    bucket.fill(fill)
                    if layout.key.trained and start.later.isdisjoint(slot.name for slot in layout.slots):
                        filled(bucket)
                bucket.weight.attach()
            freed.note(own_bytes)
            made.append(bucket)
        trained = sum(len(bucket.parameters) for bucket in made if bucket.layout.key.trained)
        frozen = any(not bucket.layout.key.trained for bucket in made)
        numbered = replace(unit, index=len(states))  # hooks number a stage's Units from 0
        states.append(UnitState(numbered, modules[unit.name], made, trained, frozen, around.strategy))
    return states


def _real(
    model: nn.Module, holding: NamedParameter, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Return the Parameter that will point into the buffers; a Parameter on meta is replaced in every module."""
    if not holding.parameter.is_meta:
        return holding.parameter
    real = nn.Parameter(
        torch.empty(0, dtype=dtype, device=device), requires_grad=holding.parameter.requires_grad
    )
    for name in (holding.name, *holding.aliases):
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, real)
    return real


def modules_of(stages: Sequence[Stage]) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of all modules of this rank's stages, each module once."""
    found = {id(m): (name, m) for stage in stages for name, m in stage.module.named_modules()}
    return list(found.values())


def move_buffers(model: nn.Module, device: torch.device, precision: PrecisionPolicy | None = None) -> None:
    """Move a model's buffers onto the device.

    Args:
        model: The model or stage; its buffers are replaced.
        device: The device to move to.
        precision: The policy that chooses the buffers' dtypes; None keeps them.

    Raises:
        UsageError: if a buffer is on meta, so that its values are lost.
    """
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
