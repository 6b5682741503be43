"""LARS by its formula."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.optim.lars import Lars

LR, MOMENTUM, DECAY, ETA = 0.1, 0.7, 0.3, 0.02


@pytest.mark.parametrize("trust", [True, False])
def test_three_steps(trust: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    w, *gradients = torch.randn(4, 2, 3, generator=draws, dtype=torch.float64)
    weight = nn.Parameter(w.clone())
    optimizer = Lars([weight], LR, MOMENTUM, DECAY, trust, ETA)
    v = torch.zeros_like(w)
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
        ratio = ETA * w.norm() / (g.norm() + DECAY * w.norm()) if trust else 1
        v = MOMENTUM * v + LR * ratio * (g + DECAY * w)
        w = w - v
    assert torch.allclose(weight, w, rtol=1e-12)


def test_weights_of_norm_0_move_by_the_rate_alone() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    weight.grad = torch.ones(3, dtype=torch.float64)
    Lars([weight], LR, MOMENTUM, DECAY, True, ETA).step()
    assert torch.allclose(weight, torch.full((3,), -LR, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("given", [{"momentum": 1}, {"momentum": -0.1}, {"trust_coefficient": 0}])
def test_numbers_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Lars: momentum"):
        Lars([nn.Parameter(torch.zeros(1))], **given)
