"""Accumulation: the microbatches of the running step, what they weigh, and what became of their losses.

A gradient is summed over ranks and microbatches, each of whose losses is multiplied before its backward pass by

    loss scale · w_i / r        w_i: tokens or samples of microbatch i (1 where none was given)
                                r:   a power of two near the weight of a whole global batch

so that gradient sums are means already, but for a factor near 1: weights of 10^5 tokens times a loss scale of 2^16 do
not overflow fp16, and with plain losses on 2^k microbatches nothing is left to divide in the step. A power of two
changes no digit.
"""

import math

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.precision.loss_scale import LossScale


class Accumulation:
    """See the module's docstring. ``both``: all data-parallel ranks."""

    def __init__(
        self, microbatches: int, both: Group, loss_scale: LossScale | None, device: torch.device
    ) -> None:
        self.microbatches = microbatches
        """That make a step."""
        self.reference = 0.0
        """r, by which all weights are divided; found from the first global batch, 0 before."""
        self._both = both
        self._loss_scale = loss_scale
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

    @property
    def scale(self) -> float:
        """What a loss of weight 1 is multiplied by."""
        return (self._loss_scale.scale if self._loss_scale else 1.0) / (self.reference or 1.0)

    def scale_of(self, weight: float | None) -> float:
        """What the loss of a microbatch is multiplied by. Collective the first time, where weights are given."""
        if not self.reference:
            self.reference = self._agree(weight)
        counted = (1.0 if weight is None else float(weight)) / self.reference
        return counted * (self._loss_scale.scale if self._loss_scale else 1.0)

    def count(self, loss: Tensor | None, weight: float | None) -> None:
        """A microbatch is done. Its loss is known on the last stage."""
        counted = 1.0 if weight is None else float(weight)
        self.weight += counted
        if counted and loss is not None:
            self.loss = self.loss + loss.detach().double().cpu() * counted
        self.done += 1

    def _agree(self, weight: float | None) -> float:
        average = 1.0
        if weight is not None:
            sums = torch.tensor([float(weight), 1.0], dtype=torch.float64, device=self._device)
            self._both.all_reduce(sums, "the first weights", purpose="control").wait()
            average = float(sums[0] / sums[1]) or 1.0
        return 2.0 ** round(math.log2(average * self._both.size * self.microbatches))
