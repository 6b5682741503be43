"""DLRM: the dense features become one more vector, and all pairs of vectors are multiplied in dot products.

    u     = bottom(dense)                                    [B, D]
    dots  = <z_i, z_j> of all pairs of z = (u, v_1, ..., v_F)
    logit = top([u, dots])

Paper:  Naumov et al. 2019, arXiv:1906.00091.
Cost:   B·(F + 1)²·D multiplications of the interaction, forward and backward each (interaction.py).
Shapes: B samples, F features, N dense features, D width.
"""

import torch
from torch import Tensor

from shardwise.models.ctr.interaction import pairwise_dots
from shardwise.models.ctr.model import ClickModel, mlp
from shardwise.models.ctr.policy import DlrmPolicy


class Dlrm(ClickModel):
    """A click-through model with dot products of all pairs of vectors (DLRM).

    Without dense features there is no bottom part.
    """

    policy: DlrmPolicy

    def make_layers(self, dense: int) -> None:
        """Make the bottom and the top part, for ``dense`` numbers per sample."""
        width, vectors = self.policy.width, len(self._features) + bool(dense)
        self.bottom = mlp(dense, [*self.policy.bottom, width], ends_linear=False) if dense else None
        inputs = vectors * (vectors - 1) // 2 + (width if dense else 0)
        self.top = mlp(inputs, [*self.policy.top, 1], ends_linear=True)

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits [B] of dense features [B, N] and rows [B, F, D]."""
        if self.bottom is None:
            x = pairwise_dots(vectors)
        else:
            u = self.bottom(dense)  # [B, D]
            x = torch.cat([u, pairwise_dots(torch.cat([u[:, None], vectors], 1))], 1)
        logits: Tensor = self.top(x).squeeze(1)
        return logits
