"""The collectives on one mesh axis, over the fastest transport of its ranks.

The rest of Shardwise uses a ``Group``, which counts, names and times each call and turns a failure into an error that
contains rank, operation, Unit and step. A ``Transport`` (transports.py) moves the bytes, and the engine's ``StepClock``
(step_clock.py) measures and limits each wait.

Cost: N-1 of N parts of the tensor sent per rank for gather and reduce-scatter, twice that for an all-reduce.
Shapes: every tensor is flat; with N ranks a shard has 1/N of the elements of the full tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from shardwise.base.errors import CommError, DeadlineError
from shardwise.comm.equality import are_equal, terms
from shardwise.comm.faults import cause_of, is_late
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.transports import Transport
from shardwise.comm.watching.recorder import NOWHERE, CallPlace, RecordedGroup, ranges_text
from shardwise.plan.exchange import GradientExchange, Widths
from shardwise.plan.exchange_calls import Operation, Purpose


class Levels(Protocol):
    """The two levels in which ranks on several hosts may sum gradients (comm/two_levels.py)."""

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
    """The groups across hosts and within this host, for sums of gradients; None: none are made."""
    _records: RecordedGroup | None = field(default=None, init=False, repr=False)
    """The group in the records of this rank; None before the first collective."""

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
            exchange: The way of the sum; None: the transport's own, in the dtype of ``full``.
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
        in_one_step = exchange is not None and exchange.hosts > 1

        def start(transport: Transport, timeout_s: float) -> PendingCollective | None:
            chosen = getattr(transport, "flat", transport) if in_one_step else transport
            found: PendingCollective | None = chosen.reduce_scatter(
                shard_out, full, timeout_s, what, accumulate
            )
            return found

        return self._run("reduce_scatter", purpose, full, what, start)

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

    def run_operator(
        self, operation: Operation, like: Tensor, elements: int, what: str, call: Callable[[], object]
    ) -> None:
        """Run an operator of torch that moves bytes itself, counted and explained as a collective of activations.

        Args:
            operation: Collective whose bytes the operator moves.
            like: A tensor of the dtype and on the device of what travels.
            elements: Elements of the full tensor of the collective.
            what: Name of the tensor in errors.
            call: Function that runs the operator.
        """

        def start(transport: Transport, timeout_s: float) -> None:
            call()

        self._run(operation, "activations", like, what, start, elements)

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
        place = self._recorded(operation, full, elements, what)
        if self.clock.met is not None:
            self.clock.meet(members)
        explained = partial(self._explained, operation=operation, what=what, step=step, timeout_s=timeout_s)
        # On a device the start waits for nobody, but a collective of host tensors may run in its start.
        mark = None if meter is None or not full.is_cpu else self.clock.mark_wait()
        self.clock.begin_wait(name, None, members, place)
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
        flight = self.clock.follow(pending, name, explained, members, place)

        def finish() -> None:
            mark = None if meter is None else self.clock.mark_wait()
            self.clock.begin_wait(name, None, members, place)
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

    def _recorded(self, operation: Operation, full: Tensor, elements: int, what: str) -> CallPlace:
        """Record the start of a collective, and return its place in the records."""
        recorder = self.clock.recorder
        if recorder is None:
            return NOWHERE
        if self._records is None:
            self._records = recorder.group_of(
                self.transport, f"ranks {ranges_text(self.names or self.ranks)}"
            )
        return recorder.start(self._records, operation, full.dtype, elements, what)

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


def _is_there(a: Tensor, b: Tensor) -> bool:
    """Return whether both tensors begin at the same place of memory; also for tensors that have no address."""
    is_one = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return is_one and a.storage_offset() == b.storage_offset()
