"""LAMB by its formula, with each place of the bias correction."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.optim.lamb import Lamb

BETAS, EPS, LR, DECAY = (0.8, 0.95), 1e-2, 0.1, 0.3


def by_formula(
    w: Tensor, gradients: list[Tensor], correct: str, trust: bool, bounds: tuple[float, float]
) -> Tensor:
    m = v = torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        first, second = 1 - BETAS[0] ** t, 1 - BETAS[1] ** t
        inside = (first, second) if correct == "moments" else (1, 1)
        u = (m / inside[0]) / ((v / inside[1]).sqrt() + EPS) + DECAY * w
        ratio = min(max(float(w.norm() / u.norm()), bounds[0]), bounds[1]) if trust and w.norm() > 0 else 1
        outside = math.sqrt(second) / first if correct == "step" else 1
        w = w - LR * ratio * outside * u
    return w


@pytest.mark.parametrize("correct", ["moments", "step", "none"])
@pytest.mark.parametrize(
    ("trust", "bounds"), [(True, (0.01, 10.0)), (True, (0.5, 0.5)), (False, (0.01, 10.0))]
)
def test_three_steps(correct: Any, trust: bool, bounds: tuple[float, float]) -> None:
    draws = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 2, 3, generator=draws, dtype=torch.float64)
    weight = nn.Parameter(start.clone())
    optimizer = Lamb([weight], LR, BETAS, EPS, DECAY, trust, bounds, correct)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(weight, by_formula(start, [*gradients], correct, trust, bounds), rtol=1e-12)


def test_weights_of_norm_0_move_by_the_rate_alone() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    gradient = torch.ones(3, dtype=torch.float64)
    weight.grad = gradient.clone()
    Lamb([weight], LR, BETAS, EPS, DECAY).step()
    zeros = torch.zeros(3, dtype=torch.float64)
    assert torch.allclose(weight, by_formula(zeros, [gradient], "moments", True, (0.01, 10)), rtol=1e-12)


@pytest.mark.parametrize(
    "given",
    [{"betas": (1.0, 0.9)}, {"betas": (-0.1, 0.9)}, {"trust_bounds": (2, 1)}, {"trust_bounds": (-1, 1)}],
)
def test_numbers_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Lamb: betas"):
        Lamb([nn.Parameter(torch.zeros(1))], **given)
