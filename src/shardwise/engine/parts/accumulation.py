"""Accumulation: the microbatches of the running step, their weights, and the sum of their losses.

A gradient is summed over ranks and microbatches. The loss of each microbatch is multiplied before its backward pass by

    loss scale · w_i / r        w_i: tokens or samples of microbatch i (from weighing.py, if none was given)
                                r:   the first microbatch's weight times a power of two, near that of a global batch

The sum of the gradients is then the mean already, up to a factor near 1, so weights of 10^5 tokens times a loss scale
of 2^16 do not overflow fp16. With 2^k microbatches of equal weight nothing is left to divide in the step. Their losses
are multiplied by powers of two, which round nothing, so 16-bit gradients are equal to those of a plain loop.

A microbatch consists of the backward passes between two calls of ``step()``. Their gradients add up, as in a plain
loop, so they share one weight:

    g = Σ_i w_i (∇loss_i1 + ∇loss_i2 + ...) / Σ_i w_i
"""

import math
from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.engine.parts.sums import Number
from shardwise.precision.loss_scale import LossScale


class Accumulation:
    """The microbatches of the running step, their weights, and the sum of their losses.

    Args:
        microbatches: number of microbatches of a step.
        dp: all data-parallel ranks.
        loss_scale: the loss scale under fp16, else None.
        device: the device of this rank.
    """

    def __init__(
        self, microbatches: int, dp: Group, loss_scale: LossScale | None, device: torch.device
    ) -> None:
        self.microbatches = microbatches
        """Number of microbatches of a step, if the caller sets no boundary."""
        self.boundary: bool | None = None
        """True if the running microbatch is the last one of its step, as the caller has set it; None: by counting."""
        self.holds_back = False
        """True inside ``Engine.no_sync``, where no backward pass counts as the last one of its step."""
        self.per_microbatch = 1
        """Expected backward passes of the last microbatch of a step: as many as in the step before."""
        self.reference = 0.0
        """The divisor r of all weights, computed from the first global batch; 0 before."""
        self._dp = dp
        self.loss_scale = loss_scale
        """The factor of losses under fp16; None otherwise."""
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Reset the counts and sums to those between two steps."""
        self.done = 0
        """Number of microbatches of the step that ``step()`` has ended."""
        self.backwards = 0
        """Number of backward passes of the running microbatch."""
        self.passes = 0
        """Number of backward passes of the step."""
        self.is_summed = False
        """True if the ranks have summed the step's gradients already, so that no further backward pass may run."""
        self.weight: Number = 0.0
        """Σ w_i of this rank, the running microbatch included."""
        self.loss: Number = 0.0
        """Σ w_i loss_i of this rank."""
        self._running: Number = 0.0
        """Weight of the running microbatch."""

    @property
    def is_last(self) -> bool:
        """True if the running microbatch is the last one of its step."""
        return self.done + 1 >= self.microbatches if self.boundary is None else self.boundary

    @property
    def is_complete(self) -> bool:
        """True if ``step()`` would update the weights now."""
        return self.is_last and self.backwards > 0

    @property
    def left(self) -> int:
        """Expected number of backward passes left in the running microbatch, if it is the last one; at least one."""
        return max(self.per_microbatch - self.backwards, 1)

    @property
    def is_last_backward(self) -> bool:
        """True if the next backward pass is expected to be the last one of the step."""
        return self.is_last and self.left == 1 and not self.holds_back

    @overload
    def divisor_of(self, weight: float) -> float: ...

    @overload
    def divisor_of(self, weight: Number) -> Number: ...

    def divisor_of(self, weight: Number) -> Number:
        """Return the divisor of sums of gradients whose microbatches have the total weight ``weight``."""
        return weight / (self.reference or 1.0) * (self.loss_scale.scale if self.loss_scale else 1.0)

    def scale_of(self, weight: Number) -> Number:
        """Return the factor of the loss of a microbatch of this weight. The first call is collective (``agree``)."""
        self.agree(weight)
        return self.divisor_of(weight)

    def weight_of(self, given: float | None, found: Callable[[], Number]) -> Number:
        """Return the weight of the next backward pass.

        Args:
            given: the weight that the caller gave, or None.
            found: called for the weight if none was given.

        Raises:
            UsageError: if the microbatch of this backward pass has another weight already.
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
        """Count a backward pass that has run.

        Args:
            loss: its loss; None on ranks without the last stage, and if the loss is not known.
            weight: its weight.
        """
        if self.backwards == 0:
            self.weight = self.weight + weight
            self._running = weight
        if loss is not None:
            counted = loss.detach().double() * weight
            if isinstance(weight, Tensor):
                counted = counted.masked_fill_(weight == 0, 0.0)  # the mean of an empty set may be NaN
            self.loss = self.loss + counted if isinstance(weight, Tensor) or weight else self.loss
        self.backwards += 1
        self.passes += 1

    def end_microbatch(self) -> None:
        """Count the running microbatch as done, with more microbatches to follow in the step."""
        self.done += 1
        self.backwards = 0

    def end_step(self) -> int:
        """Reset to the state between two steps, and return the expected number of backward passes of the next step."""
        self.per_microbatch = self.backwards
        expected = self.passes if self.boundary is not None else self.microbatches * self.backwards
        self.clear()
        return expected

    def agree(self, weight: Number) -> None:
        """Compute r from the first microbatch's weight on each rank. Collective, unless r is known already."""
        if self.reference:
            return
        # r is a multiple of rank 0's weight, whose samples are the same on any number of ranks, so that results do
        # not depend on that number; the average of all ranks gives the power of two.
        first = total = weight = float(weight)
        if self._dp.size > 1:
            mine = [weight, weight if self._dp.index == 0 else 0.0]
            sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
            self._dp.all_reduce(sums, "the first weights", purpose="control").wait()
            total, first = sums.tolist()
        near = abs(total) * self.microbatches or float(self._dp.size * self.microbatches)
        unit = abs(first) or 1.0
        self.reference = unit * 2.0 ** round(math.log2(near / unit))
