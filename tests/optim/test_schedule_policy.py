"""The schedules that set rates and momenta by themselves, against tables made by hand and short formulas."""

from math import cos, log, pi
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config.auto import resolve
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


def test_polynomial_exponential_and_wsd() -> None:
    base = {"total_steps": 4, "min_ratio": 0.25}
    square = rates({"type": "polynomial", "power": 2, **base}, 6)
    assert square == near([0.4 * (0.25 + 0.75 * part) for part in (1, 9 / 16, 1 / 4, 1 / 16, 0, 0)])
    assert rates({"type": "exponential", **base}, 6, 1) == near(
        [0.1 * 0.25 ** (t / 4) for t in (0, 1, 2, 3, 4, 4)]
    )
    stable = rates({"type": "wsd", "warmup_steps": 2, "decay_steps": 2, "total_steps": 6}, 8)
    assert stable == near([0.2, 0.4, 0.4, 0.4, 0.4, 0.2, 0, 0])


def test_warmup_begins_twice_at_the_bottom() -> None:
    given = {"type": "warmup", "min_lr": 0.1, "max_lr": [0.5, 0.3], "warmup_steps": 4}
    parts = [0, 0, log(2) / log(4), log(3) / log(4), 1, 1]
    assert rates(given, 6) == near([0.1 + 0.4 * part for part in parts])
    assert rates({**given, "rise": "linear"}, 6, 1) == near(
        [0.1 + 0.2 * part for part in (0, 0, 0.25, 0.5, 0.75, 1)]
    )
    assert rates({**given, "rise": "cosine"}, 6, 1) == near(
        [0.1 + 0.2 * part for part in (0, 0, (1 - cos(pi / 4)) / 2, 0.5, (1 + cos(pi / 4)) / 2, 1)]
    )


def test_a_warmup_of_one_step_counts_as_two() -> None:
    assert rates({"type": "warmup", "warmup_steps": 1}, 4) == near([0, 0, 0.4, 0.4])


def test_warmup_cosine() -> None:
    given = {
        "type": "warmup_cosine",
        "warmup_steps": 2,
        "start_ratio": 0.2,
        "min_ratio": 0.5,
        "total_steps": 5,
    }
    parts = [0, 0.2, 1.0, *(0.5 + 0.5 * (1 + cos(pi * p)) / 2 for p in (1 / 3, 2 / 3, 1, 1))]
    assert rates(given, 7) == near([0.4 * part for part in parts])


def test_range_test_in_both_forms() -> None:
    given = {"type": "range_test", "min_lr": [0.01, 0.02], "interval_steps": 2, "rate": 3.0}
    assert rates(given, 5) == near([0.01 * (1 + 3 * t / 2) for t in range(5)])
    assert rates({**given, "staircase": True}, 5, 1) == near([0.02, 0.02, 0.08, 0.08, 0.14])
    assert rates({**given, "growth": "exponential"}, 5) == near([0.01 * 2**t for t in range(5)])


CYCLE = {"type": "one_cycle", "min_lr": 0.1, "max_lr": 0.5, "rise_steps": 4, "fall_steps": 2}


def test_one_cycle_and_its_decay() -> None:
    given = {**CYCLE, "decay_steps": 2, "decay_lr_rate": 1.0, "decay_momentum_rate": 0.1}
    assert rates(given, 10) == near([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.1 / 2, 0.1 / 2.5])
    betas = [groups_of(given).rates(step)[0]["betas"] for step in range(9)]
    falls = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1]  # the first as DeepSpeed begins
    assert [beta for beta, _ in betas] == near(falls)
    assert {beta for _, beta in betas} == {0.999}
    assert groups_of({**given, "second_beta": 0.99}).rates(3)[0]["betas"][1] == 0.99


def test_stairs_of_one_cycle() -> None:
    given = {**CYCLE, "rise_steps": 6, "fall_steps": 3, "rise_stairs": 2, "fall_stairs": 3}
    assert rates(given, 10) == near(
        [0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.5, 0.1 + 0.4 * 2 / 3, 0.1 + 0.4 / 3, 0.1]
    )


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"type": "one_cicle"}, "there is no type 'one_cicle'; did you mean 'one_cycle'"),
        ({"type": "one_cycle", "min_lr": 0.1}, r"schedule\.max_lr: Field required"),
        ({"type": "range_test", "step_size": 3}, "unknown key 'step_size'"),
        ({"type": "warmup", "total_steps": 3}, "total_steps is for warmup_linear"),
        ({"type": "linear", "power": 2.0}, "power is for polynomial"),
        ({"type": "exponential"}, "give min_ratio"),
        ({**CYCLE, "decay_lr_rate": 1.0}, "without decay_steps"),
        ({"type": "wsd", "warmup_steps": 3, "decay_steps": 4, "total_steps": 6}, "together must not be more"),
        ({"type": "warmup_linear"}, "needs a last step"),
        (
            {"type": "warmup", "max_lr": [1.0, 2.0, 3.0]},
            r"schedule\.max_lr: 3 numbers for the optimizer's 2 groups",
        ),
        ({"type": "torch", "scheduler": "StepLr"}, "did you mean 'StepLR'"),
        ({"type": "torch", "scheduler": "ReduceLROnPlateau"}, "looks at a loss"),
        ({"type": "torch", "scheduler": "StepLR"}, "refuses them.*step_size"),
    ],
    ids=str,
)
def test_what_is_refused(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(RunConfig.parse({"schedule": schedule}), 1, "cpu")
        groups_of(schedule)
