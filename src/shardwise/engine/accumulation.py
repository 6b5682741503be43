"""Accumulation: the microbatches of the running step, what they weigh, and what became of their losses.

A gradient is summed over ranks and microbatches, each of whose losses is multiplied before its backward pass by

    loss scale · w_i / r        w_i: tokens or samples of microbatch i (weighing.py, where none was given)
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

    def scale_of(self, weight: float) -> float:
        """What the loss of a microbatch is multiplied by. Collective the first time (``agree``)."""
        self.agree(weight)
        return weight / self.reference * (self._loss_scale.scale if self._loss_scale else 1.0)

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
        average = weight
        if self._both.size > 1:
            total = torch.tensor([weight], dtype=torch.float64, device=self._device)
            self._both.all_reduce(total, "the first weights", purpose="control").wait()
            average = float(total[0]) / self._both.size
        self.reference = 2.0 ** round(math.log2((average or 1.0) * self._both.size * self.microbatches))
