"""Flights: what a device exchanges while the host goes on.

A wait for a collective of device tensors makes the current stream wait and returns. Who then waits too long? The
watch's thread (watch.py) asks each second:

    started    ask the work of torch                    it holds its tensors, as its caller does until ``wait``
    waited for ask an event behind it in the stream     holds nothing, so no temporary lives longer than its step
    over       forgotten

A device takes its work in order, and the host may be a whole step ahead of it: a flight's time begins when it started
or when the flight before it ended, whichever is later.

Cost: an event per collective; none of this on the CPU.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.memory.streams import passed
from shardwise.plan.errors import CommError, DeadlineError


class Communicator:
    """A group of torch's with tensors on a device, as it is watched; None for torch's default group."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self.newest: Any = None
        """Its last work, which knows whether the communicator has failed."""

    def error(self) -> Exception | None:
        """What has failed; None where nothing has, as far as is known."""
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
        """End what runs on it, from any thread: a host that waits for the device goes on."""
        self.newest = None
        group = self._group or dist.group.WORLD
        assert group is not None, "works run on a group"
        group.abort()


class Flight:
    """A collective on a device, from its start until the device is past it.

    what      (rank, operation, tensor, step)
    limit_s   how long it may take
    patience  after how long the others are asked, whether what they say may end the job, how long one may stand still
    explain   our error from torch's
    members   the job's ranks that take part
    call      the collective call of the engine's in which it started
    """

    __slots__ = (
        "_is_over",
        "call",
        "communicator",
        "explain",
        "limit_s",
        "members",
        "patience",
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
    ):
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
        """Whether the device is past it. Errors: what torch raises of a device that failed."""
        return self._is_over()

    def waited(self, device: torch.device) -> None:
        """The current stream waits for it now: its tensors need not be held any longer."""
        self._is_over = passed(device) or self._is_over


class Flights:
    """Those of one rank. Threads that start some only append; the watch's thread takes out."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self._progress_s = 0.0
        """When one was last seen to be over."""

    def add(self, flight: Flight) -> None:
        """Follow it."""
        self._flights.append(flight)

    def oldest(self) -> tuple[Flight, float] | None:
        """The one that started first, and when its time began."""
        flight = min(self._flights.copy(), key=lambda each: each.since_s, default=None)
        return None if flight is None else (flight, max(flight.since_s, self._progress_s))

    def look(self) -> CommError | None:
        """Forget those that are over. Returns what has failed, or is late, as an error."""
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

    def end(self) -> None:
        """End all of them, without waiting; their results are undefined."""
        communicators = {flight.communicator for flight in self._flights.copy()}
        self._flights.clear()
        for each in communicators:
            try:
                each.abort()
            except RuntimeError:
                continue  # a backend that cannot; its wait ends with the process
