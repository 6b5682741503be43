"""Accumulation: the microbatches of the running step, what they weigh, and what became of their losses.

A gradient is summed over ranks and microbatches, each of whose losses is multiplied before its backward pass by

    loss scale · w_i / r        w_i: tokens or samples of microbatch i (weighing.py, where none was given)
                                r:   the first microbatch's weight times a power of two, near that of a global batch

so that gradient sums are means already, but for a factor near 1: weights of 10^5 tokens times a loss scale of 2^16 do
not overflow fp16, and with microbatches of one weight, 2^k of them, nothing is left to divide in the step. Their losses
are multiplied by powers of two, which change no digit: 16-bit gradients are those of a plain loop.

A microbatch is what comes between two calls of ``step()``. Several backward passes in it add up, as in a plain loop, so
they share one weight:

    g = Σ_i w_i (∇loss_i1 + ∇loss_i2 + ...) / Σ_i w_i
"""

import math
from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.engine.sums import Number
from shardwise.plan.errors import UsageError
from shardwise.precision.loss_scale import LossScale


class Accumulation:
    """See the module's docstring. ``dp``: all data-parallel ranks."""

    def __init__(
        self, microbatches: int, dp: Group, loss_scale: LossScale | None, device: torch.device
    ) -> None:
        self.microbatches = microbatches
        """That make a step, where the caller sets no boundary."""
        self.boundary: bool | None = None
        """Whether the running microbatch is the last one of its step; None: by counting."""
        self.holds_back = False
        """Inside ``Engine.no_sync``: no backward pass is the last one."""
        self.per_microbatch = 1
        """Backward passes that the last microbatch of a step is expected to have: as many as in the step before."""
        self.reference = 0.0
        """r, by which all weights are divided; found from the first global batch, 0 before."""
        self._dp = dp
        self.loss_scale = loss_scale
        """What losses are multiplied by; only under fp16."""
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Between two steps."""
        self.done = 0
        """Microbatches that ``step()`` has counted."""
        self.backwards = 0
        """Backward passes of the running microbatch."""
        self.passes = 0
        """Backward passes of the step."""
        self.is_summed = False
        """Whether the ranks have summed up already: no further backward pass may come."""
        self.weight: Number = 0.0
        """Σ w_i of this rank, the running microbatch included."""
        self.loss: Number = 0.0
        """Σ w_i loss_i of this rank."""
        self._running: Number = 0.0
        """The running microbatch's weight."""

    @property
    def is_last(self) -> bool:
        """Whether the running microbatch is the last one of its step."""
        return self.done + 1 >= self.microbatches if self.boundary is None else self.boundary

    @property
    def is_complete(self) -> bool:
        """Whether ``step()`` would update now."""
        return self.is_last and self.backwards > 0

    @property
    def left(self) -> int:
        """Backward passes that the running microbatch, the last one, is still expected to have; at least one."""
        return max(self.per_microbatch - self.backwards, 1)

    @property
    def is_last_backward(self) -> bool:
        """Whether the backward pass that comes now ends the step, as far as anybody knows."""
        return self.is_last and self.left == 1 and not self.holds_back

    @overload
    def divisor_of(self, weight: float) -> float: ...

    @overload
    def divisor_of(self, weight: Number) -> Number: ...

    def divisor_of(self, weight: Number) -> Number:
        """What sums of gradients are divided by where their microbatches weigh ``weight`` together."""
        return weight / (self.reference or 1.0) * (self.loss_scale.scale if self.loss_scale else 1.0)

    def scale_of(self, weight: Number) -> Number:
        """What the loss of a microbatch is multiplied by. Collective the first time (``agree``)."""
        self.agree(weight)
        return self.divisor_of(weight)

    def weight_of(self, given: float | None, found: Callable[[], Number]) -> Number:
        """What the backward pass that comes now counts: as ``given``, or as ``found``.

        Errors: UsageError where its microbatch has another weight already.
        """
        if self.backwards == 0:
            return found() if given is None else given
        if given is not None and given != self._running:
            raise UsageError(
                f"backward: a weight of {given:g}, but this microbatch counts {float(self._running):g} since its first "
                "backward: losses between two calls of step() add up, so they share one weight"
            )
        return self._running

    def count(self, loss: Tensor | None, weight: Number) -> None:
        """A backward pass is done. Its loss is known on the last stage."""
        if self.backwards == 0:
            self.weight = self.weight + weight
            self._running = weight
        if loss is not None:
            counted = loss.detach().double() * weight
            if isinstance(weight, Tensor):
                counted = counted.masked_fill_(weight == 0, 0.0)  # a mean over nothing may be NaN
            self.loss = self.loss + counted if isinstance(weight, Tensor) or weight else self.loss
        self.backwards += 1
        self.passes += 1

    def end_microbatch(self) -> None:
        """``step()`` was called, and more microbatches come."""
        self.done += 1
        self.backwards = 0

    def end_step(self) -> int:
        """Back to the state between two steps. Returns how many backward passes the next one is expected to have."""
        self.per_microbatch = self.backwards
        expected = self.passes if self.boundary is not None else self.microbatches * self.backwards
        self.clear()
        return expected

    def agree(self, weight: Number) -> None:
        """Find r from the first microbatch's weight on each rank. Collective, where it is not known yet."""
        if self.reference:
            return
        # Rank 0's own, which is that of the same samples on any number of ranks; the average tells the size.
        first = total = weight = float(weight)
        if self._dp.size > 1:
            mine = [weight, weight if self._dp.index == 0 else 0.0]
            sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
            self._dp.all_reduce(sums, "the first weights", purpose="control").wait()
            total, first = sums.tolist()
        near = abs(total) * self.microbatches or float(self._dp.size * self.microbatches)
        unit = abs(first) or 1.0
        self.reference = unit * 2.0 ** round(math.log2(near / unit))
