"""A crew: all ranks of a job as threads of one process, on the pretended device or on the CPU; their numbers are real.

    collective   every rank of the group brings a copy, and takes what it needs of all
    message      a queue for each ordered pair of ranks
    texts        a dict that all share

A collective and a message run on a stream of their own: what they write is late, until who asked for them waits.

One rank runs at a time and hands the baton on where it waits for others. Threads share the generators of random
numbers, so a rank that takes the baton finds the states that it left: what one of them seeds or draws, no other sees. A
backward pass runs in its rank's own thread, for on a device autograd has one thread for all.
"""

import queue
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm.board import MessageBoard
from shardwise.comm.collectives import Group
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.peers import PointToPoint
from shardwise.comm.policy import CommPolicy
from shardwise.comm.rendezvous.jobs import JobThread
from shardwise.comm.world import World
from tests.accelerator.pretend import Bench, blocks_of, is_on_device, on_host
from tests.accelerator.timelines import WHERE, run_all

_PATIENCE_S = 60.0


class Crew:
    """What the threads of one job share."""

    def __init__(self, size: int, device: torch.device):
        self.size = size
        self.device = device
        self.meetings: dict[Any, _Meeting] = {}
        self.queues: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self.texts: dict[tuple[str, int], str] = {}
        self.said = threading.Condition()
        self.is_broken = False
        self._baton = threading.Lock()
        self._holds = threading.local()
        self._states: dict[int, _States] = {}
        """States of the generators, by rank; at first those of the thread that runs the crew."""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(world, *args)`` on each rank; results by rank. The first exception in time is raised."""
        self._states = dict.fromkeys(range(self.size), _states())
        results: list[Any] = [None] * self.size
        failures: list[BaseException] = []

        def rank_main(rank: int) -> None:
            WHERE.rank = rank
            world = World(rank, self.size, rank, self.size, "crew", self.device, board=_CrewBoard(self, rank))
            world.links = _CrewLinks(self, rank)  # type: ignore[assignment]
            world._threads["keys"] = _CrewThread(self, rank)
            try:
                with self.holding(), torch.autograd.set_multithreading_enabled(False):
                    results[rank] = function(world, *args)
            except BaseException as error:
                failures.append(error)
                self._end()

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    def meeting(self, ranks: tuple[int, ...], lane: str) -> "_Meeting":
        return self.meetings.setdefault((ranks, lane), _Meeting(self, len(ranks)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Others may run meanwhile."""
        held = getattr(self._holds, "flag", False)
        if held:
            self._states[WHERE.rank] = _states()
            self._baton.release()
        try:
            yield
        finally:
            if held:
                self._baton.acquire()
                _put(self._states[WHERE.rank])

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Run as one of the threads of a rank."""
        with self._baton:
            self._holds.flag = True
            _put(self._states[WHERE.rank])
            try:
                yield
            finally:
                self._states[WHERE.rank] = _states()
                self._holds.flag = False

    def _end(self) -> None:
        """Nobody waits for a rank that failed."""
        self.is_broken = True
        for meeting in self.meetings.values():
            meeting.barrier.abort()
        for each in self.queues.values():
            each.put(None)
        with self.said:
            self.said.notify_all()


_States = tuple[Tensor, Any, Any]


def _states() -> _States:
    """The states of torch's, Python's and numpy's generators."""
    with _disable_current_modes():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _put(states: _States) -> None:
    with _disable_current_modes():
        torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


class _Meeting:
    """The members of one group."""

    def __init__(self, crew: Crew, size: int):
        self._crew = crew
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self._brought: list[Any] = [None] * size

    def swap(self, index: int, what: str, mine: Any) -> list[Any]:
        """Everybody's ``mine``, by place in the group; all must be at the same call."""
        self._brought[index] = what, mine
        with self._crew.waiting():
            self.barrier.wait()
        found = list(self._brought)
        with self._crew.waiting():
            self.barrier.wait()
        assert len({each[0] for each in found}) == 1, (
            f"ranks are at different calls: {[each[0] for each in found]}"
        )
        return [each[1] for each in found]


