"""Collectives in two levels, where the ranks of a group lie on several hosts.

With L ranks on each of H hosts a rank has the place (h, l) in its group. Bytes move within the hosts, through shared
memory between CPU ranks, and across the hosts between the ranks in one place l, each of which carries one of L parts:

    all_reduce      within: rank (h, l) sums part l of its host's tensors     across: all-reduce of the hosts' sums of
                    part l                                                    within: gather of the parts
    reduce_scatter  within: rank (h, l) gets the ranges (0, l), (1, l) ... (H-1, l) of the ranks of its host and adds
                    them                                                      across: the range (h, l) of the sums
    all_gather      across: the shards (0, l) ... (H-1, l)                    within: each host's shards
    broadcast       within: the root's host                                   across: part l      within: the parts
    all_to_all      what stays on a host within, beside it what leaves the host

So every host sends its sum once, and not once for each of its ranks, and nothing of a host's own crosses a network.

    TwoLevelTransport   all of them, between CPU ranks (links.py makes it)
    TwoLevels           sums of gradients whose sums of hosts travel in a dtype of their own, on devices too

Hosts may have different numbers of ranks: as many parts cross as the smallest host has ranks. The ranges of
reduce_scatter and all_gather need equal numbers of ranks that are neighbours in the group; otherwise they go in one
step. Sums are added in rank order within a host and then over the hosts, so they have the same bits in every run and on
every rank, and other last bits than in one step.

Paper: Wang et al. 2023, arXiv:2306.10209 (ZeRO++: gradients in two levels).
Cost:  as many elements sent per rank as by rings, (N-1)/N · P for a gather, of which (H-1)/N · P cross; twice that for
       an all-reduce. TwoLevels on a device holds a buffer of P elements to send and one to receive, until the
       computation has waited.
Shapes: P elements; N = H·L ranks.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.rendezvous.hosts import grid_of, levels_of
from shardwise.comm.transports import TorchTransport, Transport, sum_in_order
from shardwise.memory.streams import beside, run_beside
from shardwise.plan.exchange import PIECE_BYTES
from shardwise.plan.exchange_calls import Purpose

_SMALL_BYTES = 8 << 10
"""Largest tensor that crosses as one part: more parts would take more messages and no fewer bytes."""
Swap = Callable[[Tensor], Tensor]
"""Function that sends row i of a tensor to rank i of a level, and returns the rows that arrive, in rank order."""


class TwoLevelTransport:
    """The collectives of CPU ranks on several hosts, of which at least one has several of the ranks.

    Collectives end in the order in which they began.

    Args:
        index: Index of this rank.
        hosts: Number of each rank's host.
        within: Transport of the ranks of this host; None if this is the only one.
        across: Transport of the ranks in this rank's place on every host; None if some host has no such place.
        flat: Transport of all ranks, in one step.
    """

    def __init__(
        self,
        index: int,
        hosts: Sequence[int],
        within: Transport | None,
        across: TorchTransport | None,
        flat: Transport,
    ):
        indices = tuple(range(len(hosts)))
        columns, self._rows = grid_of(indices, hosts)
        self._columns = len(columns)
        self._host = next(number for number, row in enumerate(self._rows) if index in row)
        self._place = self._rows[self._host].index(index)
        self._index = index
        self._is_even = levels_of(indices, hosts) is not None
        self._within = within
        self._across = across
        self.flat = flat
        """Transport of all ranks, which exchanges in one step."""
        self._flying: deque[list[Callable[[], None]]] = deque()

    def all_gather(
        self, output: Tensor, shard: Tensor, timeout_s: float, what: str
    ) -> PendingCollective | None:
        """Gather the ranks' shards into ``output``."""
        within, across = self._within, self._across
        if not self._is_even or within is None or across is None:
            return self.flat.all_gather(output, shard, timeout_s, what)
        every = output.view(len(self._rows), self._columns, shard.numel())
        mine = every[self._host, self._place]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        coming = across.gather([row[self._place] for row in every], timeout_s)

        def gather(row: Tensor) -> None:
            _end(within.all_gather(row.view(-1), row[self._place], timeout_s, what))

        def finish() -> None:
            gather(every[self._host])
            coming.wait()
            for host, row in enumerate(every):
                if host != self._host:
                    gather(row)

        return self._begun(finish)

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective | None:
        """Write (or add) this rank's part of the sum of ``full`` into ``shard_out``.

        A sum in a wider dtype than ``full`` goes in one step, because a sum of one host would not fit into ``full``'s.
        """
        within, across = self._within, self._across
        if not self._is_even or within is None or across is None or shard_out.dtype != full.dtype:
            return self.flat.reduce_scatter(shard_out, full, timeout_s, what, accumulate)

        def swap(level: Transport, rows: Tensor) -> Tensor:
            received, each = torch.empty_like(rows), rows[0].numel()
            counts = [[each] * len(rows)] * len(rows)
            _end(level.all_to_all(received.view(-1), rows.view(-1), counts, timeout_s, what))
            return received

        _reduce_in_pieces(
            shard_out,
            full.view(len(self._rows), self._columns, shard_out.numel()),
            (lambda rows: swap(within, rows), lambda rows: swap(across, rows)),
            accumulate,
            full.dtype,
        )
        return DONE

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Sum ``tensor`` over the ranks in place, with the same bits on each."""
        if self._is_even and tensor.nbytes > _SMALL_BYTES:
            return self._all_reduce_in_parts(tensor, timeout_s, what)
        if self._within is not None:
            _end(self._within.all_reduce(tensor, timeout_s, what))
        pieces = self._pieces(tensor)
        coming: PendingCollective | None = None
        if self._across is not None and self._place < len(pieces):
            coming = self._across.all_reduce(pieces[self._place], timeout_s, what)

        def finish() -> None:
            _end(coming)
            self._spread(pieces, timeout_s, what)

        return self._begun(finish)

    def _all_reduce_in_parts(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Sum equal parts in place; a tensor without equal parts is copied and padded before."""
        within, across = self._within, self._across
        assert within is not None and across is not None, "hosts with equally many ranks, and more than one"
        whole, count = tensor, tensor.numel()
        if count % self._columns:
            whole = tensor.new_zeros(-(-count // self._columns) * self._columns)
            whole[:count].copy_(tensor)
        mine = whole.view(self._columns, -1)[self._place]
        _end(within.reduce_scatter(mine, whole, timeout_s, what))
        coming = across.all_reduce(mine, timeout_s, what)

        def finish() -> None:
            _end(coming)
            _end(within.all_gather(whole, mine, timeout_s, what))
            if whole is not tensor:
                tensor.copy_(whole[:count])

        return self._begun(finish)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        """Copy ``tensor`` from the rank with index ``root``."""
        host = next(number for number, row in enumerate(self._rows) if root in row)
        is_near = host == self._host
        if is_near and self._within is not None:
            _end(self._within.broadcast(tensor, self._rows[host].index(root), timeout_s, what))
        pieces = self._pieces(tensor)
        coming: PendingCollective | None = None
        if self._across is not None and self._place < len(pieces):
            coming = self._across.broadcast(pieces[self._place], host, timeout_s, what)

        def finish() -> None:
            _end(coming)
            if not is_near:
                self._spread(pieces, timeout_s, what)

        return self._begun(finish)

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective | None:
        """Send parts of ``sent`` to each rank and receive into ``output``."""
        if self._within is None:
            return self.flat.all_to_all(output, sent, counts, timeout_s, what)
        near = self._rows[self._host]
        leaving = sent.split(list(counts[self._index]))
        arriving = output.split([row[self._index] for row in counts])
        far = [
            [0 if j in row else counts[i][j] for j in range(len(counts))]
            for i in range(len(counts))
            for row in self._rows
            if i in row
        ]
        gone = torch.cat([part for rank, part in enumerate(leaving) if rank not in near])
        come = sent.new_empty(sum(row[self._index] for row in far))
        coming = self.flat.all_to_all(come, gone, far, timeout_s, what)
        stays = torch.cat([leaving[rank] for rank in near])
        came = sent.new_empty(sum(arriving[rank].numel() for rank in near))
        beside = [[counts[i][j] for j in near] for i in near]
        _end(self._within.all_to_all(came, stays, beside, timeout_s, what))
        for rank, part in zip(near, came.split([arriving[rank].numel() for rank in near]), strict=True):
            arriving[rank].copy_(part)

        def finish() -> None:
            _end(coming)
            others = [part for rank, part in enumerate(arriving) if rank not in near]
            for part, found in zip(others, come.split([part.numel() for part in others]), strict=True):
                part.copy_(found)

        return self._begun(finish)

    def barrier(self, timeout_s: float, what: str) -> PendingCollective:
        """Wait until all ranks have arrived."""
        return self.all_reduce(torch.ones(1), timeout_s, what)

    def close(self) -> None:
        """Close the transport of all ranks; those of the levels belong to the links, as other groups use them too."""
        close = getattr(self.flat, "close", None)
        if close is not None:
            close()

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the parts of ``tensor`` that cross, by the place that carries them."""
        if tensor.nbytes <= _SMALL_BYTES:
            return (tensor,)
        return tensor.tensor_split(self._columns)

    def _spread(self, pieces: Sequence[Tensor], timeout_s: float, what: str) -> None:
        """Copy each piece from the rank of this host that has carried it to the others of the host."""
        if self._within is not None:
            for place, piece in enumerate(pieces):
                _end(self._within.broadcast(piece, place, timeout_s, what))

    def _begun(self, finish: Callable[[], None]) -> PendingCollective:
        """Return the collective that ``finish`` ends, after those that began before it."""
        mine = [finish]
        self._flying.append(mine)

        def end() -> None:
            while mine:
                first = self._flying.popleft()
                first.pop()()

        return PendingCollective(end)


def _end(pending: PendingCollective | None) -> None:
    if pending is not None:
        pending.wait()


def _reduce_in_pieces(
    shard_out: Tensor, full: Tensor, swaps: tuple[Swap, Swap], accumulate: bool, between: torch.dtype
) -> None:
    """Sum within the hosts, then across, in pieces whose memory stays in caches.

    Args:
        shard_out: This rank's range of the sum.
        full: This rank's addend, [H, L, P/N].
        swaps: The exchanges within the host and across the hosts.
        accumulate: Add to ``shard_out`` instead of overwriting it.
        between: Dtype in which the sums of hosts travel.
    """
    piece = max(PIECE_BYTES // (full.itemsize * full.shape[0] * full.shape[1]), 1)
    for start in range(0, shard_out.numel(), piece):
        part = full[..., start : start + piece]
        _reduce_in_levels(shard_out[start : start + piece], part, swaps, accumulate, between)


def _reduce_in_levels(
    total: Tensor, part: Tensor, swaps: tuple[Swap, Swap], accumulate: bool, between: torch.dtype
) -> None:
    """Sum one piece as ``_reduce_in_pieces`` does."""
    within, across = swaps
    by_place = part.transpose(0, 1).contiguous()  # [L, H, piece]
    sums = _added(within(by_place), total.dtype).to(between)
    received = across(sums)
    if accumulate:
        total.add_(_added(received, total.dtype))
    else:
        total.copy_(_added(received, total.dtype))


class TwoLevels:
    """Sums of gradients in two levels, over two groups whose calls are counted one by one.

    Args:
        across: The ranks in this rank's place on every host.
        within: The ranks of this host.
        device: Device of the tensors.
    """

    def __init__(self, across: Group, within: Group, device: torch.device):
        self.across = across
        self.within = within
        self._stream = beside(device)

    def reduce_scatter(
        self,
        shard_out: Tensor,
        full: Tensor,
        what: str,
        purpose: Purpose,
        accumulate: bool,
        between: torch.dtype,
    ) -> PendingCollective:
        """Write this rank's part of the sum of ``full`` into ``shard_out``, as ``Group.reduce_scatter`` does.

        On a device both levels run on a stream beside the computation, which waits for them in ``wait``.

        Args:
            shard_out: This rank's part of the sum.
            full: This rank's addend.
            what: Name of the tensor in errors.
            purpose: Kind of traffic.
            accumulate: Add to ``shard_out`` instead of overwriting it.
            between: Dtype in which the sums of hosts travel.
        """
        ranges = full.view(self.across.size, self.within.size, -1)  # [H, L, P/N]
        swaps = (
            lambda rows: _exchanged(self.within, rows, what, purpose),
            lambda rows: _exchanged(self.across, rows, what, purpose),
        )
        if self._stream is not None:
            clock, meter = self.across.clock, self.across.clock.meter
            with nullcontext() if meter is None else meter.beside():
                arrive = run_beside(
                    self._stream, lambda: _reduce_in_levels(shard_out, ranges, swaps, accumulate, between)
                )

            kept = [full, shard_out]

            def finish() -> None:
                mark = None if meter is None else clock.mark_wait()
                arrive()
                if meter is not None:
                    meter.end(self.across.axis, mark)
                kept.clear()  # the other stream reads and writes them until here, so nobody may get their memory

            return PendingCollective(finish)
        _reduce_in_pieces(shard_out, ranges, swaps, accumulate, between)
        return DONE


def _exchanged(group: Group, rows: Tensor, what: str, purpose: Purpose) -> Tensor:
    """Send row i of ``rows`` to rank i of ``group``, and return the rows that arrive, in rank order."""
    received = torch.empty_like(rows)
    each = rows[0].numel()
    counts = [[each] * group.size] * group.size
    group.all_to_all(received.view(-1), rows.view(-1), counts, what, purpose).wait()
    return received


def _added(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the rows, added in at least ``dtype`` and fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    if rows.device.type == "cpu":
        return sum_in_order(rows, rows.new_empty(rows.shape[1:], dtype=wide))
    return rows.sum(0, dtype=wide)
