"""Flights: collectives that a device runs while the host goes on.

A wait for a collective of device tensors makes the current stream wait and returns, so the host cannot measure it. The
watch's thread (watching/watch.py) checks each second:

    started    check torch's work object                it holds its tensors, as its caller does until ``wait``
    waited for check an event behind it in the stream   holds nothing, so no temporary lives longer than its step
    over       forgotten

A device runs its work in order, and the host may be a whole step ahead of it: a flight's time begins when it started
or when the flight before it ended, whichever is later.

[Note: an abort that hangs]
If a collective fails or is late, all communicators are aborted, so that a host that waits for the device goes on and
raises the error. NCCL's abort waits for its kernels and for its network threads, and may itself hang. A thread of its
own therefore aborts them. If it has not ended after ``_ABORT_S`` seconds, the process prints the error and ends: a rank
that neither goes on nor ends would keep its device and, in a job, its whole node.

Cost: an event per collective; none of this on the CPU.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.base.errors import CommError, DeadlineError
from shardwise.comm.watching.recorder import NOWHERE, CallPlace
from shardwise.memory.streams import passed

_ABORT_S = 30.0
"""Seconds that aborting all communicators may take. See [Note: an abort that hangs]."""


class Communicator:
    """A group of torch with tensors on a device, for the watch; None for torch's default group."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self.newest: Any = None
        """Last work of the group, which records whether the communicator has failed."""

    def error(self) -> Exception | None:
        """Return the error of the communicator; None if none is known."""
        work = self.newest
        try:
            if work is not None and work.is_completed():
                work.wait(timedelta(milliseconds=1))  # returns at once, or raises what ended it
                if self.newest is work:
                    self.newest = None
        except RuntimeError as error:
            return error
        return None

    def abort(self) -> None:
        """End all work of the communicator, from any thread: a host that waits for the device goes on."""
        self.newest = None
        group = self._group or dist.group.WORLD
        assert group is not None, "works run on a group"
        group.abort()


class InFlightCollective:
    """A collective on a device, from its start until the device has passed it.

    Args:
        what: (rank, operation, tensor, step).
        limit_s: Seconds that the collective may take.
        patience: Seconds after which the others are asked, whether the answers may end the job, seconds that a rank may
            stand still.
        explain: Function that turns torch's error into ours.
        works: Work objects of torch.
        communicator: Communicator of the works.
        members: Ranks of the job that take part.
        call: Collective call of the engine in which the flight started.
        place: Group and number of the collective in the records.
    """

    __slots__ = (
        "_is_over",
        "call",
        "communicator",
        "explain",
        "limit_s",
        "members",
        "patience",
        "place",
        "since_s",
        "what",
    )

    def __init__(
        self,
        what: tuple[Any, ...],
        limit_s: float,
        patience: tuple[float, bool, float],
        explain: Callable[[Exception], CommError],
        works: Sequence[Any],
        communicator: Communicator,
        members: tuple[int, ...] = (),
        call: str = "",
        place: CallPlace = NOWHERE,
    ):
        self.place = place
        self.what = what
        self.members = members
        self.call = call
        self.limit_s = limit_s
        self.patience = patience
        self.explain = explain
        self.communicator = communicator
        self.since_s = time.monotonic()
        self._is_over: Callable[[], bool] = lambda: all(work.is_completed() for work in works)
        communicator.newest = works[-1]

    def is_over(self) -> bool:
        """Return whether the device has passed the collective.

        Raises:
            RuntimeError: if the device failed.
        """
        return self._is_over()

    def waited(self, device: torch.device) -> None:
        """Record that the current stream waits for the collective, whose tensors need not be held any longer."""
        self._is_over = passed(device) or self._is_over


class InFlightCollectives:
    """Collectives in flight of one rank. Threads that start one only append; the watch's thread removes."""

    def __init__(self) -> None:
        self._flights: deque[InFlightCollective] = deque()
        self._progress_s = 0.0
        """Time at which a flight was last seen to be over."""

    def add(self, flight: InFlightCollective) -> None:
        """Add a flight to those that the watch follows."""
        self._flights.append(flight)

    def oldest(self) -> tuple[InFlightCollective, float] | None:
        """Return the flight that started first and the time at which its time began, or None."""
        flight = min(self._flights.copy(), key=lambda each: each.since_s, default=None)
        return None if flight is None else (flight, max(flight.since_s, self._progress_s))

    def look(self) -> CommError | None:
        """Remove the flights that are over, and return an error if one has failed or is late."""
        for flight in self._flights.copy():
            failed = flight.communicator.error()
            if failed is not None:
                return flight.explain(failed)
        for _ in range(len(self._flights)):
            flight = self._flights.popleft()
            try:
                over = flight.is_over()
            except RuntimeError as error:
                self._flights.append(flight)
                return flight.explain(error)
            if over:
                self._progress_s = time.monotonic()
            else:
                self._flights.append(flight)
        first = self.oldest()
        if first is not None and time.monotonic() - first[1] > first[0].limit_s:
            return first[0].explain(DeadlineError("the device has not come past it"))
        return None

    def end(self, why: str) -> None:
        """End all flights, without waiting; their results are undefined. See [Note: an abort that hangs].

        Args:
            why: The error, which the process prints if it has to end.
        """
        communicators = {flight.communicator for flight in self._flights.copy()}
        self._flights.clear()
        if not communicators:
            return
        ended = threading.Event()
        for name, job in (
            ("abort", lambda: _abort(communicators, ended)),
            ("abort-guard", lambda: _guard(ended, why)),
        ):
            threading.Thread(target=job, name=f"shardwise-{name}", daemon=True).start()


def _abort(communicators: Iterable[Communicator], ended: threading.Event) -> None:
    """Abort communicators one after another, then set ``ended``."""
    try:
        for each in communicators:
            with contextlib.suppress(RuntimeError):  # a backend without abort; its wait ends with the process
                each.abort()
    finally:
        ended.set()  # else the guard would end a process whose abort has failed and does not hang


def _guard(ended: threading.Event, why: str) -> None:
    """Print ``why`` and end the process if ``ended`` is not set in time."""
    if ended.wait(_ABORT_S):
        return
    sys.stderr.write(
        f"shardwise: {why}\nshardwise: the communicators could not be ended within {_ABORT_S:.0f} s, so this process "
        "ends now\n"
    )
    sys.stderr.flush()
    os._exit(1)


class PendingCollective:
    """A collective in flight; ``wait`` returns when its output may be used.

    On a device, the current stream waits and the host goes on: ``works`` run on ``communicator``.

    Args:
        finish: Function that waits for the other ranks.
        works: Work objects of torch.
        communicator: Communicator of the works.
        compute: Function that computes the output from what has come, such as a sum; it waits for nobody.
    """

    __slots__ = ("_finish", "communicator", "compute", "works")

    def __init__(
        self,
        finish: Callable[[], None] | None = None,
        works: Sequence[Any] = (),
        communicator: Communicator | None = None,
        compute: Callable[[], object] | None = None,
    ):
        self._finish = finish
        self.compute = compute
        self.works = works
        self.communicator = communicator

    def arrive(self) -> None:
        """Wait for the other ranks, without computing the output; a second call does nothing."""
        compute, self.compute = self.compute, None
        self.wait()
        self.compute = compute

    def wait(self) -> None:
        """Finish the collective; a second call does nothing."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self.works = ()
            finish()
        if self.compute is not None:
            compute, self.compute = self.compute, None
            compute()


DONE = PendingCollective()
