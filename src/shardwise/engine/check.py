"""Check: the first step of a cut model, compared with the uncut one before any weight moves.

What is left out of a sum over "tp", or of what passes from stage to stage, or is summed once too often over the ranks
that share experts, changes gradients and may leave the loss as it was. So one rank of those that share a microbatch
(the one that reports its loss; along "ep" alone every rank) puts the whole model together once more, runs the step's
microbatches on it with the same dropout, and compares

    the mean loss, the gradient of every parameter                      of all data-parallel ranks' batches
    the norm of these gradients                                         with the one that they are clipped by

    dtype          loss      gradient, of max(its own norm, 1e-3 of the whole)
    fp64, no tp    1e-9      1e-9
    fp32, slices   1e-3      1e-2      sums in another order; models that round to fp32 inside
    16 bits        5e-2      0.3       of the whole gradient alone: the uncut model computes in fp32. So for models that
                                       round to 16 bits inside, and where torch may round products of matrices
                                       (torch.set_float32_matmul_precision)

No number of the run changes: random generators are put back, buffers and modules are copies, traffic is not counted.
Left out, and said so in the log, where the model cannot be copied, has hooks of a user's or draws random numbers of its
own, where the loss is not what the engine's call returned or was computed under torch.autocast, and where weights and
gradients do not fit beside what is there.

Cost: once, the whole weights and gradients on the ranks of one model, and a step of the uncut model on one of them.
"""

import copy
import functools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from shardwise.compose.apply import recompute_blocks
from shardwise.config.run import RunConfig
from shardwise.engine import state
from shardwise.engine.inputs import Loss, call_model, cast_inputs, find_loss
from shardwise.engine.parts import Parts
from shardwise.engine.step import Totals
from shardwise.memory.replay import Replay
from shardwise.models.dropout import replace_dropout, unkeyed_dropout
from shardwise.models.tiles import tile_foreign, tile_model
from shardwise.observe.memory import available_bytes
from shardwise.parallel.expert.apply import surround
from shardwise.parallel.pipeline.layers import Layers
from shardwise.plan.errors import PlanError, ShardwiseError, UsageError

