"""The waits of a step: which step counts them, on a host and on a device that runs behind it."""

from collections.abc import Sequence
from typing import Any

from shardwise.plan.trace import HostClock, Trace
from shardwise.plan.waits import StepWaits, WaitSpan


class _Clock:
    """Each mark is a second after the mark before."""

    def __init__(self, runs_behind: bool) -> None:
        self.runs_behind = runs_behind
        self.count = 0

    def mark(self) -> int:
        self.count += 1
        return self.count

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return [float(mark) for mark in marks]

    def anchor(self, mark: Any) -> None:
        pass


def wait(waits: StepWaits, clock: _Clock, axis: str, seconds: int = 1) -> None:
    mark = clock.mark()
    clock.count += seconds - 1
    waits.add(axis, mark)


def test_seconds_are_summed_by_axis() -> None:
    clock = _Clock(runs_behind=False)
    waits = StepWaits(clock)
    assert waits.seconds() == {}
    wait(waits, clock, "tp", 3)
    wait(waits, clock, "dp_shard", 5)
    wait(waits, clock, "tp", 4)
    assert waits.seconds() == {"tp": 7.0, "dp_shard": 5.0}
    assert list(waits.spans())[0] == WaitSpan("tp", 1.0, 4.0)


def test_on_a_host_a_step_counts_its_own_waits() -> None:
    clock = _Clock(runs_behind=False)
    waits = StepWaits(clock)
    wait(waits, clock, "dp")
    waits.settle()
    wait(waits, clock, "dp", 2)
    assert waits.seconds() == {"dp": 3.0}
    assert waits.following().seconds() == {}


def test_on_a_device_the_waits_behind_the_norm_count_in_the_next_step() -> None:
    clock = _Clock(runs_behind=True)
    waits = StepWaits(clock)
    wait(waits, clock, "tp")
    waits.settle()
    wait(waits, clock, "dp_shard", 2)
    following = waits.following()
    wait(following, clock, "tp", 4)
    assert following.following().seconds() == {}, "a list beside the step takes none of its waits"
    following.settle()
    assert waits.seconds() == {"tp": 1.0}
    assert following.seconds() == {"dp_shard": 2.0, "tp": 4.0}, "each wait counts in one step"
    assert following.following().seconds() == {}


def test_a_trace_hands_its_waits_on() -> None:
    clock = _Clock(runs_behind=True)
    first = Trace(clock=clock)
    first.waits.settle()
    wait(first.waits, clock, "dp")
    second = first.begin()
    second.waits.settle()
    assert first.waits.seconds() == {} and second.waits.seconds() == {"dp": 1.0}
    assert Trace().waits is not Trace().waits and isinstance(Trace().clock, HostClock)
