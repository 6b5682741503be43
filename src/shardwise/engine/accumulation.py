"""Accumulation: the microbatches of the running step, what they weigh, and what became of their losses.

A gradient is summed over ranks and microbatches, each of whose losses is multiplied before its backward pass by

    loss scale · w_i / r        w_i: tokens or samples of microbatch i (weighing.py, where none was given)
                                r:   the first microbatch's weight times a power of two, near that of a global batch

so that gradient sums are means already, but for a factor near 1: weights of 10^5 tokens times a loss scale of 2^16 do
not overflow fp16, and with microbatches of one weight, 2^k of them, nothing is left to divide in the step. Their losses
are multiplied by powers of two, which change no digit: 16-bit gradients are those of a plain loop.
"""

import math

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.precision.loss_scale import LossScale


class Accumulation:
    """See the module's docstring. ``dp``: all data-parallel ranks."""

    def __init__(
        self, microbatches: int, dp: Group, loss_scale: LossScale | None, device: torch.device
    ) -> None:
        self.microbatches = microbatches
        """That make a step."""
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
        """Microbatches that have run forward and backward."""
        self.weight = 0.0
        """Σ w_i of this rank."""
        self.loss: Tensor = torch.zeros((), dtype=torch.float64)
        """Σ w_i loss_i of this rank."""

    @property
    def is_complete(self) -> bool:
        """Whether all microbatches of the step have run."""
        return self.done >= self.microbatches

    def divisor_of(self, weight: float) -> float:
        """What sums of gradients are divided by where their microbatches weigh ``weight`` together."""
        return weight / (self.reference or 1.0) * (self.loss_scale.scale if self.loss_scale else 1.0)

    def scale_of(self, weight: float) -> float:
        """What the loss of a microbatch is multiplied by. Collective the first time (``agree``)."""
        self.agree(weight)
        return self.divisor_of(weight)

    def count(self, loss: Tensor | None, weight: float) -> None:
        """A microbatch is done. Its loss is known on the last stage."""
        self.weight += weight
        if weight and loss is not None:
            self.loss = self.loss + loss.detach().double().cpu() * weight
        self.done += 1

    def agree(self, weight: float) -> None:
        """Find r from the first microbatch's weight on each rank. Collective, where it is not known yet."""
        if self.reference:
            return
        # Rank 0's own, which is that of the same samples on any number of ranks; the average tells the size.
        first = total = weight
        if self._dp.size > 1:
            mine = [weight, weight if self._dp.index == 0 else 0.0]
            sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
            self._dp.all_reduce(sums, "the first weights", purpose="control").wait()
            total, first = sums.tolist()
        near = abs(total) * self.microbatches or float(self._dp.size * self.microbatches)
        unit = abs(first) or 1.0
        self.reference = unit * 2.0 ** round(math.log2(near / unit))
