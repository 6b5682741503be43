"""The collectives on one mesh axis, over the fastest transport of its ranks.

The rest of Shardwise uses a ``Group``, which counts, names and times each call and turns a failure into an error that
contains rank, operation, Unit and step. A ``Transport`` moves the bytes:

    TorchTransport          NCCL, or gloo with the compositions below
    SharedMemoryTransport   CPU ranks of one host (comm/shared_memory.py)

A backend sums in the dtype that it sends. So a 16-bit gradient whose sum is kept in fp32 is sent by an all-to-all in 16
bits, followed by one local sum: the bytes that are counted are those that are sent.

On gloo the native reduce-scatter and all-gather are slower than compositions of its other calls
(benchmarks/collectives):
    reduce-scatter = one all-to-all, then local sums in rank order: 2 to 4 times faster, with the other transport's bits
    all-gather     = N broadcasts in flight together

Cost: N-1 of N parts of the tensor sent per rank for gather and reduce-scatter, twice that for an all-reduce.
Shapes: every tensor is flat; with N ranks a shard has 1/N of the elements of the full tensor.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.errors import CommError, DeadlineError, UsageError
from shardwise.comm.equality import are_equal, terms
from shardwise.comm.faults import cause_of, is_late
from shardwise.comm.flights import Communicator, InFlightCollective
from shardwise.comm.policy import FIRST_STEP_S, LONGEST_WAIT_S, PATIENCE_S
from shardwise.comm.trace import Operation, Purpose, Traffic
from shardwise.comm.wait_meter import WaitMeter
from shardwise.comm.watch import WaitLimits, Watchdog, advice
from shardwise.plan.exchange import GradientExchange, Widths

PIECE_BYTES = 16 << 20
"""Bytes of a piece of a reduction that gloo exchanges at once."""
_SLICE_S = 0.25
"""Interval in seconds at which a thread that waits inside torch checks whether it waits in vain."""
_STEPS = 32
"""Number of steps in the median."""
_LIMIT_STEPS, _PATIENCE_STEPS = 10, 5


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


class Transport(Protocol):
    """Moves bytes between the ranks of one group. ``what`` names the tensor in errors."""

    def all_gather(
        self, output: Tensor, shard: Tensor, timeout_s: float, what: str
    ) -> PendingCollective | None:
        """Gather the ranks' shards into ``output``.

        Args:
            output: Full tensor, of N times the elements of a shard.
            shard: This rank's part, which may lie in ``output`` already.
            timeout_s: Seconds to wait for the other ranks.
            what: Name of the tensor in errors.

        Returns:
            The collective in flight; None if nothing is to be waited for.
        """
        ...

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective | None:
        """Write this rank's part of the sum of ``full`` over the ranks into ``shard_out``.

        Args:
            shard_out: This rank's part of the sum.
            full: This rank's addend.
            timeout_s: Seconds to wait for the other ranks.
            what: Name of the tensor in errors.
            accumulate: Add to ``shard_out`` instead of overwriting it.

        Returns:
            The collective in flight; None if nothing is to be waited for.
        """
        ...

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective | None:
        """Sum ``tensor`` over the ranks in place."""
        ...

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective | None:
        """Copy ``tensor`` from the rank with index ``root``."""
        ...

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective | None:
        """Send parts of ``sent`` to each rank and receive into ``output``.

        Args:
            output: Elements from each rank, in rank order.
            sent: Elements for each rank, in rank order.
            counts: Number of elements, by sender and receiver.
            timeout_s: Seconds to wait for the other ranks.
            what: Name of the tensor in errors.

        Returns:
            The collective in flight; None if nothing is to be waited for.
        """
        ...

    def barrier(self, timeout_s: float, what: str) -> PendingCollective | None:
        """Wait until all ranks have arrived."""
        ...


class StepClock:
    """The step that the ranks are in, shared by all groups of an engine and read by errors and deadlines.

    Args:
        timeout_s: Value of ``comm.timeout_s``.
        delay_s: Longest random pause before a collective, for debugging.
        watch: Watch that records every wait; None: no watch.
        meet: Function as ``MessageBoard.meet``.
    """

    def __init__(
        self,
        timeout_s: float | str,
        delay_s: float = 0.0,
        watch: Watchdog | None = None,
        meet: Callable[[tuple[int, ...], str, float], None] | None = None,
    ):
        self.step = 0
        self.steps_done = 0
        self.watch = watch
        self.meter: WaitMeter | None = None
        """Meter of the waits of the computation; None if nobody measures them."""
        self._timeout_s = timeout_s
        self._delay_s = delay_s
        self._random = random.Random()
        self._ended_s = 0.0
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._median_s = 0.0
        self._patience_s = self._patience()
        self._is_alone = False
        self._meet = meet
        self.met: set[tuple[int, ...]] | None = None
        """Ranks that have met in the main thread's current call; None outside a call that begins with a meeting."""
        self._tell_patience()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Treat this rank as working alone inside the ``with`` block: a collective there is an error.

        A collective would wait forever for ranks that do not call it.
        """
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def check_together(self, operation: str, what: str) -> None:
        """Check that this rank is not working alone.

        Args:
            operation: Name of the operation, for the error.
            what: Name of the tensor, for the error.

        Raises:
            UsageError: inside ``alone``.
        """
        if self._is_alone:
            raise UsageError(f"{operation} of {what} takes all ranks, but this one works alone here")

    def step_ended(self) -> None:
        """Record the end of a step."""
        now = time.monotonic()
        if self.steps_done:
            self._step_s.append(now - self._ended_s)
            self._median_s = statistics.median(self._step_s)
        self._ended_s = now
        self.steps_done += 1
        self._patience_s = self._patience()
        self._tell_patience()

    @property
    def timeout_s(self) -> float:
        """Seconds after which a wait ends the job: long in the first step of this process, short later."""
        given = self._timeout_s
        base = max(LONGEST_WAIT_S, _LIMIT_STEPS * self._median_s) if isinstance(given, str) else given
        return base * (10 if self.steps_done == 0 else 1)

    @contextmanager
    def within(self, call: str, meets: bool = False) -> Iterator[None]:
        """Name the collective call ``call`` in errors and to the watch inside the ``with`` block.

        Args:
            call: Name of the call, which all ranks must make.
            meets: Let the ranks of each group first check that all have reached the call. Otherwise a collective of a
                call that one rank makes alone could be mistaken for a collective of training.
        """
        if self.watch is None:
            yield
            return
        is_outermost = not self.call
        if is_outermost and meets:
            self.met = set()
        try:
            with self.watch.within(call):
                yield
        finally:
            if is_outermost:
                self.met = None

    def meet(self, ranks: tuple[int, ...]) -> None:
        """Wait until all ``ranks`` of the job have reached the current call; once for each call.

        Does nothing outside a call that begins with a meeting.
        """
        if self.met is not None and self._meet is not None and ranks not in self.met and self.call:
            self.met.add(ranks)
            self._meet(ranks, self.call, self.timeout_s)

    @property
    def call(self) -> str:
        """Name of the collective call that the calling thread is in; "" outside such a call."""
        return "" if self.watch is None else self.watch.call

    @property
    def advice(self) -> str:
        """Sentence of ``advice`` on the call that the calling thread is in; "" outside such a call."""
        call = self.call
        return f" {advice(call)}" if call else ""

    def begin_wait(
        self,
        what: tuple[Any, ...],
        give_up: Callable[[], None] | None = None,
        members: tuple[int, ...] = (),
    ) -> None:
        """Record that the calling thread waits for other ranks, until ``end_wait``.

        Args:
            what: (rank, operation, tensor) of the wait.
            give_up: Function that wakes a thread that waits inside torch.
            members: Ranks of the job that take part.
        """
        if self.watch is not None:
            is_auto = isinstance(self._timeout_s, str)
            patience_s, standstill_s = self._patience_s
            self.watch.begin((*what, self.step), patience_s, is_auto, standstill_s, give_up, members)

    def end_wait(self) -> None:
        """Record that the calling thread waits no longer."""
        if self.watch is not None:
            self.watch.end()

    def mark_wait(self) -> Any:
        """Return a mark of ``meter`` in front of a wait; None if nobody measures the wait."""
        if (
            self.meter is None or self.met is not None
        ):  # a call that begins with a meeting is no part of a step
            return None
        return self.meter.begin()

    def _patience(self) -> tuple[float, float]:
        """Return the seconds after which the other ranks are asked, and the seconds that a rank may stand still."""
        patience_s = max(PATIENCE_S, _PATIENCE_STEPS * self._median_s)
        if not isinstance(self._timeout_s, str):
            patience_s = min(patience_s, self.timeout_s / 2)
        return patience_s, patience_s if self.steps_done else max(patience_s, FIRST_STEP_S)

    def _tell_patience(self) -> None:
        """Pass the patience of this engine to the watch, for waits for texts, which no clock measures."""
        if self.watch is not None:
            patience_s, standstill_s = self._patience_s
            given = self._timeout_s
            ends_s = patience_s if isinstance(given, str) else max(patience_s, given)
            self.watch.set_patience(self, WaitLimits(patience_s, standstill_s, ends_s))

    def follow(
        self,
        pending: PendingCollective,
        what: tuple[Any, ...],
        explain: Callable[[Exception], CommError],
        members: tuple[int, ...] = (),
    ) -> InFlightCollective | None:
        """Give a collective on a device, which runs while the host goes on, the deadline of a wait.

        Args:
            pending: The collective.
            what: (rank, operation, tensor) of the wait.
            explain: Function that turns an error into ours.
            members: Ranks of the job that take part.

        Returns:
            The flight; None without a watch.
        """
        if self.watch is None or pending.communicator is None:
            return None
        patience_s, standstill_s = self._patience_s
        flight = InFlightCollective(
            (*what, self.step),
            self.timeout_s,
            (patience_s, isinstance(self._timeout_s, str), standstill_s),
            explain,
            pending.works,
            pending.communicator,
            members,
            self.call,
        )
        self.watch.flights.add(flight)
        return flight

    def check_intact(self) -> None:
        """Raise the error of a collective that failed or was late on the device; later numbers there are undefined."""
        if self.watch is not None:
            self.watch.raise_failure()

    def condemn(self, words: str) -> None:
        """End all communication of all ranks, with ``words`` as the reason."""
        if self.watch is not None:
            self.watch.condemn(words)

    def verdict(self) -> str:
        """Return the reason why waiting was in vain; "" if there is none."""
        return "" if self.watch is None else self.watch.last_word()

    @property
    def story(self) -> str:
        """Sentence on the ranks that kept others waiting when last asked; "" if none were asked."""
        return f" When last asked: {self.watch.story}" if self.watch is not None and self.watch.story else ""

    def maybe_delay(self) -> None:
        """Sleep for the random pause of debug mode, if it is set."""
        if self._delay_s:
            time.sleep(self._random.uniform(0, self._delay_s))


class Levels(Protocol):
    """The two levels of a group whose ranks lie on several hosts (comm/two_levels.py)."""

    gathers: bool
    """True if gathers go in two levels too."""

    def all_gather(self, output: Tensor, shard: Tensor, what: str, purpose: Purpose) -> PendingCollective:
        """Gather the ranks' shards into ``output``."""
        ...

    def reduce_scatter(
        self,
        shard_out: Tensor,
        full: Tensor,
        what: str,
        purpose: Purpose,
        accumulate: bool,
        between: torch.dtype,
    ) -> PendingCollective:
        """Write this rank's part of the sum of ``full`` into ``shard_out``."""
        ...


