"""Schedulers of torch by name in a configuration."""

from typing import Any

import pytest
from torch import nn, ones, optim

from shardwise.base.errors import ConfigError
from shardwise.config.run import RunConfig
from shardwise.optim.groups import OptimizerGroups

LRS = (0.4, 0.1)


def groups_of(schedule: dict[str, Any], **optimizer: Any) -> OptimizerGroups:
    """Of two groups, with rates 0.4 and 0.1."""
    second = {"match": "head.*", "lr": LRS[1]}
    config = RunConfig.parse(
        {"schedule": schedule, "optimizer": {"type": "adam", "lr": LRS[0], "groups": [second], **optimizer}}
    )
    return OptimizerGroups(config.optimizer, config.schedule)


def near(given: list[float]) -> Any:
    return pytest.approx(given, rel=1e-12, abs=1e-15)


def test_schedulers_of_torch_by_name() -> None:
    """Also backwards, as after a step that was loaded."""
    groups = groups_of({"type": "torch", "scheduler": "StepLR", "arguments": {"step_size": 2, "gamma": 0.5}})
    assert [groups.rates(step)[0]["lr"] for step in (0, 1, 2, 5, 1)] == near([0.4, 0.4, 0.2, 0.1, 0.4])
    assert groups.tables_factor(2) == 0.5
    cycle = {
        "type": "torch",
        "scheduler": "OneCycleLR",
        "arguments": {"max_lr": 1.0, "total_steps": 10, "pct_start": 0.3},
    }
    numbers = groups_of(cycle).rates(0)[0]
    assert numbers["lr"] == pytest.approx(1 / 25) and numbers["betas"] == (0.95, 0.999)
    assert groups_of(cycle).rates(2)[1]["betas"] == (0.85, 0.999)


def test_a_given_optimizer_with_a_schedule_of_torch_by_name_is_refused() -> None:
    config = RunConfig.parse(
        {"schedule": {"type": "torch", "scheduler": "StepLR", "arguments": {"step_size": 2}}}
    )
    given = optim.SGD([nn.Parameter(ones(1))], lr=0.1)
    with pytest.raises(ConfigError, match="make StepLR on that one"):
        OptimizerGroups(config.optimizer, config.schedule, given)
