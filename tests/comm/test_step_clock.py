"""The deadlines of a step's waits."""

import pytest

from shardwise.base.errors import UsageError
from shardwise.comm.step_clock import StepClock


def test_the_first_step_has_ten_times_the_deadline() -> None:
    clock = StepClock(30.0)
    assert clock.timeout_s == 300.0
    clock.steps_done = 1
    assert clock.timeout_s == 30.0


def test_auto_waits_some_times_the_median_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("shardwise.comm.step_clock.time.monotonic", lambda: now)
    clock = StepClock("auto")
    shortest = clock.timeout_s / 10  # the first step has ten times as long
    for seconds in (0.0, 1000.0, 1000.0, 9000.0):
        now += seconds
        clock.step_ended()
    assert clock.timeout_s == max(shortest, 10 * 1000.0)


def test_a_collective_of_a_rank_that_works_alone_is_an_error() -> None:
    clock = StepClock(30.0)
    clock.check_together("all_reduce", "Unit a")
    with clock.alone(), pytest.raises(UsageError, match="all_reduce of Unit a takes all ranks"):
        clock.check_together("all_reduce", "Unit a")
    clock.check_together("all_reduce", "Unit a")