class CrewTransport:
    """Collectives of the group ``ranks``, in which this rank has the place ``index``."""

    def __init__(self, meeting: _Meeting, size: int, index: int):
        self._meeting = meeting
        self._size = size
        self._index = index

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        found = self._swap("all_gather", what, shard, output)
        return self._deliver("all_gather", (shard,), output, torch.cat([each.view(-1) for each in found]))

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        found = self._swap("reduce_scatter", what, full, shard_out)
        total = _sum([each.view(self._size, -1)[self._index] for each in found], shard_out.dtype)
        return self._deliver("reduce_scatter", (full,), shard_out, total, accumulate)

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        found = self._swap("all_reduce", what, tensor)
        return self._deliver("all_reduce", (tensor,), tensor, _sum(found, tensor.dtype))

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        found = self._swap("broadcast", what, tensor)
        return self._deliver("broadcast", (tensor,), tensor, found[root])

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        found = self._swap("all_to_all", what, sent, output)
        parts = [each.split(list(row))[self._index] for each, row in zip(found, counts, strict=True)]
        return self._deliver("all_to_all", (sent,), output, torch.cat(parts))

    def barrier(self, timeout_s: float, what: str) -> PendingCollective:
        self._meeting.swap(self._index, f"barrier {what}", None)
        return DONE

    def _swap(self, name: str, what: str, sent: Tensor, output: Tensor | None = None) -> list[Tensor]:
        """What all members bring, on the host; counted as one operation, on tensors of the host as a sync."""
        bench = Bench.current
        if bench is not None:
            sides = {is_on_device(tensor) for tensor in (sent, output) if tensor is not None}
            if len(sides) == 2:
                bench.misplaced.append(f"{name}: tensors on both sides")
            if True in sides:
                bench.operation(name)
            else:
                bench.sync(f"{name} of the host")
            run_all(bench.line.mark())
        return self._meeting.swap(self._index, f"{name} {what}", _bytes_of(sent).clone())

    def _deliver(
        self, name: str, sent: Sequence[Tensor], output: Tensor, result: Tensor, adds: bool = False
    ) -> PendingCollective:
        return deliver((id(self._meeting), "communicator"), name, sent, output, result, adds)


def _bytes_of(tensor: Tensor) -> Tensor:
    return on_host(tensor.detach()) if is_on_device(tensor) else tensor.detach()


def deliver(
    key: Any, name: str, sent: Sequence[Tensor], output: Tensor, result: Tensor, adds: bool = False
) -> PendingCollective:
    """Write what has come for ``output``: late, on the stream ``key``, if it lies on the device."""
    target = _bytes_of(output).view(-1)

    def write() -> None:
        if adds:
            target.add_(result.view(-1))
        else:
            target.copy_(result.view(-1))

    bench = Bench.current
    if bench is None or not is_on_device(output):
        with torch.no_grad():
            write()
        return DONE
    rank, line = bench.rank, bench.rank.line(key[0], key[1])
    line.learn(bench.line.mark())
    known = line.launch()
    uses = bench.uses(sent, [output])
    rank.use(line, uses, name, known)
    rank.copy(line, known, write, None if adds else target, blocks_of(uses, len(sent) + 1))
    known, held = dict(known), (*sent, output)
    torch._C._autograd._unsafe_set_version_counter((output,), (output._version + 1,))

    def finish() -> None:
        nonlocal held
        bench.line.learn(known)
        held = ()  # torch keeps an operation's tensors until it is waited for

    return PendingCollective(finish)