_log = logging.getLogger("shardwise")
_TEXT_BYTES = 2000
_NAMED = 5
_SHARE_OF_FREE = 0.25
_COPIES = 4
"""Of all parameters, in memory at a time: weights of the uncut model, its gradients (in fp64 when they are compared),
gradients of the cut one."""
_NORM = 1e-3
"""Largest relative error of the norm beside the gradients that it is of; they may be in 16 bits."""
_LOW = (torch.bfloat16, torch.float16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Uncut(NamedTuple):
    """The model before it is cut, without weights, on the rank that compares; or why there is none."""

    model: nn.Module | None
    reason: str = ""


def keep_uncut(model: nn.Module) -> Uncut:
    """A copy of ``model`` whose parameters are on meta."""
    if isinstance(model, Layers):
        return Uncut(None, "its layers are built where they live")
    for name, module in model.named_modules():
        if _has_hooks(module):
            return Uncut(None, f"{name or 'the model'} has hooks, which would see the batch twice")
        if isinstance(vars(module).get("forward"), FunctionType):
            return Uncut(
                None, f"the forward of {name or 'the model'} is a function that a copy would share with it"
            )
    try:
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        return Uncut(copy.deepcopy(model, memo))
    except Exception as error:
        return Uncut(None, f"it cannot be copied ({type(error).__name__}: {error})")


class Tolerances(NamedTuple):
    """Largest relative errors."""

    loss: float
    gradient: float


class _Pass(NamedTuple):
    args: Any
    kwargs: Any
    weight: float


class Check:
    """Of one engine's first step. ``uncut`` on the rank that compares, None on those that share a model with it."""

    def __init__(
        self, parts: Parts, settings: RunConfig, loss: Loss | None, uncut: Uncut | None, recomputed: list[str]
    ):
        self._parts = parts
        self._settings = settings
        self._loss = loss
        self._uncut = uncut
        self._recomputed = recomputed
        self._buffers: dict[str, Tensor] = {}
        self._running: list[tuple[Any, Any]] = []
        self._output: Any = None
        self._passes: list[_Pass] = []
        self._is_known = True
        self._is_cast = False
        self._rounds_inside = False
        self._runs_uncut = False

    # During the step -------------------------------------------------------------------------------------------

    def sees(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A forward pass with gradients begins."""
        if not self._buffers:
            held = state.own_buffers(self._parts)
            self._buffers = {name: buffer.detach().clone() for name, buffer in held.items()}
        self._is_cast = self._is_cast or torch.is_autocast_enabled(self._parts.device.type)
        if self._output is not None:  # no backward pass came from the pass before
            self._is_known, self._output = False, None
        if not self._is_known:
            self._running.clear()
        elif self._uncut is not None:
            self._running.append(tree_map_only(Tensor, _cloned, (args, dict(kwargs))))

    def returned(self, output: Any) -> None:
        """What that pass gave."""
        self._output = output

    def counts(self, loss: Tensor, weight: float) -> None:
        """A backward pass from ``loss``, which is known where the last pass returned it."""
        output, self._output = self._output, None
        try:
            is_known = len(self._running) == 1 and find_loss(output) is loss
        except ShardwiseError:
            is_known = False
        self._is_known = self._is_known and (is_known or self._uncut is None)
        self.counted([weight] * len(self._running))

    def counted(self, weights: Sequence[float]) -> None:
        """What the passes since the last backward pass count."""
        self._passes += [_Pass(*each, weight) for each, weight in zip(self._running, weights, strict=False)]
        self._running = []

    def meets_the_cut_model(self) -> None:
        """A pass of the engine's own model begins. Errors: where only the uncut one should run."""
        if self._runs_uncut:
            raise _LeftOut("the loss function calls the engine's model, not the one that it is given")

    def forget(self) -> None:
        """The step begins anew."""
        self._running, self._passes, self._output, self._is_known, self._is_cast = [], [], None, True, False
        self._buffers = {}  # what a skipped step left in them, or a load, is what the next one begins with

    # Before the update -----------------------------------------------------------------------------------------

    def compare(self, step: int, totals: Totals, divisor: float) -> None:
        """Collective. Errors: PlanError, alike on all ranks."""
        with self._uncounted():
            reason = self._obstacle()
            if self._any(bool(reason)):
                self._say(reason)
                return
            weights = state.whole_parameters(self._parts) | state.whole_buffers(self._parts, self._buffers)
            got = state.gradients(self._parts, 1.0)  # divided in fp64: small ones would be 0 in fp16
            whole, loss, problem = None, 0.0, ""
            if self._uncut is not None:
                try:
                    whole = self._filled(weights)
                    with self._alone():
                        loss = self._run(whole, step)
                except _LeftOut as error:
                    reason = str(error)
                except UsageError as error:
                    problem = f"the loss function fails on the uncut model: {error}"
                except Exception as error:
                    reason = f"the uncut model fails with {type(error).__name__}: {error}"
            del weights
            self._agree(problem)
            if self._any(bool(reason)):
                self._say(reason)
                return
            if whole is not None:
                problem = self._difference(whole, got, loss, totals, divisor)
            self._agree(problem)

    def _obstacle(self) -> str:
        """Why this rank cannot compare, or cannot hold what the others compare with."""
        parts = self._parts
        if parts.tables:
            return "its embedding tables are spread over ranks, none of which may hold all of them"
        if self._uncut is not None and self._uncut.model is None:
            return self._uncut.reason
        hooked = [name for name, each in parts.model.named_parameters() if each._backward_hooks]
        if hooked:
            return f"{hooked[0]} has a hook on its gradient, which the uncut model has not"
        roots = [parts.model, *(stage.module for stage in parts.stages)]
        watched = [name for root in roots for name, each in root.named_modules() if _has_hooks(each)]
        if watched:
            return f"{watched[0] or 'the model'} has a hook, which the uncut model has not"
        wanted = _COPIES * sum(
            prod(entry.shape) * max(4, entry.dtype.itemsize) for entry in parts.spec.parameters.values()
        )
        sharing = parts.world.local_size if parts.device.type == "cpu" else 1
        free = _SHARE_OF_FREE * (available_bytes(parts.device) or 0) / sharing
        if wanted > free:
            return f"the whole model takes {wanted / 2**30:.1f} GiB here and {free / 2**30:.1f} may be used"
        if self._uncut is None:
            return ""
        model = self._uncut.model
        if not self._is_known:
            return "the loss is not what engine(batch) returned"
        if self._is_cast:
            return "torch.autocast was on around the pass"
        if self._settings.batch_norm == "synchronized" and parts.dp.size > 1:
            return "batch_norm: synchronized takes the samples of all ranks"
        assert model is not None, "asked above"
        drawing = unkeyed_dropout(_undropped(model))
        if drawing:
            return f"{drawing[0]} draws random numbers of its own"
        return ""

    def _filled(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The uncut model with the weights of this step."""
        assert self._uncut is not None and self._uncut.model is not None, "this rank compares"
        model, device, is_low = self._uncut.model, self._parts.device, self._is_low

        def real(value: Tensor) -> Tensor:
            value = value.to(device, copy=True)
            return value.float() if is_low and value.is_floating_point() else value

        frozen = {name for name, each in self._parts.model.named_parameters() if not each.requires_grad}
        made = {
            id(p): nn.Parameter(real(weights[name]), p.requires_grad and name not in frozen)
            for name, p in model.named_parameters()
        }
        buffers = dict(model.named_buffers())
        for name, module in model.named_modules():
            for key, held in module._parameters.items():
                if held is not None:
                    module._parameters[key] = made[id(held)]
            if "_flat_weights" in vars(module):  # of recurrent modules, beside their parameters
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

    def _run(self, model: nn.Module, step: int) -> float:
        """Gradients Σ w ∇loss into the model's parameters; Σ w loss."""
        replay, device = Replay(), self._parts.device
        dtype = torch.float32 if self._is_low else self._settings.precision.compute_dtype
        replace_dropout(model, self._settings.train.seed, replay)
        surround(model, self._settings.train.seed, replay)
        tile_foreign(model, self._settings.tiles)  # or whole logits would need memory that the run has not
        tile_model(model, self._settings.tiles, replay, at_once=True)
        recompute_blocks(model, self._recomputed, self._settings.recompute, replay)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (cast_inputs(args, device, dtype), cast_inputs(kwargs, device, dtype)),
            with_kwargs=True,
        )
        total = 0.0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with _generators_kept(device) as was_drawn:
            for i, (args, kwargs, weight) in enumerate(self._passes):
                if not weight:  # no labels: its mean loss may be 0 / 0
                    continue
                seen = _Dtypes()
                with torch.enable_grad(), replay.at(self._parts.passes.place(step, i, (args, kwargs))), seen:
                    is_batch = len(args) == 1 and not kwargs
                    output = (
                        call_model(model, self._loss, args[0], device) if is_batch else model(*args, **kwargs)
                    )
                    loss = find_loss(output)
                self._rounds_inside = self._rounds_inside or not seen.all.isdisjoint(_LOW)
                total += float(loss.detach()) * weight
                # Of these alone: what else trains by this loss has its gradient already.
                with replay.scaled(weight):
                    torch.autograd.backward(loss, torch.full_like(loss, weight), inputs=trained)
            if was_drawn():
                raise _LeftOut("it draws random numbers of its own, which differ from rank to rank")
        return total

    def _difference(
        self, model: nn.Module, got: Mapping[str, Tensor], loss: float, totals: Totals, divisor: float
    ) -> str:
        """What differs, in words. Collective over the ranks that compare."""
        dp = self._parts.dp
        mean = torch.tensor([loss], dtype=torch.float64, device=self._parts.device)
        dp.all_reduce(mean, "the uncut loss", purpose="control").wait()
        wanted: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                dp.all_reduce(grad.view(-1), name, purpose="control").wait()
                wanted[name], parameter.grad = grad.double() / totals.weight, None
        tolerance = self._tolerances()
        uncut_loss, cut_loss = float(mean) / totals.weight, totals.loss / totals.weight
        if not abs(uncut_loss - cut_loss) <= tolerance.loss * max(1.0, abs(uncut_loss)):
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
        rounds = self._rounds_inside or self._settings.precision.operations is not None
        return self._is_low or rounds or torch.get_float32_matmul_precision() != "highest"

    def _tolerances(self) -> Tolerances:
        """See the module's docstring."""
        if self._is_rough:
            return Tolerances(5e-2, 0.3)
        dtypes = {
            self._settings.precision.dtypes(e.name, e.dtype).compute
            for e in self._parts.spec.parameters.values()
        }
        if dtypes == {torch.float64} and self._parts.groups["tp"].size == 1:
            return Tolerances(1e-9, 1e-9)
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
        axes = ("tp", "pp", "ep", "etp")
        cuts = [f"mesh.{axis}: {mesh.size(axis)}" for axis in axes if mesh.size(axis) > 1]
        raise PlanError(
            f"check: the model cut by {' and '.join(cuts)} does not compute what the uncut one does on the first "
            f"batch: {told}. No weight has moved. Look at how these modules are cut (tensor.table, "
            "pipeline.partition), give the model as a list of layers, give all ranks that share a model the same "
            "batches, or leave the check out (check_first_step: off) where the model is right so"
        )

    def _told(self, problem: str) -> str:
        """The words of the first rank that has some, on every rank."""
        world, device = self._parts.groups["world"], self._parts.device
        have = torch.zeros(world.size, dtype=torch.float64, device=device)
        have[world.index] = float(bool(problem))
        world.all_reduce(have, "whose words", purpose="control").wait()
        words = torch.tensor(
            list(problem.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)), dtype=torch.uint8, device=device
        )
        world.broadcast(words, int(torch.argmax(have)), "the check's words").wait()
        return bytes(words.cpu().tolist()).decode(errors="replace").strip()

    def _say(self, reason: str) -> None:
        if reason:
            _log.info("check: the first step is not compared with the uncut model: %s", reason)

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


class _Dtypes(TorchFunctionMode):
    """Those of what torch's functions return while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.all: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.all.add(result.dtype)
        return result


class _LeftOut(Exception):
    """Why the models cannot be compared."""


def _has_hooks(module: nn.Module) -> bool:
    """A user's own: not those of torch's utilities, nor the engine's."""
    for hook in (each for kind in _HOOKS for each in vars(module).get(kind, {}).values()):
        made = hook.func if isinstance(hook, functools.partial) else hook
        where = getattr(made, "__module__", None) or ""
        if not where.startswith(("torch.nn.utils", "shardwise")):
            return True
    return False


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _undropped(model: nn.Module) -> nn.Module:
    """The model with ``nn.Dropout`` as what it will be: keyed."""
    twin = copy.deepcopy(model)
    replace_dropout(twin, 0, Replay())
    return twin


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Random generators are as before at the end; yields whether torch's, Python's or numpy's were drawn from."""
    python, arrays = random.getstate(), np.random.get_state()
    module = None if device.type == "cpu" else torch.get_device_module(device)

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([] if module is None else [module.get_rng_state(device)])]

    before = states()
    try:
        yield (
            lambda: (
                random.getstate() != python
                or str(np.random.get_state()) != str(arrays)
                or not all(torch.equal(a, b) for a, b in zip(states(), before, strict=True))
            )
        )
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(before[0])
        if module is not None:
            module.set_rng_state(before[1], device)
