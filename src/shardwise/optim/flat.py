"""Optimizers on the flat masters: any elementwise one of torch, and those of two halves (two_pass.py).

An elementwise update treats each element by itself, so it may run on any cut of the flat buffer: 32 calls instead of
288, with torch's own fused kernels. There is one optimizer object for each bucket, so that masters can be updated Unit
by Unit.

    one launch       Adam on an accelerator (kernels/adam.py)
    by the chunk     a fused kernel of torch on the host, and any update of moments in 16 or 8 bits (by_chunk.py)
    torch's step     all else
    two halves       an update that looks at whole tensors: ``direct`` and ``apply``, which receives the factor of each
                     tensor's direction

flat_state.py contains the state of the elements, classes.py the classes.

Scaling: gradients arrive as sums; ``divisor`` (weights summed, loss scale, clipping) is applied inside the fused kernel
if that is exact enough (its scalar is fp32), else in a separate pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from shardwise.kernels.adam import AdamRule, adam_step
from shardwise.kernels.choice import fused
from shardwise.optim.by_chunk import ChunkKernel, chunk_kernel, class_kernel, step_by_chunk
from shardwise.optim.classes import Make, needs_of
from shardwise.optim.coded_moments import CodedPart
from shardwise.optim.flat_state import FlatState
from shardwise.optim.rounding import Rounding
from shardwise.optim.two_pass import TwoPass, Whole
from shardwise.plan.registry import Needs
from shardwise.plan.state_form import StateForm


class Factor(NamedTuple):
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
        rounding: Rounding | None = None,
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

    def factor(self, whole: Whole) -> float:
        """Return the factor of a tensor's direction."""
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        return self._optimizer.factor(self.options, whole)

    def apply(self, factors: Iterable[Factor], steps: int = 0) -> None:
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
