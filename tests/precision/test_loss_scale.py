"""The dynamic loss scale."""

import json

from hypothesis import given
from hypothesis import strategies as st

from shardwise.precision.loss_scale import LossScale
from shardwise.precision.policy import LossScalePolicy, PrecisionPolicy


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
    assert not scale.is_spent
    scale.update(False)
    assert scale.scale == 2 and scale.is_spent
    scale.update(False)
    assert scale.scale == 2


def test_an_overflow_that_is_tolerated_at_the_floor_is_not_the_end() -> None:
    scale = LossScale(LossScalePolicy(init_scale=1, hysteresis=2))
    assert not scale.is_spent
    scale.update(False)
    assert scale.is_spent


def test_one_number_is_a_scale_that_stays() -> None:
    policy = PrecisionPolicy.model_validate({"compute": "fp16", "loss_scale": 128}).loss_scale
    assert run(policy, "-++" * 500 + "-") == [128] * 1501
    scale = LossScale(policy)
    scale.load_state(LossScale(LossScalePolicy()).state())
    assert scale.is_spent and scale.scale == 128


def test_overflows_that_must_come_in_a_row() -> None:
    policy = LossScalePolicy(init_scale=16, consecutive_hysteresis=True)
    assert run(policy, "-+-+--+--") == [16, 16, 16, 16, 16, 8, 8, 8, 4]


def test_factors_and_delay() -> None:
    """DeepSpeed's first growth after the start and after an overflow takes a step more than the window."""
    policy = LossScalePolicy(init_scale=4, growth_interval=2, growth_delay=1, hysteresis=1)
    assert run(policy, "+++++-++++") == [4, 4, 8, 8, 16, 8, 8, 8, 16, 16]
    policy = LossScalePolicy(
        init_scale=8, growth_interval=1, growth_factor=4, backoff_factor=0.25, hysteresis=1
    )
    assert run(policy, "+--") == [32, 8, 2]


@given(st.text("+-", max_size=30), st.text("+-", max_size=30), st.integers(1, 3), st.integers(1, 4))
def test_state_carries_on(before: str, after: str, hysteresis: int, interval: int) -> None:
    policy = LossScalePolicy(init_scale=64, hysteresis=hysteresis, growth_interval=interval, growth_delay=1)
    first, second = LossScale(policy), LossScale(policy)
    for step in before:
        first.update(step == "+")
    second.load_state(json.loads(json.dumps(first.state())))
    for step in after:
        first.update(step == "+")
        second.update(step == "+")
        assert first == second
