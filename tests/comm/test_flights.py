"""Collectives of a device that the host does not wait for, on works that end when the test says so.

Tensors on "meta" are no host tensors, and have no events: a flight keeps asking its work.
"""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import CommError, DeadlineError
from shardwise.comm import flights
from shardwise.comm.collectives import Group
from shardwise.comm.rendezvous.handshake import RankIdentity
from shardwise.comm.rendezvous.store import SealedStore
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.transports import TorchTransport
from shardwise.comm.watching import watch
from shardwise.comm.watching.watch import Watchdog

META = torch.device("meta")


class Work:
    """As NCCL's: a wait without a deadline returns at once, one with a deadline raises what ended the work."""

    def __init__(self) -> None:
        self.done = False
        self.error = ""
        self.deadlines: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.deadlines.append(timeout)
        if timeout is not None and self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.done or bool(self.error)


class Communicator:
    """What torch.distributed calls of a group."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.aborts = 0

    def allreduce(self, tensors: Any, options: Any) -> Work:
        self.works.append(Work())
        return self.works[-1]

    def abort(self) -> None:
        self.aborts += 1


class Rank:
    """One of two ranks, on a device, with a watch that ticks ten times as fast."""

    def __init__(self, timeout_s: float) -> None:
        self.watch = Watchdog(
            0, [RankIdentity("here", 1, "meta:0")] * 2, SealedStore(dist.HashStore(), b"key"), "watch"
        )
        self.watch.start()
        self.clock = StepClock(timeout_s, watch=self.watch)
        self.clock.steps_done = 1
        self.clock.step = 12
        self.made = Communicator()
        self.group = self.another(self.made)

    def another(self, made: Communicator) -> Group:
        transport = TorchTransport(made, (0, 1), 0, composed=False, device=META)  # type: ignore[arg-type]
        return Group("dp", (0, 1), 0, transport, self.clock, Traffic(), names=(3, 7))

    def start(self, what: str = "Unit blocks.3") -> Any:
        return self.group.all_reduce(torch.ones(3, device=META), what)


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Rank]]:
    monkeypatch.setattr(watch, "_TICK_S", 0.02)
    made: list[Rank] = []

    def make(timeout_s: float) -> Rank:
        made.append(Rank(timeout_s))
        return made[-1]

    yield make
    for rank in made:
        rank.watch.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-watch")]


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_host_does_not_wait_and_what_ended_is_forgotten(rank_of: Callable[[float], Rank]) -> None:
    rank = rank_of(30.0)
    pending = [rank.start(), rank.start()]
    assert [work.deadlines for work in rank.made.works] == [[], []]
    for each in pending:
        each.wait()
    assert [work.deadlines for work in rank.made.works] == [[None], [None]]
    assert rank.watch.flights.oldest() is not None
    for work in rank.made.works:
        work.done = True
    until(lambda: rank.watch.flights.oldest() is None)
    rank.start()
    assert rank.made.aborts == 0


def test_a_late_rank_ends_the_group_with_rank_and_unit(rank_of: Callable[[float], Rank]) -> None:
    """Of several in flight the first names the place; another group of this rank is ended too, for it waits as well."""
    rank = rank_of(0.2)
    other = Communicator()
    rank.start().wait()
    rank.start("Unit blocks.4")
    rank.another(other).all_reduce(torch.ones(3, device=META), "a control tensor")
    rank.clock.step = 13
    until(lambda: rank.made.aborts and other.aborts)
    for call in (rank.start, rank.start, rank.clock.check_intact):
        with pytest.raises(
            DeadlineError, match=r"rank 3: all_reduce of Unit blocks\.3 in step 12 over 2 ranks"
        ) as told:
            call()
        assert "did not arrive within 0 s" in str(told.value) and "comm.timeout_s" in str(told.value)
    assert len(rank.made.works) == 2, "a later call is refused before it starts"


def test_a_device_that_advances_is_not_late(rank_of: Callable[[float], Rank]) -> None:
    """The host may be far ahead: the time of a flight begins when the one before it has ended."""
    rank = rank_of(0.4)
    for _ in range(5):
        rank.start().wait()
    for work in rank.made.works:
        time.sleep(0.15)
        work.done = True
    until(lambda: rank.watch.flights.oldest() is None)
    rank.clock.check_intact()


REMOTE = (
    "NCCL error in: ProcessGroupNCCL.cpp:123, remote process exited or there was a network error, NCCL version 2.27\n"
    "ncclRemoteError: A call failed possibly due to a network error. socket timeout\n"
    "WorkNCCL(SeqNum=4, OpType=ALLREDUCE, Timeout(ms)=600000)"
)


def test_an_error_of_the_communicator_is_no_late_rank(rank_of: Callable[[float], Rank]) -> None:
    rank = rank_of(30.0)
    pending = rank.start()
    rank.made.works[0].error = REMOTE
    until(lambda: rank.made.aborts)
    with pytest.raises(CommError, match=r"rank 3: all_reduce of Unit blocks\.3 in step 12") as told:
        pending.wait()
    assert not isinstance(told.value, DeadlineError) and "another rank ended, or the network" in str(
        told.value
    )


def test_what_the_other_ranks_found_ends_a_flight_too(rank_of: Callable[[float], Rank]) -> None:
    rank = rank_of(30.0)
    rank.start().wait()
    rank.watch._questions.leave_verdict("rank 7 does not answer: its process 5 is stopped")
    until(lambda: rank.made.aborts)
    with pytest.raises(DeadlineError, match="rank 7 does not answer"):
        rank.start()


@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_a_slice_that_ends_just_before_its_work_is_no_deadline(error: str) -> None:
    """On a busy host gloo's collective ended between the end of a slice and the question whether it had."""

    class Sliced(Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            if not self.done:
                self.done = True
                raise RuntimeError("Operation timed out!")
            return super().wait(timeout)

    work = Sliced()
    work.error = error
    transport = TorchTransport(None, (0, 1), 0, composed=True)
    if error:
        with pytest.raises(RuntimeError, match=error):
            transport._wait([work], 30.0, torch.ones(1))
    else:
        transport._wait([work], 30.0, torch.ones(1))


class Stuck(Communicator):
    """Its abort ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def abort(self) -> None:
        super().abort()
        self.may_end.wait(10)


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_whose_abort_hangs_says_why_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ends: bool
) -> None:
    """The caller goes on at once in any case."""
    left: list[int] = []
    monkeypatch.setattr(flights, "_ABORT_S", 5.0 if ends else 0.05)
    monkeypatch.setattr(flights.os, "_exit", left.append)
    made, all_flights = Stuck(), flights.InFlightCollectives()
    communicator = flights.Communicator(made)  # type: ignore[arg-type]
    all_flights.add(
        flights.InFlightCollective(("what",), 1.0, (1.0, True, 1.0), CommError, [Work()], communicator)  # type: ignore[arg-type]
    )
    all_flights.end("rank 3 hangs")
    assert all_flights.oldest() is None
    until(lambda: made.aborts)
    if ends:
        made.may_end.set()
    guards = [each for each in threading.enumerate() if each.name == "shardwise-abort-guard"]
    for guard in guards:
        guard.join(5)
        assert not guard.is_alive()
    made.may_end.set()
    assert left == ([] if ends else [1])
    assert ("rank 3 hangs" in capsys.readouterr().err) is not ends


def test_an_abort_that_fails_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(flights, "_ABORT_S", 0.2)
    monkeypatch.setattr(flights.os, "_exit", left.append)
    ended = threading.Event()
    with pytest.raises(AttributeError):
        flights._abort([object()], ended)  # type: ignore[list-item]
    flights._guard(ended, "why")
    assert not left
