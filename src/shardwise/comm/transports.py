"""Transports: they move the bytes of a group's collectives between its ranks.

    TorchTransport          NCCL, or gloo with the compositions below
    SharedMemoryTransport   CPU ranks of one host (shared_memory.py)
    NoTransport             nothing moves, for callers that need only shapes

A backend sums in the dtype that it sends. So a 16-bit gradient whose sum is kept in fp32 is sent by an all-to-all in 16
bits, followed by one local sum: the bytes that are counted are those that are sent.

On gloo the native reduce-scatter and all-gather are slower than compositions of its other calls
(benchmarks/collectives):
    reduce-scatter = one all-to-all, then local sums in rank order: 2 to 4 times faster, with the other transport's bits
    all-gather     = N broadcasts in flight together

Shapes: every tensor is flat; with N ranks a shard has 1/N of the elements of the full tensor.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.errors import CommError
from shardwise.comm.flights import DONE, Communicator, PendingCollective
from shardwise.plan.exchange import PIECE_BYTES

MESSAGE_BYTES = 256 << 10
"""Largest message between hosts. Larger ones, in both directions of one connection of gloo, took up to twice as long on
a cable of 100 Mbit/s (benchmarks/hosts)."""
_IN_FLIGHT = 4
"""Pieces of one exchange between hosts that are under way at once."""
_SLICE_S = 0.25
"""Interval in seconds at which a thread that waits inside torch checks whether it waits in vain."""


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


Move = Literal["gather", "scatter", "piece", "own rows", "own places", "same rows", "scale"]
"""A move between placements of which the flat tensors of a collective show no dim."""


class NoTransport:
    """Transport that moves nothing, between ranks that do not exist: for callers that need only shapes.

    A collective holds its tensors until it is waited for, as those of other transports do.
    """

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Return without moving bytes."""
        return PendingCollective(partial(_end, output, shard))

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        """Return without moving bytes."""
        return PendingCollective(partial(_end, shard_out, full))

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> None:
        """Return without moving bytes."""
        ...  # noqa: PIE790

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> None:
        """Return without moving bytes."""
        ...  # noqa: PIE790

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        """Return without moving bytes."""
        return PendingCollective(partial(_end, output, sent))

    def barrier(self, timeout_s: float, what: str) -> None:
        """Return without waiting."""
        ...  # noqa: PIE790

    def moved(self, move: Move, before: Tensor, after: Tensor, dim: int) -> None:
        """Note that ``after`` was made of ``before`` by a move along ``dim``; does nothing here."""


def _end(*tensors: Tensor) -> None:
    """Do nothing; a partial call of this function holds tensors."""