@dataclass
class Group:
    """The ranks along one axis, and this rank's index among them."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    transport: Transport | None
    """Transport of the bytes; None if the axis has one rank: every collective is then the identity."""
    clock: StepClock
    traffic: Traffic
    names: tuple[int, ...] = ()
    """Ranks in the numbering of the whole job, for errors; empty: as ``ranks``."""
    hosts: tuple[int, ...] = ()
    """Number of each rank's host; empty: all ranks are on one host."""
    levels: "Levels | None" = None
    """The groups across hosts and within this host, for exchanges in two levels; None: none are made."""

    @classmethod
    def alone(cls, axis: str) -> "Group":
        """Build a group of one rank, whose collectives are the identity."""
        return cls(axis, (0,), 0, None, StepClock(0.0), Traffic())

    @cached_property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def all_gather(
        self, output: Tensor, shard: Tensor, what: str, purpose: Purpose = "weights"
    ) -> PendingCollective:
        """Gather the ranks' shards: ``output[i]`` becomes rank i's ``shard``.

        Args:
            output: Full tensor.
            shard: This rank's part, which may lie in ``output`` already.
            what: Name of the tensor in errors.
            purpose: Kind of traffic.
        """
        if self.transport is None:
            if not _is_there(output, shard):
                output.copy_(shard)
            return DONE
        if self.levels is not None and self.levels.gathers:
            return self.levels.all_gather(output, shard, what, purpose)
        return self._run(
            "all_gather", purpose, output, what, lambda t, s: t.all_gather(output, shard, s, what)
        )

    def reduce_scatter(
        self,
        shard_out: Tensor,
        full: Tensor,
        what: str,
        purpose: Purpose = "gradients",
        accumulate: bool = False,
        exchange: GradientExchange | None = None,
        between: torch.dtype | None = None,
    ) -> PendingCollective:
        """Write this rank's part of the sum of ``full`` over the ranks into ``shard_out``.

        ``full`` may have a narrower dtype than ``shard_out``; the sum is computed in the wider dtype. ``full`` keeps
        its contents, except for ``shard_out`` if that is a part of it.

        Args:
            shard_out: This rank's part of the sum.
            full: This rank's addend.
            what: Name of the tensor in errors.
            purpose: Kind of traffic.
            accumulate: Add to ``shard_out`` instead of overwriting it.
            exchange: The way of the sum; None: in one step, in the dtype of ``full``.
            between: Dtype in which sums of hosts travel in two levels, if it is wider than ``full``'s.
        """
        if self.transport is None:
            if accumulate:
                shard_out.add_(full)
            elif not _is_there(shard_out, full):
                shard_out.copy_(full)
            return DONE
        wide = between if between is not None and between.itemsize > full.itemsize else full.dtype
        way = exchange and exchange.way(Widths(full.itemsize, wide.itemsize, shard_out.itemsize))
        if way == "two_level":
            assert self.levels is not None, "the groups of both levels are made with the engine"
            return self.levels.reduce_scatter(shard_out, full, what, purpose, accumulate, wide)
        if way == "sum" and full.dtype is not shard_out.dtype:
            full = full.to(shard_out.dtype)
        return self._run(
            "reduce_scatter",
            purpose,
            full,
            what,
            lambda t, s: t.reduce_scatter(shard_out, full, s, what, accumulate),
        )

    def all_reduce(self, tensor: Tensor, what: str, purpose: Purpose = "gradients") -> PendingCollective:
        """Sum ``tensor`` over the ranks in place, with the same bits on each.

        Args:
            tensor: This rank's addend, then the sum.
            what: Name of the tensor in errors.
            purpose: Kind of traffic.
        """
        if self.transport is None:
            return DONE
        return self._run("all_reduce", purpose, tensor, what, lambda t, s: t.all_reduce(tensor, s, what))

    def all_equal(self, number: int, what: str, device: torch.device | None = None) -> bool:
        """Return whether every rank passes the same 64-bit ``number`` (comm/equality.py).

        The test is exact, and its result is the same on all ranks.

        Args:
            number: This rank's number.
            what: Name of the comparison in errors.
            device: Device of the sums.
        """
        sums = torch.tensor(terms(number), dtype=torch.int64, device=device)
        self.all_reduce(sums, what, purpose="control").wait()
        return are_equal(self.size, sums.tolist())

    def broadcast(
        self, tensor: Tensor, root: int, what: str, purpose: Purpose = "control"
    ) -> PendingCollective:
        """Copy ``tensor`` from the rank with index ``root``.

        Args:
            tensor: Source on that rank, destination on the others.
            root: Index of the rank in the group.
            what: Name of the tensor in errors.
            purpose: Kind of traffic.
        """
        if self.transport is None:
            return DONE
        return self._run("broadcast", purpose, tensor, what, lambda t, s: t.broadcast(tensor, root, s, what))

    def all_to_all(
        self,
        output: Tensor,
        sent: Tensor,
        counts: Sequence[Sequence[int]],
        what: str,
        purpose: Purpose = "activations",
    ) -> PendingCollective:
        """Send ``counts[i][j]`` elements from rank i to rank j.

        Args:
            output: Elements from each rank, in rank order.
            sent: Elements for each rank, in rank order.
            counts: Elements by sender and receiver.
            what: Name of the tensor in errors.
            purpose: Kind of traffic.
        """
        if self.transport is None:
            output.copy_(sent)
            return DONE
        leaving = sum(counts[self.index]) - counts[self.index][self.index]
        return self._run(
            "all_to_all",
            purpose,
            sent,
            what,
            lambda t, s: t.all_to_all(output, sent, counts, s, what),
            leaving,
        )

    def barrier(self, what: str = "barrier") -> None:
        """Wait until every rank of the group has arrived."""
        if self.transport is not None:
            empty = torch.empty(0)
            self._run("barrier", "control", empty, what, lambda t, s: t.barrier(s, what)).wait()

    def _run(
        self,
        operation: Operation,
        purpose: Purpose,
        full: Tensor,
        what: str,
        start: Callable[[Transport, float], PendingCollective | None],
        elements: int | None = None,
    ) -> PendingCollective:
        assert self.transport is not None, "a group of one rank has nothing to run"
        meter = self.clock.meter
        elements = full.numel() if elements is None else elements
        self.clock.check_intact()
        self.clock.check_together(operation, what)
        self.traffic.add(operation, purpose, elements, full.itemsize, self.size, what, self.axis)
        self.clock.maybe_delay()
        timeout_s, step = self.clock.timeout_s, self.clock.step
        name, members = (self._name, operation, what), self.names or self.ranks
        if self.clock.met is not None:
            self.clock.meet(members)
        explained = partial(self._explained, operation=operation, what=what, step=step, timeout_s=timeout_s)
        # On a device the start waits for nobody, but a collective of host tensors may run in its start.
        mark = None if meter is None or not full.is_cpu else self.clock.mark_wait()
        self.clock.begin_wait(name, None, members)
        try:
            pending = start(self.transport, timeout_s)
        except (RuntimeError, CommError) as error:
            raise explained(error) from error
        finally:
            self.clock.end_wait()
        if mark is not None and meter is not None:
            meter.end(self.axis, mark)
        if pending is None:
            return DONE
        flight = (
            None if pending.communicator is None else self.clock.follow(pending, name, explained, members)
        )

        def finish() -> None:
            mark = None if meter is None else self.clock.mark_wait()
            self.clock.begin_wait(name, None, members)
            try:
                if mark is None:
                    pending.wait()
                else:
                    pending.arrive()
            except (RuntimeError, CommError) as error:
                raise explained(error) from error
            finally:
                self.clock.end_wait()
            if mark is not None and meter is not None:
                meter.end(self.axis, mark)
                pending.wait()
            if flight is not None:
                flight.waited(full.device)
                self.clock.check_intact()

        return PendingCollective(finish)

    def meet(self) -> None:
        """Wait until all ranks of the group have reached the engine call that this rank is in."""
        if self.transport is not None:
            self.clock.meet(self.names or self.ranks)

    @property
    def _name(self) -> int:
        return (self.names or self.ranks)[self.index]

    def _explained(
        self, error: Exception, operation: str, what: str, step: int, timeout_s: float
    ) -> CommError:
        verdict = self.clock.verdict()
        if verdict:
            return DeadlineError(verdict)
        where = (
            f"rank {self._name}: {operation} of {what} in step {step} "
            f"over {self.size} ranks of axis {self.axis!r}"
        )
        if isinstance(error, DeadlineError) or is_late(error):
            return DeadlineError(
                f"{where}: another rank did not arrive within {timeout_s:.0f} s. Look at the last lines of the other "
                f"ranks' logs; a rank that is merely slow needs a larger comm.timeout_s. ({error}){self.clock.story}"
            )
        if isinstance(error, CommError):
            return CommError(f"{where} failed: {error}{self.clock.advice}")
        return CommError(f"{where} failed; {cause_of(error)}. ({error}){self.clock.advice}")


