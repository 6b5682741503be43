"""The dynamic loss scale."""

import json

from hypothesis import given
from hypothesis import strategies as st

from shardwise.precision.loss_scale import LossScale
from shardwise.precision.policy import LossScalePolicy


def run(policy: LossScalePolicy, steps: str) -> list[float]:
    """The scale after each step; ``+`` finite, ``-`` an overflow."""
    scale, seen = LossScale(policy), []
    for step in steps:
        scale.update(step == "+")
        seen.append(scale.scale)
    return seen


def test_start() -> None:
    assert LossScale(LossScalePolicy()).scale == 65536.0


def test_doubles_after_clean_steps_in_a_row() -> None:
    assert run(LossScalePolicy(init_scale=4, growth_interval=3), "+++++++") == [4, 4, 8, 8, 8, 16, 16]
    assert run(LossScalePolicy(init_scale=4, growth_interval=3), "++-+++") == [4, 4, 4, 4, 4, 8]


def test_hysteresis_tolerates_the_first_overflow() -> None:
    assert run(LossScalePolicy(init_scale=16), "-+-+-") == [16, 16, 8, 8, 4]
    assert run(LossScalePolicy(init_scale=16, hysteresis=1), "--") == [8, 4]


def test_growth_restores_the_tolerance() -> None:
    policy = LossScalePolicy(init_scale=16, growth_interval=2)
    assert run(policy, "--++--") == [16, 8, 8, 16, 16, 8]


def test_floor() -> None:
    scale = LossScale(LossScalePolicy(init_scale=4, hysteresis=1, min_scale=2))
    assert not scale.at_floor
    scale.update(False)
    assert scale.scale == 2 and scale.at_floor
    scale.update(False)
    assert scale.scale == 2


@given(st.text("+-", max_size=30), st.text("+-", max_size=30), st.integers(1, 3), st.integers(1, 4))
def test_state_carries_on(before: str, after: str, hysteresis: int, interval: int) -> None:
    policy = LossScalePolicy(init_scale=64, hysteresis=hysteresis, growth_interval=interval)
    first, second = LossScale(policy), LossScale(policy)
    for step in before:
        first.update(step == "+")
    second.load_state(json.loads(json.dumps(first.state())))
    for step in after:
        first.update(step == "+")
        second.update(step == "+")
        assert first == second
