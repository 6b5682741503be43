"""DCN, version 2: layers that multiply by the input, and a network.

    x_0     = [dense, v_1, ..., v_F]
    x_(l+1) = x_0 * (M x_l + b) + x_l          products of features up to the order l + 2
    M       = a matrix, or U V with a rank far below its size

The network reads x_L (stacked), or x_0 in parallel with the cross layers (parallel); the logit is linear in the
result.

Paper:  Wang et al. 2020, arXiv:2008.13535.
Cost:   a cross layer takes X² multiplications a sample, with a rank 2·X·rank.
Shapes: B samples, F features, N dense features, D width, X = N + F·D.
"""

import torch
from torch import Tensor, nn

from shardwise.models.ctr.model import ClickModel, mlp
from shardwise.models.ctr.policy import DcnPolicy


class CrossLayer(nn.Module):
    """A cross layer: x_0 * (M x + b) + x."""

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(width if rank is None else rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output [B, X] for the input of the network ``x0`` [B, X] and of the layer ``x`` [B, X]."""
        inner = x if self.down is None else self.down(x)
        return torch.addcmul(x, x0, self.up(inner))


class Dcn(ClickModel):
    """A click-through model with cross layers and a network (DCN, version 2)."""

    policy: DcnPolicy

    def make_layers(self, dense: int) -> None:
        """Make the cross layers, the network and the output layer, for ``dense`` numbers per sample."""
        width = dense + len(self._features) * self.policy.width
        self.cross = nn.ModuleList(
            CrossLayer(width, self.policy.rank) for _ in range(self.policy.cross_layers)
        )
        self.deep = mlp(width, self.policy.hidden, ends_linear=False)
        deep_width = self.policy.hidden[-1] if self.policy.hidden else width
        is_parallel = self.policy.structure == "parallel" and self.policy.hidden
        self.head = nn.Linear(width + deep_width if is_parallel else deep_width, 1)

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits [B] of dense features [B, N] and rows [B, F, D]."""
        x0 = torch.cat([dense, vectors.flatten(1)], 1)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        if self.policy.structure == "stacked" or not self.policy.hidden:
            x = self.deep(x)
        else:
            x = torch.cat([x, self.deep(x0)], 1)
        logits: Tensor = self.head(x).squeeze(1)
        return logits
