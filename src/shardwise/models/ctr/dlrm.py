"""DLRM: the dense features become one more vector, and all pairs of vectors are multiplied in dot products.

    u     = bottom(dense)                                    [B, D]
    dots  = <z_i, z_j> of all pairs of z = (u, v_1, ..., v_F)
    logit = top([u, dots])

Paper:  Naumov et al. 2019, arXiv:1906.00091.
Cost:   that of the interaction: kernels/tables/pairwise_dots.py.
Shapes: B samples, F features, N dense features, D width.
"""

from torch import Tensor

from shardwise.kernels.tables.pairwise_dots import dots_beside, pairwise_dots
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
        x = pairwise_dots(vectors) if self.bottom is None else dots_beside(self.bottom(dense), vectors)
        logits: Tensor = self.top(x).squeeze(1)
        return logits
