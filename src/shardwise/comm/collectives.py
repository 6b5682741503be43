"""The collectives on one mesh axis, over whichever transport is fastest there.

A ``Group`` is what the rest of Shardwise sees: it counts, names and times each call and turns a failure into an error
that says rank, operation, Unit and step. A ``Transport`` moves the bytes:

    TorchTransport          NCCL, or gloo with the compositions below
    SharedMemoryTransport   CPU ranks of one host (comm/shared_memory.py)

On gloo the native reduce-scatter and all-gather are slower than what its other calls give (benchmarks/collectives):
    reduce-scatter = one all-to-all, then local sums in rank order: 2 to 4 times faster, with the other transport's bits
    all-gather     = N broadcasts in flight together

Cost: N-1 of N parts of the tensor sent per rank for gather and reduce-scatter, twice that for an all-reduce.
Shapes: every tensor is flat; with N ranks a shard has 1/N of the elements of the full tensor.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.trace import Operation, Purpose, Traffic
from shardwise.plan.errors import CommError, DeadlineError

_PIECE_BYTES = 16 << 20


class Pending:
    """A collective in flight; ``wait`` returns when its output may be used."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], None] | None = None):
        self._finish = finish

    def wait(self) -> None:
        """Finish the collective; a second call does nothing."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


DONE = Pending()


class Transport(Protocol):
    """Moves bytes between the ranks of one group. ``what`` names the tensor in errors."""

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> Pending | None: ...

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> Pending | None: ...

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> Pending | None: ...

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> Pending | None: ...

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> Pending | None: ...

    def barrier(self, timeout_s: float, what: str) -> Pending | None: ...


class Clock:
    """The step that the ranks are in, shared by all groups of a world; errors and deadlines read it."""

    def __init__(self, deadline_s: float, delay_s: float = 0.0):
        self.step = 0
        self.steps_done = 0
        self._deadline_s = deadline_s
        self._delay_s = delay_s
        self._random = random.Random()

    @property
    def timeout_s(self) -> float:
        """Long in the first step of this process, short later."""
        return self._deadline_s * (10 if self.steps_done == 0 else 1)

    def maybe_delay(self) -> None:
        """Debug mode's random pause."""
        if self._delay_s:
            time.sleep(self._random.uniform(0, self._delay_s))