def _gather_call() -> Callable[..., Any]:
    """Return ``all_gather_single``, or ``all_gather_into_tensor`` before torch 2.13."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _scatter_call() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Piece(NamedTuple):
    """The exchange of a piece that is under way."""

    work: Any
    """Work object of torch."""
    sent: Tensor
    """What leaves, which must not change until the work has ended."""
    received: Tensor
    """What arrives."""


class TorchTransport:
    """Collectives of torch.distributed on one process group.

    Args:
        group: The process group; None: torch's default group.
        ranks: Ranks of the job in the group.
        index: Index of this rank.
        composed: Use gloo's faster compositions.
        device: Device of the tensors; the host waits only for tensors on the CPU.
        alarm: Function that a waiting thread calls; it may raise.
        host_group: Function that makes and returns the group for host tensors of ranks on devices, called with the
            seconds to wait for the other ranks, by all ranks of the group together, before their first collective of a
            host tensor; None: ``group`` carries host tensors too.
        message_bytes: Largest message to another rank in bytes; 0: messages are not cut. Only with ``composed``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: tuple[int, ...],
        index: int,
        composed: bool,
        device: torch.device | None = None,
        alarm: Callable[[], None] | None = None,
        host_group: Callable[[float], dist.ProcessGroup | None] | None = None,
        message_bytes: int = 0,
    ):
        self._group = group
        self._message_bytes = message_bytes
        self._make_host_group = host_group
        self._host_group: dist.ProcessGroup | None = None
        self._is_closed = False
        on_host = device is None or device.type == "cpu"
        self._communicator = None if on_host else Communicator(group)
        self.device_type = "cpu" if device is None else device.type
        """Type of the device of the tensors."""
        self._alarm = alarm
        self._ranks = ranks
        self._index = index
        self._composed = composed
        self._all_gather = _gather_call()
        self._reduce_scatter = _scatter_call()

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Gather the ranks' shards into ``output``."""
        if not self._composed:
            work = self._all_gather(output, shard, group=self._group_of(output, timeout_s), async_op=True)
            return self._waiting([work], timeout_s, output)
        parts = output.view(len(self._ranks), -1)
        if parts[self._index].data_ptr() != shard.data_ptr():
            parts[self._index].copy_(shard)
        return self.gather(parts.unbind(), timeout_s)

    def gather(self, parts: Sequence[Tensor], timeout_s: float) -> PendingCollective:
        """Copy part i of equal ``parts`` from rank i, by broadcasts in flight together.

        The ranks' pieces take turns, so that bytes leave and arrive at the same time.
        """
        pieces = [self._cut(part) for part in parts]
        works = [
            dist.broadcast(piece, src=rank, group=self._group_of(piece, timeout_s), async_op=True)
            for turn in zip(*pieces, strict=True)
            for piece, rank in zip(turn, self._ranks, strict=True)
        ]
        return self._waiting(works, timeout_s, parts[0])

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the pieces of a flat tensor that travel as messages of their own."""
        step = max(self._message_bytes // tensor.itemsize, 1)
        return tensor.split(step) if self._message_bytes and tensor.numel() > step else (tensor,)

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
        work = self._reduce_scatter(received, full, group=self._group_of(full, timeout_s), async_op=True)
        add = partial(shard_out.add_, received) if accumulate else None
        return self._waiting([work], timeout_s, full, add)

    def _exchange_then_sum(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, accumulate: bool
    ) -> PendingCollective:
        """Send narrow parts to each rank and sum them in the wide dtype.

        A backend's own reduce-scatter would sum in the dtype that it sends.
        """
        received = torch.empty_like(full)
        work = dist.all_to_all_single(received, full, group=self._group_of(full, timeout_s), async_op=True)

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
        piece_bytes = min(PIECE_BYTES, ranks * self._message_bytes or PIECE_BYTES)
        piece = max(piece_bytes // (ranks * full.itemsize), 1)

        def start(begin: int) -> _Piece:
            sent = parts[:, begin : begin + piece].contiguous()
            received = torch.empty_like(sent)
            group = self._group_of(sent, timeout_s)
            return _Piece(dist.all_to_all_single(received, sent, group=group, async_op=True), sent, received)

        def add(begin: int, received: Tensor) -> None:
            total = shard_out[begin : begin + piece]
            if accumulate:
                total.add_(sum_in_order(received, torch.empty_like(total)) if ranks > 1 else received[0])
            else:
                sum_in_order(received, total)

        self._in_turns(range(0, parts.shape[1], piece), start, add, timeout_s)

    def _in_turns(
        self,
        numbers: Sequence[int],
        start: Callable[[int], "_Piece"],
        end: Callable[[int, Tensor], None],
        timeout_s: float,
    ) -> None:
        """Exchange pieces one after another; between hosts several are under way at once.

        Args:
            numbers: Numbers of the pieces.
            start: Function that starts the exchange of a piece.
            end: Function that uses what has arrived.
            timeout_s: Seconds to wait for the other ranks in each piece.
        """
        under_way: deque[tuple[int, _Piece]] = deque()
        for number in (*numbers, *[-1] * _IN_FLIGHT):
            if number >= 0:
                under_way.append((number, start(number)))
            if under_way and (number < 0 or len(under_way) == (_IN_FLIGHT if self._message_bytes else 1)):
                first, piece = under_way.popleft()
                self._wait([piece.work], timeout_s, piece.received)
                end(first, piece.received)

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Sum ``tensor`` over the ranks in place."""
        return self._waiting(
            [dist.all_reduce(tensor, group=self._group_of(tensor, timeout_s), async_op=True)],
            timeout_s,
            tensor,
        )

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        """Copy ``tensor`` from the rank with index ``root``."""
        works = [
            dist.broadcast(
                piece, src=self._ranks[root], group=self._group_of(tensor, timeout_s), async_op=True
            )
            for piece in self._cut(tensor)
        ]
        return self._waiting(works, timeout_s, tensor)

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        """Send parts of ``sent`` to each rank and receive into ``output``."""
        largest = max(map(max, counts)) * sent.itemsize
        if self._message_bytes and largest > self._message_bytes:
            self._all_to_all_in_pieces(output, sent, counts, timeout_s)
            return DONE
        work = dist.all_to_all_single(
            output,
            sent,
            [row[self._index] for row in counts],
            list(counts[self._index]),
            group=self._group_of(sent, timeout_s),
            async_op=True,
        )
        return self._waiting([work], timeout_s, sent)

    def _all_to_all_in_pieces(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float
    ) -> None:
        """Exchange as ``all_to_all`` does, in messages of up to ``message_bytes``; all ranks find the same pieces."""
        me, others = self._index, [rank for rank in range(len(counts)) if rank != self._index]
        step = max(self._message_bytes // sent.itemsize, 1)
        leaving = sent.split(list(counts[me]))
        arriving = output.split([row[me] for row in counts])
        arriving[me].copy_(leaving[me])

        def sizes(row: Sequence[int], begin: int) -> list[int]:
            return [0 if rank == me else min(max(count - begin, 0), step) for rank, count in enumerate(row)]

        def start(begin: int) -> _Piece:
            packed = torch.cat([leaving[rank][begin : begin + step] for rank in others])
            come = sizes([row[me] for row in counts], begin)
            received = packed.new_empty(sum(come))
            group = self._group_of(sent, timeout_s)
            work = dist.all_to_all_single(
                received, packed, come, sizes(counts[me], begin), group=group, async_op=True
            )
            return _Piece(work, packed, received)

        def copy(begin: int, received: Tensor) -> None:
            places = [arriving[rank][begin : begin + step] for rank in others]
            for place, found in zip(places, received.split([len(each) for each in places]), strict=True):
                place.copy_(found)

        self._in_turns(range(0, max(map(max, counts)), step), start, copy, timeout_s)

    def barrier(self, timeout_s: float, what: str) -> PendingCollective:
        """Wait until all ranks have arrived."""
        # A tensor on the CPU, because the host waits only for those.
        return self.all_reduce(torch.ones(1), timeout_s, what)

    def close(self) -> None:
        """Drop the reference to the group, which ends with its last reference."""
        self._is_closed = True
        self._group = self._host_group = self._communicator = None

    @property
    def group_name(self) -> str:
        """Torch's name of the process group."""
        group = self._open_group or dist.group.WORLD
        assert group is not None, "torch's default group exists as long as the engine"
        return str(group.group_name)

    @property
    def _open_group(self) -> dist.ProcessGroup | None:
        if self._is_closed:  # None means torch's default group
            raise CommError("the group was closed earlier")
        return self._group

    def _group_of(self, tensor: Tensor, timeout_s: float) -> dist.ProcessGroup | None:
        """Return the group that carries ``tensor``; make it for the first tensor of the host beside a device.

        See [Note: groups of host tensors].
        """
        group = self._open_group
        if self._make_host_group is None or not tensor.is_cpu:
            return group
        if self._host_group is None:
            self._host_group = self._make_host_group(timeout_s)
        return self._host_group

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


def sum_in_order(rows: Tensor, total: Tensor) -> Tensor:
    """Write row 0 + row 1 + ... into ``total``; 16-bit sums are computed in fp32 and rounded once."""
    wide = torch.promote_types(total.dtype, torch.float32) if total.is_floating_point() else total.dtype
    summed = total if wide == total.dtype else torch.empty_like(total, dtype=wide)
    torch.add(rows[0].to(wide), rows[1], out=summed)
    for row in rows[2:]:
        summed.add_(row)
    return total if summed is total else total.copy_(summed)
