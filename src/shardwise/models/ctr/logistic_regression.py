"""Logistic regression: one weight for every key.

    logit = bias + w · dense + Σ over features of the key's weight

With the FTRL optimizer (``tables.optimizer: {type: ftrl, l1: ...}``) the weights of rare keys stay exactly 0.

Paper:  McMahan et al. 2013, "Ad click prediction: a view from the trenches".
Shapes: B samples, F features, N dense features; rows have width 1.
"""

from torch import Tensor

from shardwise.models.ctr.model import ClickModel, Linear
from shardwise.models.ctr.policy import LogisticRegressionPolicy


class LogisticRegression(ClickModel):
    """The model."""

    policy: LogisticRegressionPolicy

    def make_layers(self, dense: int) -> None:
        """For ``dense`` features."""
        self.linear = Linear(dense)

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """From dense features [B, N] and rows [B, F, 1]: [B]."""
        logits: Tensor = self.linear(dense, vectors.squeeze(2))
        return logits
