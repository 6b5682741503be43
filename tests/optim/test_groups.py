"""Groups of parameters: their rates and momentum follow a schedule together."""

from math import log
from typing import Any

import pytest

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


def rates(schedule: dict[str, Any], steps: int, group: int = 0) -> list[float]:
    groups = groups_of(schedule)
    return [groups.rates(step)[group]["lr"] for step in range(steps)]


def near(given: list[float]) -> Any:
    return pytest.approx(given, rel=1e-12, abs=1e-15)


def test_warmup_rises_to_the_groups_own_rates() -> None:
    given = {"type": "warmup_linear", "warmup_steps": 2, "total_steps": 6, "rise": "linear"}
    parts = [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]
    assert rates(given, 9) == near([0.4 * part for part in parts])
    assert rates(given, 9, 1) == near([0.1 * part for part in parts])


CYCLE = {"type": "one_cycle", "min_lr": 0.1, "max_lr": 0.5, "rise_steps": 4, "fall_steps": 2}


def test_one_cycle_of_sgd() -> None:
    groups = groups_of(CYCLE, type="sgd", momentum=0.5)
    assert [groups.rates(step)[1]["momentum"] for step in (0, 1, 4)] == near([0.8, 0.875, 0.8])
    with pytest.raises(ConfigError, match="neither betas nor a momentum above 0.*cycle_momentum: false"):
        groups_of(CYCLE, type="sgd")
    still = groups_of({**CYCLE, "cycle_momentum": False}, type="sgd")
    assert [still.rates(step)[0]["momentum"] for step in (0, 4)] == [0, 0]


def test_rates_of_tables_follow_as_parts() -> None:
    warmup = {"type": "warmup", "max_lr": 0.5, "min_lr": 0.1, "warmup_steps": 4}
    wanted = [
        (warmup, 0.2 + 0.8 * log(2) / log(4)),
        ({"type": "warmup", "warmup_steps": 2, "rise": "linear"}, 0.5),
        (CYCLE, 0.6),
        ({"type": "range_test", "interval_steps": 1}, 3.0),
    ]
    for schedule, part in wanted:
        assert groups_of(schedule).tables_factor(2) == pytest.approx(part), schedule
