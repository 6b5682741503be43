"""DeepFM: a factorisation machine and a network on the same vectors.

    logit = linear(dense, weights of keys) + Σ over i < j of <v_i, v_j> + mlp([dense, v_1, ..., v_F])

The sum over pairs takes F·D steps:  Σ over i < j of <v_i, v_j> = ½ Σ over d of ((Σ v_id)² - Σ v_id²).

Paper:  Guo et al. 2017, arXiv:1703.04247; Rendle 2010 (factorisation machines).
Shapes: B samples, F features, N dense features, D width; rows have width 1 + D, the weight of first order first.
"""

import torch
from torch import Tensor

from shardwise.models.ctr.model import ClickModel, WideLinear, mlp, widened
from shardwise.models.ctr.policy import DeepFmPolicy


class DeepFm(ClickModel):
    """A click-through model with a factorisation machine and a network (DeepFM)."""

    policy: DeepFmPolicy

    def make_layers(self, dense: int) -> None:
        """Make the linear part and the network, for ``dense`` numbers per sample."""
        self.linear = WideLinear(dense)
        self.deep = mlp(
            dense + len(self._features) * self.policy.width, [*self.policy.hidden, 1], ends_linear=True
        )

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits [B] of dense features [B, N] and rows [B, F, 1 + D]."""
        first, v = vectors.split([1, self.policy.width], 2)
        linear: Tensor = self.linear(dense, first.squeeze(2))
        return linear + pairs(v) + widened(self.deep(torch.cat([dense, v.flatten(1)], 1)).squeeze(1))


def pairs(v: Tensor) -> Tensor:
    """Return Σ over i < j of <v_i, v_j> for vectors [B, F, D]: [B]."""
    v = widened(v)
    return (v.sum(1).square() - v.square().sum(1)).sum(1) / 2
