"""Clocks that scripts start and stop."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import UsageError
from shardwise.deepspeed.calls import logs
from shardwise.deepspeed.training.timers import SynchronizedWallClockTimer, WallClock, milliseconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, which the test sets."""
    clock = SimpleNamespace(at=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.at)
    return clock


def ran(clock: WallClock, now: SimpleNamespace, seconds: float, **how: Any) -> None:
    clock.start()
    assert clock.started
    now.at += seconds
    clock.stop(**how)
    assert not clock.started


def test_times_are_summed_and_averaged_in_milliseconds(now: SimpleNamespace) -> None:
    clock = WallClock("step")
    assert clock.mean() == 0
    for seconds in (1.0, 3.0):
        ran(clock, now, seconds)
    ran(clock, now, 9.0, record=False)
    assert clock.mean() == 2000 and clock.elapsed(reset=False) == 4000
    assert clock.elapsed() == 4000 and clock.elapsed() == 0


def test_a_clock_that_runs_and_one_that_does_not() -> None:
    clock = WallClock("step")
    with pytest.raises(UsageError, match="'step': it does not run"):
        clock.stop()
    clock.start()
    with pytest.raises(UsageError, match="'step': it runs already"):
        clock.start()
    clock.reset()
    clock.start()


def test_clocks_by_name(now: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=logs.logger.name)
    timers = SynchronizedWallClockTimer()
    ran(timers("fwd"), now, 0.5)
    ran(timers("fwd"), now, 1.5)
    assert timers.has_timer("fwd") and not timers.has_timer("bwd")
    assert timers.get_mean(["fwd", "bwd"], normalizer=2, reset=False) == {"fwd": 500}
    timers.log(["fwd", "bwd"], normalizer=2, reset=False)
    assert caplog.messages == ["[rank 0] time (ms) | fwd: 1000.00"]
    assert timers.get_mean(["fwd"]) == {"fwd": 1000} and timers.get_mean(["fwd"]) == {"fwd": 0}


def test_the_parts_of_a_step() -> None:
    trace: Any = SimpleNamespace(
        seconds=lambda: SimpleNamespace(forward_s=0.001, backward_s=0.002, update_s=0.004)
    )
    assert milliseconds(trace) == {"fwd": 1, "bwd": 2, "step": 4}
