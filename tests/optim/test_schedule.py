"""Learning rates by optimizer step."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shardwise.optim.schedule import factor
from shardwise.optim.schedule_policy import SchedulePolicy


def curve(policy: SchedulePolicy, steps: int) -> list[float]:
    return [factor(policy, {}, step) for step in range(steps)]


def test_constant() -> None:
    assert curve(SchedulePolicy(), 3) == [1, 1, 1]
    assert curve(SchedulePolicy(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear() -> None:
    policy = SchedulePolicy(type="linear", total_steps=4, min_ratio=0.2)
    assert [round(value, 12) for value in curve(policy, 6)] == [1, 0.8, 0.6, 0.4, 0.2, 0.2]


def test_cosine() -> None:
    policy = SchedulePolicy(type="cosine", warmup_steps=2, total_steps=10)
    assert curve(policy, 3) == [0.5, 1, 1]
    assert math.isclose(factor(policy, {}, 6), 0.5)
    assert math.isclose(factor(policy, {}, 10), 0, abs_tol=1e-15)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_every_curve_rises_then_falls_between_its_bounds(
    kind: str, warmup: int, more: int, bottom: float
) -> None:
    policy = SchedulePolicy.model_validate(
        {"type": kind, "warmup_steps": warmup, "total_steps": warmup + more, "min_ratio": bottom}
    )
    rates = curve(policy, warmup + more + 5)
    assert all(0 < rate <= 1 + 1e-12 for rate in rates[:warmup])
    assert rates[:warmup] == sorted(rates[:warmup])
    falling = rates[warmup:]
    assert all(a >= b - 1e-12 for a, b in zip(falling, falling[1:], strict=False))
    assert all(bottom - 1e-12 <= rate <= 1 + 1e-12 for rate in falling)
    if kind != "constant":
        assert math.isclose(falling[-1], bottom, abs_tol=1e-12)
