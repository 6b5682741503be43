"""Check: the comparison of a cut model's first step with the uncut model, before any weight is updated.

A term that is missing in a sum over "tp" or in a message between stages, or that is summed once too often over the
ranks that share experts, changes gradients and may leave the loss unchanged. So one rank of those that share a
microbatch (the rank that reports its loss; if only "ep" cuts the model, every rank) assembles the whole model again,
runs the step's microbatches on it with the same dropout, and compares

    the mean loss, the gradient of every parameter                      of all data-parallel ranks' batches
    the norm of these gradients                                         with the norm that is used for clipping

    dtype          loss      gradient, of max(its own norm, 1e-3 of the whole)
    fp64, no tp    1e-9      1e-9
    fp64, rounded  1e-4      1e-3      to fp32 inside, as an operation of the uncut model's forward shows
    fp32, slices   1e-3      1e-2      sums in another order
    16 bits, fp8   5e-2      0.3       relative to the whole gradient only: the uncut model computes in fp32. The same
                                       holds for models that round to 16 bits inside, and if torch may round products
                                       of matrices (torch.set_float32_matmul_precision)

The copy has the user's hooks (uncut.py) and runs under the autocast of the passes. It draws the same random numbers,
from the same states of the generators (passes/draws.py). If a loss was computed outside of the engine's call, the
outputs of the model are compared, and the copy's backward pass starts with the gradients that reached these outputs in
the real backward passes.

No number of the run changes: random generators are restored, buffers and modules are copies, traffic is not counted.
If the models cannot be compared (the model cannot be copied, holds tables, or does not fit the free memory; a loss
depends on weights other than through the engine's call; batch norms are synchronized), a warning gives the reason.
Under tp a model with hooks of the user, which see slices, is then refused.

Cost: once, the whole weights and gradients on the ranks of one model, and a step of the uncut model on one of them.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import PlanError, ShardwiseError, UsageError
from shardwise.base.pytree import rebuilt, tensors_by_path
from shardwise.base.user_hooks import is_users
from shardwise.comm.first_text import first_text
from shardwise.compose.module_steps import recompute_blocks
from shardwise.compose.spec import ParameterSpec
from shardwise.config.run import RunConfig
from shardwise.engine.parts.inputs import Loss, call_model, cast_inputs, find_loss
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state import state
from shardwise.engine.step.end import StepTotals
from shardwise.engine.step.uncut import UncutModel, give_hooks, hooked
from shardwise.models.dropout import replace_dropout
from shardwise.models.tiles import tile_foreign, tile_model
from shardwise.observe.memory import available_bytes
from shardwise.parallel.expert.apply import surround
from shardwise.parallel.pipeline.stage_module import parts_of
from shardwise.parallel.tensor.outputs import is_cache
from shardwise.passes.draws import PassStart
from shardwise.passes.generators import RandomGenerators
from shardwise.passes.replay import DrawReplay

_log = logging.getLogger("shardwise")
_NAMED = 5
_SHARE_OF_FREE = 0.25
_COPIES = 4
"""Copies of all parameters in memory at a time: weights of the uncut model, its gradients (in fp64 when they are
compared), gradients of the cut model."""
_NORM = 1e-3
"""Largest relative difference between the norm used for clipping and the norm of the gradients, which may be in 16
bits."""
_LOW = (torch.bfloat16, torch.float16)
_MOST_OPEN = 8
"""Passes without a backward pass that are kept if there is no pipeline. Each keeps its graph in memory."""


def compared_bytes(parameters: Iterable[ParameterSpec]) -> int:
    """Return the bytes of the whole weights and gradients that a rank which compares holds, without its passes.

    Args:
        parameters: Entries of all parameters of the uncut model.
    """
    return _COPIES * sum(prod(entry.shape) * max(4, entry.dtype.itemsize) for entry in parameters)


class Tolerances(NamedTuple):
    """The largest relative errors of the loss and of a gradient."""

    loss: float
    gradient: float


@dataclass
class _CheckedOutput:
    """A tensor that a pass returned, its version then, and the gradient that reached it from outside."""

    tensor: Tensor
    version: int
    gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient that a backward pass has computed for this tensor."""
        gradient = gradient.detach()
        self.gradient = gradient.clone() if self.gradient is None else self.gradient + gradient


