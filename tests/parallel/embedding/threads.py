"""Ranks as threads of this process: every layout in a second, for what needs no real transport."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic

_PATIENCE_S = 30.0


class Meeting:
    """What the threads of one group share."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.parts: list[Any] = [None] * size

    def swap(self, index: int, what: str, *mine: Any) -> list[Any]:
        """Everybody's ``mine``, by rank; all must be at the same call."""
        self.parts[index] = (what, *mine)
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()
        assert len({part[0] for part in found}) == 1, [part[0] for part in found]
        return [part[1:] for part in found]


class ThreadTransport:
    """The collectives that tables use."""

    def __init__(self, meeting: Meeting, index: int):
        self.meeting = meeting
        self.index = index

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        found = self.meeting.swap(self.index, f"all_gather {what}", shard.clone())
        output.copy_(torch.cat([part for (part,) in found]))
        return DONE

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        found = self.meeting.swap(self.index, f"all_reduce {what}", tensor.clone())
        total = found[0][0].clone()
        for (part,) in found[1:]:
            total += part
        tensor.copy_(total)
        return DONE

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        found = self.meeting.swap(self.index, f"all_to_all {what}", sent.clone(), [list(r) for r in counts])
        assert all(each == found[0][1] for _, each in found), "ranks differ in their counts"
        parts = [part.split(counts[rank])[self.index] for rank, (part, _) in enumerate(found)]
        output.copy_(torch.cat(parts))
        return DONE

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> PendingCollective:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        found = self.meeting.swap(self.index, f"broadcast {what}", tensor.clone())
        tensor.copy_(found[root][0])
        return DONE

    def barrier(self, timeout_s: float, what: str) -> PendingCollective:
        self.meeting.swap(self.index, f"barrier {what}")
        return DONE


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(group, *args)`` on each of ``size`` threads; results by rank. The first exception is raised."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(index: int) -> None:
        clock, traffic = StepClock(_PATIENCE_S), Traffic()
        transport = ThreadTransport(meeting, index) if size > 1 else None
        group = Group("tables", tuple(range(size)), index, transport, clock, traffic)
        try:
            results[index] = function(group, *args)
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    if size == 1:
        run(0)
    else:
        threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    first = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if failures:
        raise (first or failures)[0]
    return results
