"""Schedulers under DeepSpeed's names: rates that are tensors, the numbers a script reads, arguments that are wrong."""

import math
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardwise.deepspeed.training.rate_schedulers import OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def adam(*own: Any) -> optim.Optimizer:
    """Adam with a group of one parameter for each rate."""
    return optim.Adam([{"params": [nn.Parameter(torch.zeros(1))], "lr": each} for each in own])


@pytest.mark.parametrize("kind", [WarmupLR, WarmupCosineLR])
def test_a_rate_that_is_a_tensor_rises_to_its_own_number(kind: Any) -> None:
    """The scheduler writes into the tensor, whose first number is the top of the rise."""
    rate = torch.full((), 0.1, dtype=torch.float64)
    optimizer = adam(rate)
    more = {"total_num_steps": 100} if kind is WarmupCosineLR else {}
    scheduler = kind(optimizer, warmup_num_steps=10, **more)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.0
    scheduler.step(1)
    assert rate.item() == pytest.approx(0.1 * math.log(2) / math.log(10))
    assert optimizer.param_groups[0]["initial_lr"].item() == 0.1


def test_the_numbers_that_scripts_read() -> None:
    warm = WarmupLR(adam(0.1, 0.2), warmup_num_steps=1)
    assert warm.min_lrs == [0.0, 0.0] and warm.max_lrs == [0.1, 0.2] and warm.warmup_num_steps == 2
    fall = WarmupCosineLR(adam(0.0), 10, warmup_num_steps=10, cos_min_ratio=0.25, warmup_type="linear")
    assert fall.warmup_type == "linear" and fall.get_lr_ratio() == 0.0
    fall.step(5)
    assert fall.get_lr_ratio() == pytest.approx(0.5)
    fall.step(12)
    assert fall.get_lr_ratio() == pytest.approx(0.25)
    cycle = OneCycle(adam(0.1), 0.01, 0.1, cycle_first_step_size=30, cycle_second_step_size=10)
    assert cycle.step_ratio == 0.75 and cycle.min_lrs == [0.01] and cycle.max_lrs == [0.1]


def test_momenta_before_the_first_step() -> None:
    """Answer as DeepSpeed does: the number of the curve, while the groups hold the lowest."""
    optimizer = adam(0.1, 0.1)
    cycle = OneCycle(
        optimizer, 0.01, 0.1, cycle_first_step_size=5, cycle_min_mom=0.8, cycle_max_mom=[0.9, 0.95]
    )
    assert cycle.get_mom() == [(0.9, 0.99), (0.95, 0.99)]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    cycle.step()
    assert cycle.get_mom()[0][0] == pytest.approx(0.9 - 0.1 / 5)


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_no_number_of_steps_is_refused(kind: Any) -> None:
    more = {} if kind is WarmupLR else {"total_num_steps": 100}
    with pytest.raises(ValueError, match="warmup_num_steps is None"):
        kind(adam(0.1), warmup_num_steps=None, **more)