def _sum(addends: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """In rank order, 16-bit floats in fp32."""
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = addends[0].to(wide, copy=True)
    for each in addends[1:]:
        total += each
    return total.to(dtype)


class _CrewBoard(MessageBoard):
    def __init__(self, crew: Crew, rank: int, word: str = ""):
        super().__init__(rank, word=word)
        self._crew = crew

    def part(self, rank: int, name: str, members: Sequence[int]) -> MessageBoard:
        return _CrewBoard(self._crew, rank, f"{self.word}/{name}")

    def post(self, key: str, index: int, text: str) -> None:
        with self._crew.said:
            self._crew.texts[self._name(key, index), 0] = text
            self._crew.said.notify_all()

    def collect(
        self, key: str, size: int, timeout_s: float, what: str = "", ranks: Sequence[int] | None = None
    ) -> list[str]:
        names = [(self._name(key, index), 0) for index in range(size)]
        crew = self._crew
        with crew.waiting(), crew.said:
            come = crew.said.wait_for(
                lambda: crew.is_broken or all(name in crew.texts for name in names), _PATIENCE_S
            )
            assert come and not crew.is_broken, f"{key}: a rank did not come"
            return [crew.texts[name] for name in names]

    def forget(self, key: str, size: int) -> None:
        pass


class _CrewThread(JobThread):
    """The thread of keys of one rank: it holds the baton while it works, and who waits for it does not."""

    def __init__(self, crew: Crew, rank: int):
        super().__init__(f"crew-keys-{rank}")
        self._crew = crew
        self._rank = rank

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        def held() -> Any:
            WHERE.rank = self._rank
            with self._crew.holding():
                return job()

        future = super().submit(held)
        result = future.result

        def waited(timeout: float | None = None) -> Any:
            with self._crew.waiting():
                return result(timeout)

        future.result = waited  # type: ignore[method-assign]
        return future


class _CrewWire:
    """Messages between two ranks."""

    def __init__(self, crew: Crew, rank: int, other: int):
        self._crew = crew
        self._out = crew.queues[rank, other]
        self._in = crew.queues[other, rank]

    def send(self, header: bytes, tensors: Sequence[Tensor], call: Any) -> PendingCollective:
        bench = Bench.current
        if bench is not None:
            for _ in tensors:
                bench.operation("send")
            run_all(bench.line.mark())
        self._out.put((header, [_bytes_of(each).clone() for each in tensors]))
        return DONE

    def receive(self, call: Any, allocate: Any, meanwhile: Any) -> PendingCollective:
        with self._crew.waiting():
            found = self._in.get(timeout=_PATIENCE_S)
        assert found is not None, "another rank failed"
        header, sent = found
        tensors: list[Tensor] = list(allocate(header))
        pending = []
        for target, given in zip(tensors, sent, strict=True):
            if Bench.current is not None:
                Bench.current.operation("receive")
            pending.append(deliver((id(self._in), "messages"), "receive", (), target, given))
        return PendingCollective(lambda: [each.wait() for each in pending] and None)

    def advance(self) -> bool:
        return False

    def close(self) -> None:
        pass


class _CrewLinks:
    """What ``WorldLinks`` makes of real ranks."""

    ring_bytes = 0

    def __init__(self, crew: Crew, rank: int):
        self._crew = crew
        self._rank = rank
        self.transports: dict[Any, CrewTransport] = {}

    def transport(
        self,
        ranks: tuple[int, ...],
        kin: Sequence[tuple[int, ...]],
        policy: CommPolicy,
        lane: str,
        hosts: Sequence[int] = (),
    ) -> CrewTransport | None:
        if len(ranks) < 2 or self._rank not in ranks:
            return None
        key = (ranks, lane)
        if key not in self.transports:
            meeting = self._crew.meeting(ranks, lane)
            self.transports[key] = CrewTransport(meeting, len(ranks), ranks.index(self._rank))
        return self.transports[key]

    def peers(self, group: Group, policy: CommPolicy, kin: Sequence[tuple[int, ...]]) -> PointToPoint:
        wires: dict[int, Any] = {
            index: _CrewWire(self._crew, self._rank, rank)
            for index, rank in enumerate(group.ranks)
            if rank != self._rank
        }
        return PointToPoint(group, wires, self._crew.device)

    def barrier(self) -> None:
        everyone = tuple(range(self._crew.size))
        self._crew.meeting(everyone, "barrier").swap(self._rank, "barrier", None)

    def release(self) -> None:
        self.transports.clear()
