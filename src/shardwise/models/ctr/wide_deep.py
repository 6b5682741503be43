"""Wide&Deep: a linear model, which memorises single keys, beside a network, which generalises.

    logit = linear(dense, weights of keys) + mlp([dense, vectors of keys])

Paper:  Cheng et al. 2016, arXiv:1606.07792.
Shapes: B samples, F features, N dense features, D width; rows have width 1 + D, the wide weight first.
"""

import torch
from torch import Tensor

from shardwise.models.ctr.model import ClickModel, WideLinear, mlp, widened
from shardwise.models.ctr.policy import WideDeepPolicy


class WideDeep(ClickModel):
    """A click-through model with a linear part and a network (Wide&Deep)."""

    policy: WideDeepPolicy

    def make_layers(self, dense: int) -> None:
        """Make the linear part and the network, for ``dense`` numbers per sample."""
        self.linear = WideLinear(dense)
        self.deep = mlp(
            dense + len(self._features) * self.policy.width, [*self.policy.hidden, 1], ends_linear=True
        )

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits [B] of dense features [B, N] and rows [B, F, 1 + D]."""
        wide, deep = vectors.split([1, self.policy.width], 2)
        wide_logit: Tensor = self.linear(dense, wide.squeeze(2))
        return wide_logit + widened(self.deep(torch.cat([dense, deep.flatten(1)], 1)).squeeze(1))