@dataclass
class Group:
    """The ranks along one axis, seen from one of them."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    transport: Transport | None
    """None where the axis has one rank: every collective is then the identity."""
    clock: Clock
    traffic: Traffic

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def all_gather(self, output: Tensor, shard: Tensor, what: str, purpose: Purpose = "weights") -> Pending:
        """``output[i]`` becomes rank i's ``shard``, which may lie in ``output`` already."""
        if self.transport is None:
            if output.data_ptr() != shard.data_ptr():
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
    ) -> Pending:
        """``shard_out`` becomes (or grows by) this rank's part of the sum of ``full`` over the ranks.

        ``full`` may have a narrower dtype than ``shard_out``: the sum is taken in the wider one. Its contents are
        undefined afterwards.
        """
        if self.transport is None:
            if accumulate:
                shard_out.add_(full)
            elif shard_out.data_ptr() != full.data_ptr():
                shard_out.copy_(full)
            return DONE
        return self._run(
            "reduce_scatter",
            purpose,
            full,
            what,
            lambda t, s: t.reduce_scatter(shard_out, full, s, what, accumulate),
        )

    def all_reduce(self, tensor: Tensor, what: str, purpose: Purpose = "gradients") -> Pending:
        """``tensor`` becomes its sum over the ranks, the same bits on each."""
        if self.transport is None:
            return DONE
        return self._run("all_reduce", purpose, tensor, what, lambda t, s: t.all_reduce(tensor, s, what))

    def broadcast(self, tensor: Tensor, root: int, what: str, purpose: Purpose = "control") -> Pending:
        """``tensor`` becomes that of the rank with index ``root``."""
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
    ) -> Pending:
        """``counts[i][j]`` elements go from rank i to rank j.

        ``sent`` holds what goes to each rank, ``output`` what came from each, both in rank order.
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
        """Return when every rank of the group has arrived."""
        if self.transport is not None:
            empty = torch.empty(0)
            self._run("barrier", "control", empty, what, lambda t, s: t.barrier(s, what)).wait()

    def _run(
        self,
        operation: Operation,
        purpose: Purpose,
        full: Tensor,
        what: str,
        start: Callable[[Transport, float], Pending | None],
        elements: int | None = None,
    ) -> Pending:
        assert self.transport is not None, "a group of one rank has nothing to run"
        elements = full.numel() if elements is None else elements
        self.traffic.add(operation, purpose, elements, full.itemsize, self.size, what, self.axis)
        self.clock.maybe_delay()
        timeout_s = self.clock.timeout_s
        try:
            pending = start(self.transport, timeout_s)
        except (RuntimeError, CommError) as error:
            raise self._explained(error, operation, what, timeout_s) from error
        if pending is None:
            return DONE

        def finish() -> None:
            try:
                pending.wait()
            except (RuntimeError, CommError) as error:
                raise self._explained(error, operation, what, timeout_s) from error

        return Pending(finish)

    def _explained(self, error: Exception, operation: str, what: str, timeout_s: float) -> CommError:
        where = (
            f"rank {self.ranks[self.index]}: {operation} of {what} in step {self.clock.step} "
            f"over {self.size} ranks of axis {self.axis!r}"
        )
        if isinstance(error, CommError) and not isinstance(error, DeadlineError):
            return CommError(f"{where} failed: {error}")
        if (
            isinstance(error, DeadlineError)
            or "timed out" in str(error).lower()
            or "timeout" in str(error).lower()
        ):
            return DeadlineError(
                f"{where}: another rank did not arrive within {timeout_s:.0f} s. Look at the last lines of the other "
                f"ranks' logs; a rank that is merely slow needs a larger comm.deadline_s. ({error})"
            )
        return CommError(f"{where} failed; most likely another rank ended. ({error})")


def _gather_call() -> Callable[..., Any]:
    """``all_gather_single`` from torch 2.13 on, ``all_gather_into_tensor`` before."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _scatter_call() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchTransport:
    """Collectives of torch.distributed on one process group; ``composed`` takes gloo's faster compositions."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: tuple[int, ...], index: int, composed: bool):
        self._group = group
        self._ranks = ranks
        self._index = index
        self._composed = composed
        self._all_gather = _gather_call()
        self._reduce_scatter = _scatter_call()

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> Pending:
        if not self._composed:
            return _waiting([self._all_gather(output, shard, group=self._group, async_op=True)], timeout_s)
        parts = output.view(len(self._ranks), -1)
        if parts[self._index].data_ptr() != shard.data_ptr():
            parts[self._index].copy_(shard)
        return _waiting(
            [
                dist.broadcast(part, src=rank, group=self._group, async_op=True)
                for part, rank in zip(parts, self._ranks, strict=True)
            ],
            timeout_s,
        )

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> Pending:
        if self._composed:
            self._exchange_and_sum(shard_out, full, timeout_s, accumulate)
            return DONE
        same = shard_out.dtype == full.dtype and not accumulate
        received = shard_out if same else torch.empty_like(shard_out, dtype=shard_out.dtype)
        sent = full if full.dtype == received.dtype else full.to(received.dtype)
        work = self._reduce_scatter(received, sent, group=self._group, async_op=True)

        def finish() -> None:
            work.wait(timedelta(seconds=timeout_s))
            if accumulate:
                shard_out.add_(received)
            elif received is not shard_out:
                shard_out.copy_(received)

        return Pending(finish)

    def _exchange_and_sum(self, shard_out: Tensor, full: Tensor, timeout_s: float, accumulate: bool) -> None:
        """All-to-all in bounded pieces, then sums in rank order, so that every transport gives the same bits."""
        ranks = len(self._ranks)
        parts = full.view(ranks, -1)
        piece = max(_PIECE_BYTES // (ranks * full.itemsize), 1)
        for start in range(0, parts.shape[1], piece):
            sent = parts[:, start : start + piece]
            received = torch.empty(sent.shape, dtype=full.dtype)
            work = dist.all_to_all_single(received, sent.contiguous(), group=self._group, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
            total = shard_out[start : start + piece]
            if accumulate:
                total.add_(_sum_in_order(received, torch.empty_like(total)) if ranks > 1 else received[0])
            else:
                _sum_in_order(received, total)

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> Pending:
        return _waiting([dist.all_reduce(tensor, group=self._group, async_op=True)], timeout_s)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> Pending:
        work = dist.broadcast(tensor, src=self._ranks[root], group=self._group, async_op=True)
        return _waiting([work], timeout_s)

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> Pending:
        work = dist.all_to_all_single(
            output,
            sent,
            [row[self._index] for row in counts],
            list(counts[self._index]),
            group=self._group,
            async_op=True,
        )
        return _waiting([work], timeout_s)

    def barrier(self, timeout_s: float, what: str) -> Pending:
        one = torch.ones(1)
        if dist.get_backend(self._group) == "nccl":
            one = one.to(torch.accelerator.current_accelerator())
        return self.all_reduce(one, timeout_s, what)


def _sum_in_order(rows: Tensor, total: Tensor) -> Tensor:
    """``total`` becomes row 0 + row 1 + ..., 16-bit sums taken in fp32 and rounded once."""
    wide = torch.promote_types(total.dtype, torch.float32) if total.is_floating_point() else total.dtype
    summed = total if wide == total.dtype else torch.empty_like(total, dtype=wide)
    torch.add(rows[0].to(wide), rows[1], out=summed)
    for row in rows[2:]:
        summed.add_(row)
    return total if summed is total else total.copy_(summed)


def _waiting(works: list[Any], timeout_s: float) -> Pending:
    limit = timedelta(seconds=timeout_s)

    def finish() -> None:
        for work in works:
            if work is not None:
                work.wait(limit)

    return Pending(finish)