class NoTransport:
    """Transport that moves nothing, between ranks that do not exist: for callers that need only shapes."""

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> None:
        """Return without moving bytes."""
        ...  # noqa: PIE790

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> None:
        """Return without moving bytes."""
        ...  # noqa: PIE790

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> None:
        """Return without moving bytes."""
        ...  # noqa: PIE790

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> None:
        """Return without moving bytes."""
        ...  # noqa: PIE790

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> None:
        """Return without moving bytes."""
        ...  # noqa: PIE790

    def barrier(self, timeout_s: float, what: str) -> None:
        """Return without waiting."""
        ...  # noqa: PIE790


def _gather_call() -> Callable[..., Any]:
    """Return ``all_gather_single``, or ``all_gather_into_tensor`` before torch 2.13."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _scatter_call() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchTransport:
    """Collectives of torch.distributed on one process group.

    Args:
        group: The process group; None: torch's default group.
        ranks: Ranks of the job in the group.
        index: Index of this rank.
        composed: Use gloo's faster compositions.
        device: Device of the tensors; the host waits only for tensors on the CPU.
        alarm: Function that a waiting thread calls; it may raise.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: tuple[int, ...],
        index: int,
        composed: bool,
        device: torch.device | None = None,
        alarm: Callable[[], None] | None = None,
    ):
        self._group = group
        self._is_closed = False
        on_host = device is None or device.type == "cpu"
        self._communicator = None if on_host else Communicator(group)
        self._alarm = alarm
        self._ranks = ranks
        self._index = index
        self._composed = composed
        self._all_gather = _gather_call()
        self._reduce_scatter = _scatter_call()

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Gather the ranks' shards into ``output``."""
        if not self._composed:
            work = self._all_gather(output, shard, group=self._open_group, async_op=True)
            return self._waiting([work], timeout_s, output)
        parts = output.view(len(self._ranks), -1)
        if parts[self._index].data_ptr() != shard.data_ptr():
            parts[self._index].copy_(shard)
        works = [
            dist.broadcast(part, src=rank, group=self._open_group, async_op=True)
            for part, rank in zip(parts, self._ranks, strict=True)
        ]
        return self._waiting(works, timeout_s, output)

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        """Write (or add) this rank's part of the sum of ``full`` into ``shard_out``."""
        if self._composed:
            self._exchange_and_sum(shard_out, full, timeout_s, accumulate)
            return DONE
        if shard_out.dtype != full.dtype:
            return self._exchange_then_sum(shard_out, full, timeout_s, accumulate)
        received = torch.empty_like(shard_out) if accumulate else shard_out
        work = self._reduce_scatter(received, full, group=self._open_group, async_op=True)
        add = partial(shard_out.add_, received) if accumulate else None
        return self._waiting([work], timeout_s, full, add)

    def _exchange_then_sum(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, accumulate: bool
    ) -> PendingCollective:
        """Send narrow parts to each rank and sum them in the wide dtype.

        A backend's own reduce-scatter would sum in the dtype that it sends.
        """
        received = torch.empty_like(full)
        work = dist.all_to_all_single(received, full, group=self._open_group, async_op=True)

        def compute() -> None:
            parts = received.view(len(self._ranks), -1)
            if accumulate:
                shard_out.add_(parts.sum(0, dtype=shard_out.dtype))
            else:
                torch.sum(parts, 0, dtype=shard_out.dtype, out=shard_out)

        return self._waiting([work], timeout_s, full, compute)

    def _exchange_and_sum(self, shard_out: Tensor, full: Tensor, timeout_s: float, accumulate: bool) -> None:
        """Run all-to-alls in bounded pieces, then sum in rank order, so that every transport returns the same bits."""
        ranks = len(self._ranks)
        parts = full.view(ranks, -1)
        piece = max(PIECE_BYTES // (ranks * full.itemsize), 1)
        for start in range(0, parts.shape[1], piece):
            sent = parts[:, start : start + piece]
            received = sent.new_empty(sent.shape)
            work = dist.all_to_all_single(received, sent.contiguous(), group=self._open_group, async_op=True)
            self._wait([work], timeout_s, sent)
            total = shard_out[start : start + piece]
            if accumulate:
                total.add_(sum_in_order(received, torch.empty_like(total)) if ranks > 1 else received[0])
            else:
                sum_in_order(received, total)

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Sum ``tensor`` over the ranks in place."""
        return self._waiting(
            [dist.all_reduce(tensor, group=self._open_group, async_op=True)], timeout_s, tensor
        )

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        """Copy ``tensor`` from the rank with index ``root``."""
        work = dist.broadcast(tensor, src=self._ranks[root], group=self._open_group, async_op=True)
        return self._waiting([work], timeout_s, tensor)

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        """Send parts of ``sent`` to each rank and receive into ``output``."""
        work = dist.all_to_all_single(
            output,
            sent,
            [row[self._index] for row in counts],
            list(counts[self._index]),
            group=self._open_group,
            async_op=True,
        )
        return self._waiting([work], timeout_s, sent)

    def barrier(self, timeout_s: float, what: str) -> PendingCollective:
        """Wait until all ranks have arrived."""
        # A tensor on the CPU, because the host waits only for those.
        return self.all_reduce(torch.ones(1), timeout_s, what)

    def close(self) -> None:
        """Drop the reference to the group, which ends with its last reference."""
        self._is_closed = True
        self._group = self._communicator = None

    @property
    def _open_group(self) -> dist.ProcessGroup | None:
        if self._is_closed:  # None means torch's default group
            raise CommError("the group was closed earlier")
        return self._group

    def _waiting(
        self,
        works: list[Any],
        timeout_s: float,
        tensor: Tensor,
        compute: Callable[[], object] | None = None,
    ) -> PendingCollective:
        def finish() -> None:
            self._wait(works, timeout_s, tensor)

        if tensor.is_cpu:
            return PendingCollective(finish, compute=compute)
        return PendingCollective(finish, works, self._communicator, compute)

    def _wait(self, works: list[Any], timeout_s: float, tensor: Tensor) -> None:
        """Wait until all works have ended; on a device, only until its stream waits for them.

        A wait with a deadline would stop the host of a device. The waits of gloo may be cut into slices.
        """
        if not tensor.is_cpu:
            for work in works:
                work.wait()
            return
        end = time.monotonic() + timeout_s
        for work in works:
            while work is not None:
                left_s = end - time.monotonic()
                slices = left_s > _SLICE_S
                try:
                    work.wait(timedelta(seconds=_SLICE_S if slices else max(left_s, 0.001)))
                    break
                except RuntimeError:
                    if not slices:
                        raise
                    # The work ended after the slice, or by an error: this wait raises it.
                    if work.is_completed():
                        work.wait(timedelta(seconds=_SLICE_S))
                        break
                if self._alarm is not None:
                    self._alarm()


def _is_there(a: Tensor, b: Tensor) -> bool:
    """Return whether both tensors begin at the same place of memory; also for tensors that have no address."""
    is_one = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return is_one and a.storage_offset() == b.storage_offset()


def sum_in_order(rows: Tensor, total: Tensor) -> Tensor:
    """Write row 0 + row 1 + ... into ``total``; 16-bit sums are computed in fp32 and rounded once."""
    wide = torch.promote_types(total.dtype, torch.float32) if total.is_floating_point() else total.dtype
    summed = total if wide == total.dtype else torch.empty_like(total, dtype=wide)
    torch.add(rows[0].to(wide), rows[1], out=summed)
    for row in rows[2:]:
        summed.add_(row)
    return total if summed is total else total.copy_(summed)
