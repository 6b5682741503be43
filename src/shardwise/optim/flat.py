"""Optimizers on the flat masters: any elementwise one of torch, and those of two halves (two_pass.py).

An elementwise update treats each element by itself, so it may run on any cut of the flat buffer: 32 calls instead of
288, with torch's own fused kernels. There is one optimizer object for each bucket, so that masters can be updated Unit
by Unit.

    one launch       Adam on an accelerator (kernels/adam.py)
    by the chunk     a fused kernel of torch on the host, and any update of moments in 16 or 8 bits
    torch's step     all else
    two halves       an update that looks at whole tensors: ``direct`` and ``apply``, which receives the factor of each
                     tensor's direction

flat_state.py contains the state of the elements, classes.py the classes.

Scaling: gradients arrive as sums; ``divisor`` (weights summed, loss scale, clipping) is applied inside the fused kernel
if that is exact enough (its scalar is fp32), else in a separate pass.

[Note: chunks]
    for each chunk    g = grad, in the master's dtype                      into a block that stays in the cache
                      master, moments: torch's kernel, with g / divisor    g is written back, in the cache
                      weight = master, rounded                             read from the cache

On a whole tensor the first and the last line are separate passes over memory, and the kernel also writes back the
divided gradients. A parameter with moments in fp32 and a weight and a gradient in 16 bits is 28 bytes of traffic, 46 by
whole tensors: 0.4 of the time. A gradient of the master's dtype is not copied, and the whole is one call and one
rounding: chunks were measured 1.1 to 1.3 times as slow there.

Results have the bits of a call on the whole: the update of an element depends on no other element, and a chunk begins
at the boundary of a vector of the kernel. Step counts advance once a step. Threads are torch's own, as many as the
calling thread may use.

Moments in 16 or 8 bits (coded_moments.py) are decoded, updated and encoded by the chunk, on a device too, and with any
elementwise class: if the class has no such kernel, its own step runs on a leaf that is each chunk in turn.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from shardwise.kernels.adam import AdamRule, adam_step
from shardwise.kernels.choice import fused
from shardwise.optim.classes import Make, needs_of
from shardwise.optim.coded_moments import CodedPart
from shardwise.optim.flat_state import FlatState
from shardwise.optim.rounding import StochasticRounding
from shardwise.optim.two_pass import TwoPass, WholeTensor
from shardwise.plan.registry import Needs
from shardwise.plan.state_form import StateForm

CHUNK = 2**17
"""Elements of a chunk for each thread, a multiple of a vector's: the data that is used twice, master and block of
gradients, takes 1 MiB; with half as many the calls cost more, twice as many do not fit into the cache.
"""
DEVICE_CHUNK = 2**23
"""Elements of a chunk on an accelerator: about 0.5 GiB while they are encoded."""


class ChunkKernel(NamedTuple):
    """One of torch's kernels with the numbers of this step."""

    moments: tuple[str, ...]
    """Labels of the state that the kernel takes, in its order."""
    call: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor | None, Tensor | None], object]
    """Function of (master, gradient, moments, count of steps, divisor) that updates these elements."""


class DirectionFactor(NamedTuple):
    """Factor of the direction of a tensor's elements [start, stop) of the master."""

    start: int
    stop: int
    factor: float


