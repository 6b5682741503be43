"""The clock of a device: times of events from an anchor."""

import time
from typing import Any

import pytest
import torch

from shardwise.memory.device_clock import DeviceClock, clock_of
from shardwise.plan.trace import HostClock


class Event:
    """An event of a device, which passes it when the host waits."""

    now_ms = 0.0

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        if device.type == "xpu":
            raise RuntimeError("no events with times")
        self.at_ms, self.is_over = 0.0, False

    def record(self) -> None:
        Event.now_ms += 1.0
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, other: "Event") -> float:
        assert self.is_over and other.is_over
        return other.at_ms - self.at_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(time, "perf_counter", lambda: 50.0)
    return clock_of(torch.device("cuda"))


def test_times_follow_from_the_anchor(clock: DeviceClock) -> None:
    first, anchor, last = (clock.mark() for _ in range(3))
    anchor.synchronize()  # type: ignore[attr-defined]
    clock.anchor(anchor)
    assert clock.seconds([first, anchor, last]) == pytest.approx([49.999, 50.0, 50.001])
    assert clock.runs_behind and clock.seconds([]) == []


def test_where_nothing_was_read_a_mark_of_now_is_the_anchor(clock: DeviceClock) -> None:
    assert clock.seconds([]) == []
    marks = [clock.mark(), clock.mark()]
    assert clock.seconds(marks) == pytest.approx([49.998, 49.999])


@pytest.mark.usefixtures("clock")
def test_devices_without_such_events_have_the_clock_of_the_host() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert isinstance(clock_of(torch.device("xpu")), HostClock)
    assert isinstance(clock_of(torch.device("cuda")), DeviceClock)
