"""Adam without the correction of its first steps."""

from typing import Any

import pytest
import torch

from shardwise.optim.classes import from_policy
from shardwise.optim.policy import OptimizerPolicy


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_without_bias_correction(kind: Any) -> None:
    """The formula of the module's docstring in plain numbers, with a decay of the weights or of the gradient."""
    policy = OptimizerPolicy(type=kind, lr=0.1, weight_decay=0.5, eps=1e-3, correct="none")
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64)
    optimizer = from_policy(policy)([weights], 0)
    w, m, v = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for gradient in ([0.5, -1.0], [0.25, 2.0]):
        weights.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        for i, each in enumerate(gradient):
            g = each + 0.5 * w[i] if kind == "adam" else each
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            w[i] = (w[i] if kind == "adam" else w[i] * 0.95) - 0.1 * m[i] / (v[i] ** 0.5 + 1e-3)
    torch.testing.assert_close(weights.tolist(), w, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="correct: step of adam is not a rule here"):
        OptimizerPolicy(type="adam", correct="step")
