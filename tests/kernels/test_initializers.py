"""Distributions of start weights: those of torch's own modules."""

import math

import pytest
import torch
from torch import nn

from shardwise.kernels.initializers import Constant, Normal, Uniform, of_linear, of_torch


@pytest.mark.parametrize("module", [nn.Linear(400, 50), nn.Conv2d(4, 50, 10), nn.Conv1d(40, 50, 10)])
def test_matrices_and_convolutions_are_uniform_within_what_torch_draws(module: nn.Module) -> None:
    rule = of_torch(module, "weight")
    assert rule == of_torch(module, "bias") == Uniform(-1 / 20, 1 / 20) == of_linear(400)
    weight = module.get_parameter("weight").detach()
    assert float(weight.abs().max()) == pytest.approx(rule.high, rel=0.01)
    assert float(weight.std()) == pytest.approx(rule.high / math.sqrt(3), rel=0.02)


def test_norms_are_1_and_their_biases_0() -> None:
    for module in (nn.LayerNorm(3), nn.RMSNorm(3), nn.GroupNorm(1, 3), nn.BatchNorm2d(3)):
        for name, parameter in module.named_parameters():
            rule = of_torch(module, name)
            assert isinstance(rule, Constant) and torch.equal(
                parameter, torch.full_like(parameter, rule.value)
            )


def test_what_has_no_rule() -> None:
    assert of_torch(nn.Embedding(3, 2), "weight") == Normal(1.0)
    assert of_torch(nn.Embedding(3, 2, padding_idx=0), "weight") is None
    assert of_torch(nn.LSTM(2, 2), "weight_ih_l0") is None
    nothing = nn.Linear(1, 2)
    nothing.weight = nn.Parameter(torch.empty(2, 0))
    assert of_torch(nothing, "weight") == Constant(0.0)