@dataclass(eq=False)
class _CheckedPass:
    """A forward pass with gradients: its arguments, its outputs and their gradients."""

    args: Any
    kwargs: Any
    autocast: tuple[bool, torch.dtype]
    microbatch: int = 0
    begun: PassStart | None = None
    outputs: dict[str, _CheckedOutput] = field(default_factory=dict)
    """The tensors that the pass returned, by their paths in the output."""
    nodes: set[Any] = field(default_factory=set)
    """Graph nodes of the outputs, at which the search for other paths to weights stops."""
    losses: list[Tensor] = field(default_factory=list)
    """The loss that the pass returned; empty if it returned none."""
    weight: float = 0.0
    scale: float = 1.0
    is_loss: bool = True
    """True if backward passes began at the loss that the pass returned."""


class FirstStepCheck:
    """The comparison of one engine's first step with the uncut model.

    Args:
        parts: the parts of the engine.
        settings: the resolved configuration.
        loss: the user's loss function, or None.
        uncut: the uncut model on a rank that compares; None on the ranks that share a model with it.
        recomputed: names of the blocks that are recomputed.
    """

    def __init__(
        self,
        parts: EngineParts,
        settings: RunConfig,
        loss: Loss | None,
        uncut: UncutModel | None,
        recomputed: list[str],
    ):
        self._parts = parts
        self._settings = settings
        self._loss = loss
        self._uncut = uncut
        self._recomputed = recomputed
        self._buffers: dict[str, Tensor] = {}
        self._running: list[_CheckedPass] = []
        self._passes: list[_CheckedPass] = []
        self._unknown = ""
        """The reason why the gradients of the step cannot be computed again; "" if they can."""
        self._handles: list[Any] = []
        self._rounds_inside = False
        self._rounds_to_fp32 = False
        self._runs_uncut = False

    # During the step -------------------------------------------------------------------------------------------

    def sees(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Record the arguments of a forward pass with gradients that begins."""
        if not self._buffers:
            held = state.own_buffers(self._parts)
            self._buffers = {name: buffer.detach().clone() for name, buffer in held.items()}
        if self._uncut is None:
            return
        kind = self._parts.device.type
        cast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        if len(self._running) >= _MOST_OPEN and self._parts.mesh.pp == 1:
            self._unknown = f"more than {_MOST_OPEN} passes with gradients came before a backward pass"
            self._running.clear()
        if any(is_cache(each) for each in (*args, *kwargs.values())):
            self._unknown = "a pass with gradients goes on from cached keys and values of a pass before"
        if self._parts.passes.keeps_documents_apart((args, dict(kwargs))):
            self._unknown = (
                "position_ids begin anew, and one process of transformers may see the documents before"
            )
        own_args, own_kwargs = tree_map_only(Tensor, _cloned, (args, dict(kwargs)))
        self._running.append(_CheckedPass(own_args, own_kwargs, cast))

    def returned(self, output: Any, microbatch: int) -> Any:
        """Record the output of the pass, and return it with hooks that record the gradients which reach it."""
        if self._uncut is None or not self._running:
            return output
        run = self._running[-1]
        run.microbatch, run.begun = microbatch, self._parts.passes.replay.draws.begun.get(microbatch)
        paths = {id(tensor): path for path, tensor in reversed(list(tensors_by_path(output)))}
        seen: dict[int, Tensor] = {}

        def watched(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return rebuilt(value, watched)
            if not (type(value) is Tensor and value.requires_grad and value.is_floating_point()):
                return value
            if id(value) not in seen:
                twin = seen[id(value)] = value.view_as(value)
                held = run.outputs[paths[id(value)]] = _CheckedOutput(value.detach(), value._version)
                self._handles.append(twin.register_hook(held.add))
                run.nodes.add(twin.grad_fn)
            return seen[id(value)]

        output = watched(output)
        try:
            run.losses = [find_loss(output)]
        except ShardwiseError:
            run.losses = []
        return output

    def begins(self, loss: Tensor) -> None:
        """Check, before a backward pass from ``loss``, that the loss reaches weights only through recorded outputs."""
        if self._uncut is None or self._unknown:
            return
        runs = [*self._running, *self._passes]
        own = {id(parameter) for parameter in self._parts.model.parameters()}
        if _reaches(loss, set().union(*(run.nodes for run in runs)), own):
            self._unknown = (
                "the loss reaches weights by another way than by what engine(batch) returned (a penalty on "
                "parameters, a hook that keeps outputs, engine.run, engine.log_probs)"
            )

    def counts(self, loss: Tensor, weight: float, scale: float) -> None:
        """Record the weight and the scale of the backward pass from ``loss`` that has run.

        Args:
            loss: the loss.
            weight: weight of the microbatch.
            scale: factor of the loss in the backward pass.
        """
        if self._uncut is None:
            return
        reached = [run for run in self._running if any(o.gradient is not None for o in run.outputs.values())]
        for run in [*reached, *self._passes]:
            run.is_loss = run.is_loss and any(each is loss for each in run.losses)
        self._count(reached, [weight] * len(reached), [scale] * len(reached))

    def counted(self, weights: Sequence[float], scales: Sequence[float]) -> None:
        """Record the weights and scales of the microbatches that a pipeline has run."""
        begun = self._parts.passes.replay.draws.begun
        for i, run in enumerate(self._running):
            run.microbatch, run.begun = i, begun.get(i)
        self._count(list(self._running), weights, scales)

    def _count(self, runs: Sequence[_CheckedPass], weights: Sequence[float], scales: Sequence[float]) -> None:
        for run, weight, scale in zip(runs, weights, scales, strict=False):
            run.weight, run.scale = weight, scale
            self._passes.append(run)
        self._running = [run for run in self._running if run not in runs]

    def ends_outside(self) -> None:
        """Record that a backward pass has run whose loss is not known, so that the step cannot be compared."""
        self._unknown = (
            "loss.backward() was called on the loss itself (adopt_backward), not engine.backward(loss)"
        )

    def meets_the_cut_model(self) -> None:
        """Stop the comparison if the engine's own model is called while only the uncut model should run."""
        if self._runs_uncut:
            raise _NotComparable("the loss function calls the engine's model, not the one that it is given")

    def forget(self) -> None:
        """Drop what was recorded, because the step begins again."""
        self._running, self._passes, self._unknown = [], [], ""
        self._buffers = {}  # the next step starts from the buffers that the skipped step or a load has left
        self.close()

    def close(self) -> None:
        """Remove the hooks on outputs."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Before the update -----------------------------------------------------------------------------------------

    def compare(self, step: int, totals: StepTotals, divisor: float) -> None:
        """Compare the step with the uncut model. Collective.

        Args:
            step: number of the step.
            totals: the sums over all ranks at the end of the step.
            divisor: divisor of the summed gradients.

        Raises:
            PlanError: on all ranks alike, if loss, gradients or norm differ, or if a model with user hooks under tp
                cannot be compared.
        """
        self.close()
        with self._uncounted():
            reason = self._obstacle()
            if self._leaves_out(reason):
                return
            weights = state.whole_parameters(self._parts) | state.whole_buffers(self._parts, self._buffers)
            got = state.gradients(self._parts, 1.0)  # divided later, in fp64: fp16 underflows
            whole, loss, problem, kind = None, 0.0, "", ""
            if self._uncut is not None:
                try:
                    whole = self._filled(weights)
                    with self._alone():
                        loss, kind = self._run(whole, step, divisor / totals.weight)
                except _NotComparable as error:
                    reason = str(error)
                except UsageError as error:
                    problem = f"the loss function fails on the uncut model: {error}"
                except Exception as error:
                    reason = f"the uncut model fails with {type(error).__name__}: {error}"
            del weights
            self._agree(problem)
            if self._leaves_out(reason):
                return
            if whole is not None:
                problem = self._difference(whole, got, loss, totals, divisor) or kind
            self._agree(problem)

    def _obstacle(self) -> str:
        """Return why this rank cannot compare the models, or cannot hold the whole model; "" if nothing prevents it."""
        parts = self._parts
        if parts.tables:
            return "its embedding tables are spread over ranks, none of which may hold all of them"
        if self._uncut is not None and self._uncut.model is None:
            return self._uncut.reason
        wanted = compared_bytes(parts.spec.parameters.values())
        sharing = parts.world.local_size if parts.device.type == "cpu" else 1
        free = _SHARE_OF_FREE * (available_bytes(parts.device) or 0) / sharing
        if wanted > free:
            return f"the whole model takes {wanted / 2**30:.1f} GiB here and {free / 2**30:.1f} may be used"
        if self._uncut is None:
            return ""
        if self._unknown:
            return self._unknown
        if self._settings.batch_norm == "synchronized" and parts.dp.size > 1:
            return "batch_norm: synchronized takes the samples of all ranks"
        return ""

    def _leaves_out(self, reason: str) -> bool:
        """Return True if any rank cannot compare, and log the reason. Collective.

        Raises:
            PlanError: if the model that cannot be compared has hooks that see slices.
        """
        if not self._any(bool(reason)):
            return False
        reason = self._told(reason)
        self._say(reason)
        parts, named = self._parts, []
        if parts.groups["tp"].size > 1:
            named = [name for stage in parts.stages for name in hooked(stage.module) if name]
        if self._any(bool(named)):
            name = self._told(named[0] if named else "")
            raise PlanError(
                f"check: {name} has a hook of yours, or a forward of yours, and under mesh.tp: "
                f"{parts.groups['tp'].size} modules inside of the model work on slices of features and tokens; the "
                f"first step would show whether it computes the same all the same, but cannot be compared: {reason}. "
                "No weight has moved. Put what the hook does into the model's forward, on whole values (its inputs "
                "and outputs), or, where it only looks or works on each element alone, set check_first_step: off"
            )
        return True

    def _filled(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return the uncut model with the weights of this step."""
        assert self._uncut is not None and self._uncut.model is not None, "this rank compares"
        model, device, is_low = self._uncut.model, self._parts.device, self._is_low

        def real(value: Tensor) -> Tensor:
            value = value.to(device, copy=True)
            return value.float() if is_low and value.is_floating_point() else value

        frozen = {name for name, each in self._parts.model.named_parameters() if not each.requires_grad}
        exchanged, twins = self._uncut.exchanged, dict(model.named_parameters(remove_duplicate=False))
        assert exchanged is not None, "there is a copy"
        last = self._parts.stages[-1].module
        give_hooks(self._uncut, {"model": self._parts.model, "stage": last})
        made = {
            id(p): nn.Parameter(real(weights[name]), p.requires_grad and name not in frozen)
            for name, p in model.named_parameters()
        }
        for name, parameter in self._parts.model.named_parameters():
            twin = made.get(id(twins[name])) if name in twins else None
            for hook in (parameter._backward_hooks or {}).values():
                if twin is not None and twin.requires_grad and is_users(hook):
                    twin.register_hook(exchanged.function(hook))
        buffers = dict(model.named_buffers())
        for name, module in model.named_modules():
            for key, held in module._parameters.items():
                if held is not None:
                    module._parameters[key] = made[id(held)]
            if "_flat_weights" in vars(module):  # read by recurrent modules
                named: Any = module._flat_weights_names
                vars(module)["_flat_weights"] = [getattr(module, each) for each in named]
            module.training = self._mode_of(name, module.training)
        for name, buffer in buffers.items():
            buffer.data = real(weights.get(name, buffer))
        return model

    def _mode_of(self, name: str, otherwise: bool) -> bool:
        try:
            return self._parts.model.get_submodule(name).training
        except AttributeError:
            return otherwise

    @property
    def _is_low(self) -> bool:
        return self._settings.precision.compute_dtype in _LOW or any(
            entry.dtype in _LOW for entry in self._parts.spec.parameters.values()
        )

    def _run(self, model: nn.Module, step: int, unit: float) -> tuple[float, str]:
        """Compute the step's gradients on the uncut model; return Σ w loss, and a difference already found, in words.

        Losses are multiplied as in the step, because otherwise operations inside the model would round differently.

        Args:
            model: the uncut model.
            step: number of the step.
            unit: factor of the loss of a microbatch of weight 1.
        """
        assert self._uncut is not None and self._uncut.exchanged is not None, "this rank compares"
        replay, device = DrawReplay(), self._parts.device
        dtype = torch.float32 if self._is_low else self._settings.precision.compute_dtype
        self._equip(model, replay, dtype)
        loss_of = None if self._loss is None else self._uncut.exchanged.function(self._loss, False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        draws, parts = replay.draws, parts_of(model, self._blocks())
        draws.share(
            self._parts.groups["tp"].alone("tp"), self._parts.groups["tp"].alone("pp"), 0, model, device
        )
        total, problem = 0.0, ""
        with _generators_kept(draws.generators):
            for run in self._passes:
                if not run.weight:  # no labels: its mean loss may be 0 / 0
                    continue
                seen, place = (
                    DtypeRecorder(),
                    self._parts.passes.place(step, run.microbatch, (run.args, run.kwargs)),
                )
                with ExitStack() as stack:
                    enabled, kind = run.autocast
                    stack.enter_context(torch.autocast(device.type, kind, enabled=enabled))
                    stack.enter_context(torch.enable_grad())
                    stack.enter_context(replay.at(place))
                    if run.begun is not None:
                        stack.enter_context(draws.again(run.begun))
                    stack.enter_context(draws.around(parts))
                    stack.enter_context(seen)
                    is_batch = len(run.args) == 1 and not run.kwargs
                    output = (
                        call_model(model, loss_of, run.args[0], device)
                        if is_batch
                        else model(*run.args, **run.kwargs)
                    )
                self._rounds_inside = self._rounds_inside or not seen.all.isdisjoint(_LOW)
                self._rounds_to_fp32 = self._rounds_to_fp32 or seen.rounds_to_fp32
                scale = run.weight * unit
                if run.is_loss:
                    ends, gradients = [find_loss(output)], [torch.full_like(find_loss(output), scale)]
                    total += float(ends[0].detach()) * run.weight
                else:
                    ends, gradients, found = self._ends(output, run, scale / run.scale)
                    problem = problem or found
                # inputs=trained: other tensors that this loss trains have their gradients from the real pass already.
                with replay.scaled(scale):
                    if ends:
                        torch.autograd.backward(ends, gradients, inputs=trained)
        return total, problem

    def _equip(self, model: nn.Module, replay: DrawReplay, dtype: torch.dtype | None) -> None:
        """Give the uncut model the dropout, the tiles, the recomputation and the casts of inputs of the real model."""
        replace_dropout(model, self._settings.train.seed, replay)
        surround(model, self._settings.train.seed, replay)
        tile_foreign(model, self._settings.tiles)  # else whole logits may not fit the memory
        tile_model(model, self._settings.tiles, replay, at_once=True)
        recompute_blocks(model, self._recomputed, self._settings.recompute, replay)
        device = self._parts.device
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (cast_inputs(args, device, dtype), cast_inputs(kwargs, device, dtype)),
            with_kwargs=True,
        )

    def _blocks(self) -> list[str]:
        run: Any = self._parts.stages[-1].run
        return [] if run is None else list(run.__self__.all_blocks)

    def _ends(self, output: Any, run: _CheckedPass, factor: float) -> tuple[list[Tensor], list[Tensor], str]:
        """Return where the copy's backward pass begins, the gradients at these tensors, and a difference, in words."""
        ends, gradients, problem = [], [], ""
        tensors = dict(tensors_by_path(output))
        for path, held in run.outputs.items():
            if held.gradient is None:
                continue
            if path not in tensors or tensors[path].shape != held.tensor.shape:
                shape = tuple(tensors[path].shape) if path in tensors else None
                return (
                    [],
                    [],
                    (
                        f"an output that the loss uses has the shape {tuple(held.tensor.shape)}, that of the uncut "
                        f"model {shape}"
                    ),
                )
            twin = tensors[path]
            # A rank along "cp" has the loss of its own targets; the gradients of all ranks together are compared.
            is_own_loss = self._parts.mesh.cp > 1 and not twin.dim()
            if held.tensor._version == held.version and not is_own_loss:
                away = (held.tensor.double() - twin.detach().double()).norm()
                size = twin.detach().double().norm()
                if not float(away) <= self._tolerances().gradient * max(float(size), 1e-30):
                    error = float(away / size.clamp_min(1e-30))
                    problem = (
                        problem
                        or f"an output that the loss uses differs from the uncut model's by {error:.2g}"
                    )
            if twin.requires_grad:
                ends.append(twin)
                gradients.append(held.gradient.to(twin) * factor)
        return ends, gradients, problem

    def _difference(
        self, model: nn.Module, got: Mapping[str, Tensor], loss: float, totals: StepTotals, divisor: float
    ) -> str:
        """Return the first difference from the uncut model in words, "" if there is none.

        Collective over the ranks that compare.
        """
        dp = self._parts.dp
        unlike = sum(not run.is_loss for run in self._passes)
        told = torch.tensor([loss, float(unlike)], dtype=torch.float64, device=self._parts.device)
        dp.all_reduce(told, "the uncut loss", purpose="control").wait()
        mean, others = told.tolist()
        wanted: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                dp.all_reduce(grad.view(-1), name, purpose="control").wait()
                wanted[name], parameter.grad = grad.double() / divisor, None
        tolerance = self._tolerances()
        uncut_loss, cut_loss = mean / totals.weight, totals.loss / totals.weight
        if not others and not abs(uncut_loss - cut_loss) <= tolerance.loss * max(1.0, abs(uncut_loss)):
            return f"its loss is {cut_loss:.6g}, that of the uncut model {uncut_loss:.6g}"
        whole = sum(float(each.square().sum()) for each in wanted.values()) ** 0.5
        if not whole:
            return ""
        errors: dict[str, float] = {}
        for name, grad in wanted.items():
            mine = got.get(name)
            distance = float((grad if mine is None else mine.to(grad) / divisor - grad).norm())
            errors[name] = distance / (whole if self._is_rough else max(float(grad.norm()), 1e-3 * whole))
        wrong = {name: error for name, error in errors.items() if not error <= tolerance.gradient}
        if not wrong:
            norm = totals.squares**0.5 / divisor
            assembled = sum(float(each.double().square().sum()) for each in got.values()) ** 0.5 / divisor
            if not abs(norm - assembled) <= _NORM * assembled:
                return f"the norm of its gradients is {assembled:.6g}, but {norm:.6g} was taken for clipping"
            return ""
        named = ", ".join(f"{name} by {error:.2g}" for name, error in list(wrong.items())[:_NAMED])
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        return f"the gradients of {len(wrong)} of {len(errors)} parameters differ from the uncut model's: {named}{more}"

    @property
    def _is_rough(self) -> bool:
        precision = self._settings.precision
        rounds = self._rounds_inside or precision.operations is not None or precision.linear is not None
        return self._is_low or rounds or torch.get_float32_matmul_precision() != "highest"

    def _tolerances(self) -> Tolerances:
        """Return the largest errors for the dtypes that the model computes in; see the module's docstring."""
        if self._is_rough:
            return Tolerances(5e-2, 0.3)
        dtypes = {
            self._settings.precision.dtypes(e.name, e.dtype).compute
            for e in self._parts.spec.parameters.values()
        }
        if dtypes == {torch.float64} and self._parts.groups["tp"].size == 1:
            return Tolerances(1e-4, 1e-3) if self._rounds_to_fp32 else Tolerances(1e-9, 1e-9)
        return Tolerances(1e-3, 1e-2)

    # Together --------------------------------------------------------------------------------------------------

    def _any(self, flag: bool) -> bool:
        vote = torch.tensor([float(flag)], dtype=torch.float64, device=self._parts.device)
        self._parts.groups["world"].all_reduce(vote, "a vote on the check", purpose="control").wait()
        return bool(vote.item() > 0)

    def _agree(self, problem: str) -> None:
        if not self._any(bool(problem)):
            return
        told, mesh = self._told(problem), self._parts.site.mesh
        axes = ("tp", "pp", "cp", "ep", "etp")
        cuts = [f"mesh.{axis}: {mesh.size(axis)}" for axis in axes if mesh.size(axis) > 1]
        raise PlanError(
            f"check: the model cut by {' and '.join(cuts)} does not compute what the uncut one does on the first "
            f"batch: {told}. No weight has moved. {self._hints()}Look at how these modules are cut (tensor.table, "
            "pipeline.partition), give the model as a list of layers, give all ranks that share a model the same "
            "batches, or leave the check out (check_first_step: off) where the model is right so"
        )

    def _hints(self) -> str:
        """Return sentences on modules or random numbers that may cause the difference, equal on all ranks."""
        parts, found = self._parts, ""
        named = [name for stage in parts.stages for name in hooked(stage.module) if name]
        if self._any(bool(named)):
            name = self._told(named[0] if named else "")
            found += (
                f"{name} has a hook of yours, or a forward of yours: where a layer is cut it sees a slice of the "
                "features or of the tokens; put what it does into the model's forward, on whole values. "
            )
        drew = ", ".join(parts.passes.replay.draws.drew)
        if self._any(bool(drew)):
            found += (
                f"The forward pass draws random numbers ({self._told(drew)}): what is drawn in the shape of a slice "
                "is not the slice of what is drawn for the whole; use nn.Dropout, or draw in the shape of the batch. "
            )
        return found

    def _told(self, problem: str) -> str:
        """Return the text of the first rank that has one, on every rank. Collective."""
        return first_text(problem, self._parts.groups["world"], self._parts.device)

    def _say(self, reason: str) -> None:
        if self._parts.world.rank == 0:
            _log.warning("check: the first step is not compared with the uncut model: %s", reason)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._runs_uncut = True
        try:
            with self._parts.clock.alone():
                yield
        finally:
            self._runs_uncut = False

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        traffic = self._parts.traffic
        counts, sequence = dict(traffic.counts), traffic.sequence
        try:
            yield
        finally:
            traffic.counts.clear()
            traffic.counts.update(counts)
            traffic.sequence = sequence


class DtypeRecorder(TorchFunctionMode):
    """A mode that records the dtypes which torch's functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.all: set[torch.dtype] = set()
        self.rounds_to_fp32 = False
        """True if a function computed an fp32 tensor from an fp64 tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.all.add(result.dtype)
            if result.dtype == torch.float32 and not self.rounds_to_fp32:
                self.rounds_to_fp32 = any(
                    isinstance(each, Tensor) and each.dtype == torch.float64 for each in args
                )
        return result


class _NotComparable(Exception):
    """The models cannot be compared; the message is the reason."""


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _reaches(loss: Tensor, stop: set[Any], parameters: set[int]) -> bool:
    """Return True if the graph of ``loss`` reaches one of ``parameters`` on a path around the nodes ``stop``."""
    seen: set[Any] = set(stop)
    following = [loss.grad_fn]
    while following:
        node = following.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        following += [each for each, _ in node.next_functions]
    return False


@contextmanager
def _generators_kept(generators: RandomGenerators) -> Iterator[None]:
    """Restore the states of the random generators at the end of the context."""
    before = generators.states()
    try:
        yield
    finally:
        generators.put(before)