class FlatOptimizer:
    """Optimizer of one bucket's owned range.

    Args:
        master: flat master of the range.
        make: makes the optimizer.
        group: optimizer group of the bucket.
        form: dtype or code of the moments.
        rounding: random numbers for moments in another form than fp32.
        into: memory for the moments, by label; None allocates memory.
        decay: decay of an average of the master; None keeps no average.
    """

    def __init__(
        self,
        master: Tensor,
        make: Make,
        group: int,
        form: StateForm = "fp32",
        rounding: StochasticRounding | None = None,
        into: Mapping[str, Tensor] | None = None,
        decay: float | None = None,
    ):
        self._decay = decay
        self.state = FlatState(master, make, group, form, rounding, into, decay is not None)
        """Master, moments and step counts."""
        self._optimizer = self.state.optimizer
        self._group = group
        self._divides = bool(getattr(self._optimizer, "_step_supports_amp_scaling", False)) and (
            master.dtype == torch.float32
        )
        self._direction: Tensor | None = None
        """Direction between the two halves of an update."""

    @property
    def needs(self) -> Needs:
        """Extent of the tensor on which the update of an element depends; all but "elements" takes two halves."""
        return needs_of(self._optimizer)

    def step(
        self,
        grad: Tensor,
        divisor: float,
        rates: Sequence[Mapping[str, Any]],
        unused: Sequence[tuple[int, int]] = (),
        weight: Tensor | None = None,
        steps: int = 0,
    ) -> bool:
        """Update the master from ``grad / divisor``.

        Args:
            grad: flat gradient, as long as the master; it is overwritten.
            divisor: divisor of the gradient.
            rates: numbers of each optimizer group in this step (groups.py).
            unused: ranges of the master that are skipped.
            weight: flat weight that receives the master's new numbers, rounded, if that needs no separate pass.
            steps: steps before this one, which key the rounding of coded moments.

        Returns:
            True if ``weight`` was written.
        """
        is_rounded = self._update(grad, divisor, rates, unused, weight, steps)
        self._average(steps)
        return is_rounded

    def _average(self, steps: int) -> None:
        if self._decay is not None:
            self.state.update_average(self._decay, is_first=steps == 0)

    def _update(
        self,
        grad: Tensor,
        divisor: float,
        rates: Sequence[Mapping[str, Any]],
        unused: Sequence[tuple[int, int]],
        weight: Tensor | None,
        steps: int,
    ) -> bool:
        if self.state.coded is not None:
            self._cut(rates, unused)
            self._step_by_chunk(self._chunk_kernel(), grad, divisor, unused, weight, steps)
            return weight is not None
        if fused(self.state.master, grad):
            self._cut(rates, unused)
            rule = self._adam_rule()
            if rule is not None:
                self._step_adam(rule, grad, divisor, unused, weight)
                return weight is not None
        if self.state.master.device.type == grad.device.type == "cpu":
            self._cut(rates, unused)
            kernel = self._chunk_kernel()
            if kernel is not None:
                self._step_by_chunk(kernel, grad, divisor, unused, weight)
                return weight is not None
        if self._divides and divisor != 1.0:
            # Filled on the device, because a copy of a number from the host would wait for the device.
            self._optimizer.grad_scale = torch.full((), divisor, device=grad.device)  # type: ignore[attr-defined]
            self._optimizer.found_inf = torch.zeros((), device=grad.device)  # type: ignore[attr-defined]
            divisor = 1.0
        self._take(grad, divisor, rates, unused)
        self._optimizer.step()
        self._drop()
        if self._divides:
            self._optimizer.grad_scale = self._optimizer.found_inf = None  # type: ignore[attr-defined]
        return False

    def _adam_rule(self) -> AdamRule | None:
        """Return the numbers of a step in one kernel; None for other updates, or if the step count is on the host."""
        group = self.options
        if type(self._optimizer) not in (optim.Adam, optim.AdamW) or self.state.master.dtype != torch.float32:
            return None
        states = [self.state.of(segment.leaf) for segment in self.state.segments]
        if any("step" not in state or state["step"].device != self.state.master.device for state in states):
            return None
        if any(group[key] for key in ("amsgrad", "maximize", "differentiable")):
            return None
        lr, (beta1, beta2), eps, weight_decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        if not all(isinstance(number, int | float) for number in (lr, beta1, beta2, eps, weight_decay)):
            return None
        decoupled = isinstance(self._optimizer, optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        return AdamRule(lr, beta1, beta2, eps, weight_decay, decoupled)

    def compile_kernel(self, grads: Iterable[torch.dtype], weight: torch.dtype) -> int:
        """Launch the kernel of a step on zeros, so that Triton compiles it; return the number of launches.

        Args:
            grads: dtypes that the gradient may have.
            weight: dtype of the weight into which a step rounds.
        """
        master = self.state.master
        is_adam = type(self._optimizer) in (optim.Adam, optim.AdamW) and self.state.coded is None
        if not is_adam or master.dtype != torch.float32 or not fused(master):
            return 0
        decoupled = isinstance(self._optimizer, optim.AdamW) or bool(
            self.options.get("decoupled_weight_decay")
        )
        rule, launches = AdamRule(0.0, 0.9, 0.9, 1e-8, 0.0, decoupled), 0
        for grad in grads:
            w, m, v = master.new_zeros(3, 16)
            cast = w.to(weight) if weight != master.dtype else None
            adam_step(rule, w, w.to(grad), m, v, master.new_zeros(()), 1.0, cast)
            launches += 1
        return launches

    def _step_adam(
        self,
        rule: AdamRule,
        grad: Tensor,
        divisor: float,
        unused: Sequence[tuple[int, int]],
        weight: Tensor | None,
    ) -> None:
        for (start, stop, leaf, _), is_reached in self.state.reached(unused):
            if not is_reached:
                continue
            state, cast = self.state.of(leaf), None if weight is None else weight[start:stop]
            moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
            adam_step(rule, leaf, grad[start:stop], *moments, divisor, cast)

    def _chunk_kernel(self) -> ChunkKernel | None:
        """Return the kernel that updates a chunk at a time; None if torch must do the step, or if state is missing."""
        kernel = chunk_kernel(self._optimizer) if self.state.master.device.type == "cpu" else None
        # Only for wide masters: in 16 bits torch's scalar code, at the end of a chunk, gives other bits than vectors.
        if kernel is None or self.state.master.dtype not in (torch.float32, torch.float64):
            return None
        if self.state.coded is not None:
            return kernel
        held = [self.state.of(segment.leaf) for segment in self.state.segments]
        return kernel if all(label in state for state in held for label in kernel.moments) else None

    def _step_by_chunk(
        self,
        kernel: ChunkKernel | None,
        grad: Tensor,
        divisor: float,
        unused: Sequence[tuple[int, int]],
        weight: Tensor | None,
        steps: int = 0,
    ) -> None:
        """Update a chunk at a time; a ``kernel`` of None, for coded moments only, runs the class's own step."""
        for (start, stop, leaf, _), is_reached in self.state.reached(unused):
            cast = None if weight is None else weight[start:stop]
            if not is_reached:
                if cast is not None:  # a master from a disk comes without its weight
                    cast.copy_(leaf)
                continue
            state, coded, own = self.state.of(leaf), None, kernel
            if self.state.coded is not None:
                coded = CodedPart(self.state.coded, start, steps)
                own = kernel or class_kernel(self._of_one_leaf(), self.state.coded.labels, state)
            assert own is not None, "moments that torch keeps are updated by a kernel, or by torch"
            step_by_chunk(own, leaf, grad[start:stop], state, divisor, self._divides, cast, coded)

    def _of_one_leaf(self) -> optim.Optimizer:
        """Return the same optimizer with a leaf of one element."""
        made = self.state.remake(
            torch.zeros(1, dtype=self.state.master.dtype, device=self.state.master.device)
        )
        made.param_groups[0].update({k: value for k, value in self.options.items() if k != "params"})
        return made

    def _cut(self, rates: Sequence[Mapping[str, Any]], unused: Sequence[tuple[int, int]]) -> None:
        """Split segments around ``unused`` ranges, and set the numbers of this step."""
        for start, stop in unused:
            self.state.split_around(start, stop)
        self._optimizer.param_groups[0].update(rates[self._group])

    def direct(
        self,
        grad: Tensor,
        divisor: float,
        rates: Sequence[Mapping[str, Any]],
        unused: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Run the first half of an update; arguments as in ``step``.

        ``grad`` becomes the direction if its dtype is the master's.
        """
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        self._direction = self._take(grad, divisor, rates, unused)
        self._optimizer.direct()

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Flat (master, direction) between the two halves."""
        assert self._direction is not None, "direct() comes before what looks at its directions"
        return self.state.master, self._direction

    @property
    def options(self) -> Mapping[str, Any]:
        """Numbers of the optimizer in this step."""
        return self._optimizer.param_groups[0]

    def factor(self, whole: WholeTensor) -> float:
        """Return the factor of a tensor's direction."""
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        return self._optimizer.factor(self.options, whole)

    def apply(self, factors: Iterable[DirectionFactor], steps: int = 0) -> None:
        """Run the second half of an update.

        Args:
            factors: factors of the directions by range of the master.
            steps: steps before this one.
        """
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        master, direction = self.halves
        for start, stop, factor in factors:
            self._optimizer.scale(self.options, master[start:stop], direction[start:stop], factor)
        self._optimizer.apply()
        self._drop()
        self._direction = None
        self._average(steps)

    def _take(
        self,
        grad: Tensor,
        divisor: float,
        rates: Sequence[Mapping[str, Any]],
        unused: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Point the leaves' gradients into the gradient, and return it in the master's dtype."""
        self._cut(rates, unused)
        if grad.dtype != self.state.master.dtype:
            grad = grad.to(self.state.master.dtype)
        if divisor != 1.0:
            grad.mul_(1.0 / divisor)
        for (start, stop, leaf, _), is_reached in self.state.reached(unused):
            leaf.grad = grad[start:stop] if is_reached else None
        return grad

    def _drop(self) -> None:
        for segment in self.state.segments:
            segment.leaf.grad = None


# By the chunk; see [Note: chunks] ------------------------------------------------------------------------------------


def chunk_kernel(optimizer: optim.Optimizer) -> ChunkKernel | None:
    """Return the fused kernel that ``optimizer`` would call; None if it has none, or if its numbers are tensors."""
    group = optimizer.param_groups[0]
    if type(optimizer) not in (optim.Adam, optim.AdamW, optim.SGD) or not group.get("fused"):
        return None
    if any(isinstance(each, Tensor) for value in group.values() for each in _members(value)):
        return None
    if isinstance(optimizer, optim.SGD):
        return _sgd(group)
    decoupled = isinstance(optimizer, optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    return _adam(group, torch._fused_adamw_ if decoupled else torch._fused_adam_)


def _members(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _adam(group: Mapping[str, Any], kernel: Callable[..., object]) -> ChunkKernel:
    beta1, beta2 = group["betas"]
    numbers = {key: group[key] for key in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
    numbers |= {"beta1": beta1, "beta2": beta2}

    def call(
        w: Tensor, g: Tensor, moments: Sequence[Tensor], count: Tensor | None, divisor: Tensor | None
    ) -> None:
        m, v, *largest = moments
        kernel([w], [g], [m], [v], largest, [count], grad_scale=divisor, found_inf=None, **numbers)

    return ChunkKernel(("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])), call)


def _sgd(group: Mapping[str, Any]) -> ChunkKernel:
    keys = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    numbers: dict[str, Any] = {key: group[key] for key in keys}

    def call(
        w: Tensor, g: Tensor, moments: Sequence[Tensor], count: Tensor | None, divisor: Tensor | None
    ) -> None:
        torch._fused_sgd_(
            [w], [g], list(moments), **numbers, is_first_step=False, grad_scale=divisor, found_inf=None
        )

    return ChunkKernel(("momentum_buffer",) if group["momentum"] else (), call)


def class_kernel(optimizer: optim.Optimizer, labels: Sequence[str], state: dict[str, Any]) -> ChunkKernel:
    """Return the own step of ``optimizer`` as a kernel; its one leaf becomes each chunk.

    Args:
        optimizer: an elementwise optimizer with one leaf.
        labels: labels of the moments.
        state: the single numbers of these elements, which advance as in one step.
    """
    (leaf,) = optimizer.param_groups[0]["params"]
    before = _copied(state)

    def call(
        w: Tensor, g: Tensor, moments: Sequence[Tensor], count: Tensor | None, divisor: Tensor | None
    ) -> None:
        leaf.data, leaf.grad = w, g
        if divisor is not None:
            optimizer.grad_scale, optimizer.found_inf = divisor, torch.zeros_like(divisor)  # type: ignore[attr-defined]
        optimizer.state[leaf] = _copied(before) | dict(zip(labels, moments, strict=True))
        optimizer.step()
        after, leaf.grad = optimizer.state.pop(leaf), None
        for label, moment in zip(labels, moments, strict=True):
            if after[label] is not moment:
                moment.copy_(after[label])
        state.update((label, value) for label, value in after.items() if label not in labels)

    return ChunkKernel(tuple(labels), call)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {label: value.clone() if isinstance(value, Tensor) else value for label, value in state.items()}


def step_by_chunk(
    kernel: ChunkKernel,
    master: Tensor,
    grad: Tensor,
    state: Mapping[str, Any],
    divisor: float,
    in_kernel: bool,
    weight: Tensor | None,
    coded: CodedPart | None = None,
) -> None:
    """Update ``master`` [N] from ``grad / divisor`` [N], and round the result into ``weight`` [N] if there is one.

    Args:
        kernel: updates a chunk.
        master: the master.
        grad: the gradient, which may be overwritten.
        state: torch's state of these elements.
        divisor: divisor of the gradient.
        in_kernel: True if the kernel divides.
        weight: the weight in 16 bits; may be None.
        coded: the moments, if torch's state does not have them.
    """
    count = state.get("step")
    if count is not None:
        count += 1
    scale = torch.full((), divisor, device=master.device) if in_kernel and divisor != 1.0 else None
    factor = 1.0 if in_kernel else 1.0 / divisor
    is_cast = grad.dtype != master.dtype or factor != 1.0
    if (
        not is_cast and coded is None
    ):  # measured: calls by the chunk cost more than one separate pass that rounds
        kernel.call(master, grad, [state[label] for label in kernel.moments], count, scale)
        if weight is not None:
            weight.copy_(master)
        return
    size = CHUNK * torch.get_num_threads() if master.device.type == "cpu" else DEVICE_CHUNK
    block = (
        torch.empty(min(size, master.numel()), dtype=master.dtype, device=master.device) if is_cast else None
    )
    whole = [] if coded is not None else [state[label] for label in kernel.moments]
    for first in range(0, master.numel(), size):
        here = slice(first, min(first + size, master.numel()))
        w, g = master[here], grad[here]
        if block is not None:
            g = block[: g.numel()].copy_(g)
        if factor != 1.0:
            g.mul_(factor)
        held = [moment[here] for moment in whole] if coded is None else coded.chunk(here)
        kernel.call(w, g, held, count, scale)
        if coded is not None:
            coded.keep(here, held)
        if weight is not None:
            weight[here].copy_(w)
