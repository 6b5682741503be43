"""Optimizers on the flat masters: any elementwise one of torch, and those of two halves (two_pass.py).

An elementwise update treats each element alone, so it may run on any cut of the flat buffer: 32 calls instead of 288,
and torch's own fused kernels do the work. One optimizer object per bucket, so that masters can be updated Unit by Unit.

    one launch       Adam on an accelerator (kernels/adam.py)
    by the chunk     a fused kernel of torch's on the host, and any update of moments in 16 or 8 bits (by_chunk.py)
    torch's step     all else
    two halves       an update that looks at whole tensors: ``direct`` and ``apply``; in between it is told by what each
                     tensor's direction is multiplied

What is kept for the elements is flat_state.py's, and which classes there are classes.py's.

Scaling: gradients arrive as sums; ``divisor`` (weights summed, loss scale, clipping) is applied inside the fused kernel
where that is exact enough (its scalar is fp32), else in a pass of its own.
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
    """By what the direction of a tensor's elements [start, stop) of the master is multiplied."""

    start: int
    stop: int
    factor: float


class FlatOptimizer:
    """The optimizer of one bucket's owned range."""

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
        """As ``FlatState``; ``decay``: of an average of the master, None without one."""
        self._decay = decay
        self.state = FlatState(master, make, group, form, rounding, into, decay is not None)
        """Master, moments and step counts."""
        self._optimizer = self.state.optimizer
        self._group = group
        self._divides = bool(getattr(self._optimizer, "_step_supports_amp_scaling", False)) and (
            master.dtype == torch.float32
        )
        self._direction: Tensor | None = None
        """Between the two halves of an update."""

    @property
    def needs(self) -> Needs:
        """What the update of an element looks at; all but "elements" is done in two halves."""
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
        """Update from ``grad / divisor`` (flat, as the master) with the numbers of this bucket's group in ``rates``
        (groups.py); ``unused`` ranges are skipped. ``grad`` is spent.

        ``weight``, as long as the master, takes its new numbers rounded where that needs no pass of its own; whether it
        did. ``steps`` were before: what coded moments are rounded by.
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
            # Filled on the device: a number that is copied there is waited for.
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
        """What one kernel's step works with; None where the update is another, or its count lies on the host."""
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
        """What updates a chunk at a time; None where that is torch's to do, or the state is still to be made."""
        kernel = chunk_kernel(self._optimizer) if self.state.master.device.type == "cpu" else None
        # A product of 16-bit numbers has other bits where torch computes without vectors, which is at a tensor's end.
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
        """``kernel``: None, of coded moments alone, is the class's own step."""
        for (start, stop, leaf, _), is_reached in self.state.reached(unused):
            cast = None if weight is None else weight[start:stop]
            if not is_reached:
                if cast is not None:  # what comes from a disk is the master alone
                    cast.copy_(leaf)
                continue
            state, coded, own = self.state.of(leaf), None, kernel
            if self.state.coded is not None:
                coded = CodedPart(self.state.coded, start, steps)
                own = kernel or class_kernel(self._of_one_leaf(), self.state.coded.labels, state)
            assert own is not None, "moments that torch keeps are updated by a kernel, or by torch"
            step_by_chunk(own, leaf, grad[start:stop], state, divisor, self._divides, cast, coded)

    def _of_one_leaf(self) -> optim.Optimizer:
        """The same optimizer, of one element."""
        made = self.state.remake(
            torch.zeros(1, dtype=self.state.master.dtype, device=self.state.master.device)
        )
        made.param_groups[0].update({k: value for k, value in self.options.items() if k != "params"})
        return made

    def _cut(self, rates: Sequence[Mapping[str, Any]], unused: Sequence[tuple[int, int]]) -> None:
        """Segments around ``unused`` ranges, and the numbers of this step."""
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
        """The first half of an update; as ``step`` else. ``grad`` becomes the direction, where the dtypes are one."""
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        self._direction = self._take(grad, divisor, rates, unused)
        self._optimizer.direct()

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """(master, direction), flat, between the halves."""
        assert self._direction is not None, "direct() comes before what looks at its directions"
        return self.state.master, self._direction

    @property
    def options(self) -> Mapping[str, Any]:
        """The numbers that it works with in this step."""
        return self._optimizer.param_groups[0]

    def factor(self, whole: Whole) -> float:
        """By what a tensor's direction is multiplied."""
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        return self._optimizer.factor(self.options, whole)

    def apply(self, factors: Iterable[Factor], steps: int = 0) -> None:
        """The second half; ``steps`` were before."""
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
        """Point the leaves into the gradient, which is returned, in the master's dtype."""
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
