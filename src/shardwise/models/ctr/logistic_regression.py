"""Logistic regression: one weight for every key.

    logit = bias + w · dense + Σ over features of the key's weight

With the FTRL optimizer (``tables.optimizer: {type: ftrl, l1: ...}``) the weights of rare keys stay exactly 0.

Paper:  McMahan et al. 2013, "Ad click prediction: a view from the trenches".
Shapes: B samples, F features, N dense features; rows have width 1.
"""

from torch import Tensor

from shardwise.models.ctr.model import ClickModel, WideLinear
from shardwise.models.ctr.policy import LogisticRegressionPolicy


class LogisticRegression(ClickModel):
    """A click-through model with one weight per key and a linear function of the dense features."""

    policy: LogisticRegressionPolicy

    def make_layers(self, dense: int) -> None:
        """Make the linear part, for ``dense`` numbers per sample."""
        self.linear = WideLinear(dense)

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits [B] of dense features [B, N] and rows [B, F, 1]."""
        logits: Tensor = self.linear(dense, vectors.squeeze(2))
        return logits
