"""Collectives between CPU ranks of one host, through shared memory.

Every rank copies what the others need into its own ring (shared_ring.py) and reads what it needs from theirs, in
pieces of one slot, so that a piece is read while it is still in a cache. For a full tensor of S bytes over N ranks
each rank

    all_gather       copies its shard in, copies N-1 shards out             S/N in, S (N-1)/N out
    reduce_scatter   copies N-1 foreign parts in, adds N parts into one     S (N-1)/N in, S (N-1)/N added
    all_reduce       does both, piece by piece                              the sum of the two
    broadcast        the root copies in, the others copy out                S in or S out
    all_to_all       copies what leaves in, what arrives out

gloo moves the same bytes through the kernel's sockets, which costs two more copies, and adds in ring order. In this
transport every sum is computed in rank order, p0 + p1 + ... + p(N-1), and so has the same bits on every rank, at every
size and in every run. Sums of 16-bit floats are computed in fp32 and rounded once.

A collective begins with the part that needs no waiting: its contribution is copied into the ring as far as there is
room. It ends in ``wait``, or when the next collective has begun, while its bytes are still in a cache. So a rank that
comes first continues to compute, and finds the others' contributions in their rings when it needs them. Collectives end
in the order in which they began; until then their tensors must not change.

Cost of one collective of a few KiB: one copy in, one post and one wait for each peer.
Shapes: every tensor is flat and contiguous; with N ranks a shard has 1/N of the elements of the full tensor.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import PAGESIZE

import torch
from torch import Tensor

from shardwise.base.errors import CommError, UsageError
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.shared_ring import (
    HEAD_BYTES,
    CollectiveCall,
    GroupRings,
    RingLayout,
    SharedMemoryUnavailable,
    meet,
)

__all__ = ["SharedMemoryTransport", "SharedMemoryUnavailable"]

_SLOT_BYTES = 1 << 20
_RING_BYTES = 8 << 20
"""Bytes of a rank's ring, about."""
_ALIGNMENT_BYTES = 64
_WHOLE_BYTES = 4 << 20
"""Largest all-reduce between two ranks in one phase; the additions grow with N-1, so the bound shrinks with N."""


@dataclass(slots=True)
class _RingCollective:
    """One collective in flight: ``writes`` rounds of the own ring to fill, ``reads`` rounds of the sources' to read.

    Round t is written only when fewer than ``ahead`` rounds before it are unread, because an all-reduce writes results
    that depend on what it read.
    """

    call: CollectiveCall
    head: bytes
    writes: int
    write: Callable[[int, int], None]
    """Function of (round, slot of the own ring)."""
    reads: int
    read: Callable[[int], None]
    """Function of (round); the sources' slots are ``GroupRings.at``."""
    sources: Sequence[int]
    ahead: int
    written: int = 0
    done: int = 0

    @property
    def ended(self) -> bool:
        """True if nothing is left to write or to read."""
        return self.written == self.writes and self.done == self.reads


def _layout_of(size: int, ring_bytes: int) -> RingLayout:
    """Return eight slots of whole pages, in which every peer's part has at least one aligned piece."""
    slot_bytes = -(-max(min(_SLOT_BYTES, ring_bytes // 8), _ALIGNMENT_BYTES * size) // PAGESIZE) * PAGESIZE
    return RingLayout(size, max(ring_bytes // slot_bytes, 2), slot_bytes)


def ring_file_bytes(size: int) -> int:
    """Return the bytes of shared memory that a rank provides to a group of ``size`` ranks."""
    return _layout_of(size, _RING_BYTES).file_bytes


class SharedMemoryTransport:
    """The collectives of one group of ranks on one host; every rank calls them in the same order.

    Threads must not share an object.

    Args:
        rank: This rank's index.
        size: Number of ranks.
        post: Function that writes a text for the other ranks under a key; only the constructor uses it.
        collect: Function that returns the texts of all ranks under a key; only the constructor uses it.
        timeout_s: Seconds to wait for the other ranks.
        ring_bytes: Bytes of this rank's ring.
        names: Numbers of the ranks in errors; None: 0 to size - 1.
        alarm: Function that a waiting thread calls; it may raise.

    Raises:
        SharedMemoryUnavailable: on all ranks, if one of them cannot take part.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        post: Callable[[str, str], None],
        collect: Callable[[str, float], list[str]],
        timeout_s: float,
        ring_bytes: int = _RING_BYTES,
        names: Sequence[int] | None = None,
        alarm: Callable[[], None] | None = None,
    ):
        layout = _layout_of(size, ring_bytes)
        self.size = size
        self._rank = rank
        self._names = range(size) if names is None else names
        self._rings: GroupRings = meet(rank, post, collect, timeout_s, layout, self._names, alarm)
        self._layout = layout
        self._peers = self._rings.peers
        self._queue: deque[_RingCollective] = deque()
        self._calls = 0
        self._process = os.getpid()
        self._broken = ""
        self._own: dict[tuple[torch.dtype, int], list[tuple[Tensor, ...]]] = {}
        self._theirs: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's own memory."""
        return self._layout.file_bytes

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Gather the ranks' shards: ``output[r]`` becomes rank r's ``shard``, which may lie in ``output`` already."""
        size = self._layout.ranks
        call = self._call("all_gather", what, timeout_s, output, shard)
        if output.numel() != size * shard.numel() or output.dtype != shard.dtype:
            raise UsageError(
                f"{self._where(call)}: {_kind(shard)} a rank make no {_kind(output)} on {size} ranks"
            )
        bytes_out, bytes_in = output.view(torch.uint8), shard.view(torch.uint8)
        parts = bytes_out.view(size, -1).unbind()
        if parts[self._rank].data_ptr() != shard.data_ptr():
            parts[self._rank].copy_(bytes_in)
        step = self._layout.slot_bytes
        pieces = _split(bytes_in, step)
        places = {peer: _split(parts[peer], step) for peer in self._peers}
        own, theirs, at = self._slots(torch.uint8, 1)

        def write(turn: int, slot: int) -> None:
            _copy(own[slot][0], pieces[turn])

        def read(turn: int) -> None:
            for peer, place in places.items():
                _copy(place[turn], theirs[peer][at[peer]])

        rounds = len(pieces) if shard.numel() else 0
        return self._begin(call, output, rounds, write, rounds, read)

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        """Write this rank's part of the sum of ``full`` into ``shard_out``, or add it with ``accumulate``.

        ``shard_out`` may be that part of ``full`` itself, and its dtype may be wider.
        """
        size = self._layout.ranks
        call = self._call("reduce_scatter", what, timeout_s, shard_out, full)
        widens = torch.promote_types(full.dtype, shard_out.dtype) == shard_out.dtype
        if full.numel() != size * shard_out.numel() or not widens:
            raise UsageError(
                f"{self._where(call)}: {_kind(full)} on {size} ranks do not sum to {_kind(shard_out)}"
            )
        step = self._step(full.dtype, size - 1)
        parts = [_split(part, step) for part in full.view(size, -1).unbind()]
        totals = _split(shard_out, step)
        write, gather = self._contributions(full.dtype, parts)

        def read(turn: int) -> None:
            self._sum(totals[turn], gather(turn), accumulate)

        rounds = len(totals) if full.numel() else 0
        return self._begin(call, full, rounds, write, rounds, read)

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Sum ``tensor`` over the ranks in place, with the same bits on each."""
        call = self._call("all_reduce", what, timeout_s, tensor)
        size = self._layout.ranks
        if tensor.nbytes * (size - 1) ** 2 <= _WHOLE_BYTES:
            return self._all_reduce_whole(call, tensor)
        step = self._step(tensor.dtype, size - 1)
        parts = _cut(tensor, size, step)
        blocks = len(parts[0])
        ahead = min(self._layout.slots, blocks)
        # Contributions of the first blocks, then results and contributions by turns, then the last results: what a
        # round writes depends only on rounds that `ahead` lets a rank read before.
        order: list[tuple[bool, int]] = [(False, block) for block in range(ahead)]
        for block in range(blocks):
            order.append((True, block))
            if block + ahead < blocks:
                order.append((False, block + ahead))
        contribute, gather = self._contributions(tensor.dtype, parts)
        own, theirs, at = self._slots(tensor.dtype, 1)
        mine = parts[self._rank]

        def write(turn: int, slot: int) -> None:
            is_result, block = order[turn]
            if is_result:
                _copy(own[slot][0], mine[block])
            else:
                contribute(block, slot)

        def read(turn: int) -> None:
            is_result, block = order[turn]
            if is_result:
                for peer in self._peers:
                    _copy(parts[peer][block], theirs[peer][at[peer]])
            else:
                self._sum(mine[block], gather(block), False)

        return self._begin(call, tensor, 2 * blocks, write, 2 * blocks, read, ahead=ahead)

    def _all_reduce_whole(self, call: CollectiveCall, tensor: Tensor) -> PendingCollective:
        """Let every rank read and sum everything: half as many rounds, but N-1 times the additions."""
        own, theirs, at = self._slots(tensor.dtype, 1)
        pieces = _split(tensor, self._step(tensor.dtype, 1))

        def write(turn: int, slot: int) -> None:
            _copy(own[slot][0], pieces[turn])

        def read(turn: int) -> None:
            piece = pieces[turn]
            parts = [theirs[rank][at[rank]][: piece.numel()] for rank in self._peers]
            parts.insert(self._rank, piece)
            self._sum(piece, parts, False)

        rounds = len(pieces) if tensor.numel() else 0
        return self._begin(call, tensor, rounds, write, rounds, read)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, what: str) -> PendingCollective:
        """Copy ``tensor`` from the rank with index ``root``."""
        call = self._call("broadcast", what, timeout_s, tensor)
        # Small pieces if there would be few, so that the others read one piece while the root writes the next.
        step = min(max(-(-tensor.nbytes // 4 // 4096) * 4096, 64 << 10), self._layout.slot_bytes)
        pieces = _split(tensor.view(torch.uint8), step)
        own, theirs, at = self._slots(torch.uint8, 1)

        def write(turn: int, slot: int) -> None:
            _copy(own[slot][0], pieces[turn])

        def read(turn: int) -> None:
            _copy(pieces[turn], theirs[root][at[root]])

        rounds = len(pieces) if tensor.numel() else 0
        if root == self._rank:
            return self._begin(call, tensor, rounds, write, 0, read)
        return self._begin(call, tensor, 0, write, rounds, read, sources=[root])

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        """Send ``counts[i][j]`` elements from rank i to rank j.

        Every rank has all counts, and so the number of rounds.
        """
        me, size = self._rank, self._layout.ranks
        call = self._call("all_to_all", what, timeout_s, output, sent)
        leave = counts[me]
        arrive = [row[me] for row in counts]
        if sum(leave) != sent.numel() or sum(arrive) != output.numel() or output.dtype != sent.dtype:
            raise UsageError(
                f"{self._where(call)}: {_kind(sent)} become {_kind(output)}, but by the counts {sum(leave)} leave and "
                f"{sum(arrive)} arrive"
            )
        width = sent.itemsize
        own, theirs, at = self._slots(torch.uint8, size - 1)
        step = self._step(torch.uint8, size - 1)
        to = _bytes(sent).split([n * width for n in leave])
        source = _bytes(output).split([n * width for n in arrive])
        _copy(source[me], to[me])
        leaving = [(place, _split(to[peer], step)) for place, peer in enumerate(self._peers)]
        arriving = [(peer, _split(source[peer], step)) for peer in self._peers]

        def write(turn: int, slot: int) -> None:
            for place, pieces in leaving:
                if turn < len(pieces):
                    _copy(own[slot][place], pieces[turn])

        def read(turn: int) -> None:
            for peer, pieces in arriving:
                if turn < len(pieces):
                    _copy(pieces[turn], theirs[peer][at[peer]])

        largest = max(counts[i][j] for i in range(size) for j in range(size) if i != j)
        rounds = -(-largest * width // step)
        # An empty tensor for the comparison of heads, because sizes differ from rank to rank.
        return self._begin(call, sent.new_empty(0), rounds, write, rounds, read)

    def barrier(self, timeout_s: float, what: str) -> PendingCollective:
        """Wait until every rank has arrived."""
        nothing = torch.empty(0, dtype=torch.uint8)
        call = self._call("barrier", what, timeout_s)
        return self._begin(call, nothing, 1, lambda turn, slot: None, 1, lambda turn: None)

    def close(self) -> None:
        """Leave the group; peers that still wait for this rank are notified."""
        if not self._broken and self._process == os.getpid():
            self._let_go("it was closed", failed=False)

    def _call(self, operation: str, what: str, timeout_s: float, *tensors: Tensor) -> CollectiveCall:
        call = CollectiveCall(operation, what, timeout_s)
        if self._broken:
            raise CommError(f"{self._where(call)}: the group was closed earlier: {self._broken}")
        if self._process != os.getpid():
            raise UsageError(f"{self._where(call)}: a forked process cannot use its parent's group")
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
                raise UsageError(
                    f"{self._where(call)}: expected a flat contiguous CPU tensor, got {_kind(tensor)}"
                )
        return call

    def _begin(
        self,
        call: CollectiveCall,
        tensor: Tensor,
        writes: int,
        write: Callable[[int, int], None],
        reads: int,
        read: Callable[[int], None],
        sources: Sequence[int] | None = None,
        ahead: int = 1 << 30,
    ) -> PendingCollective:
        if not writes and not reads:
            return DONE
        self._calls += 1
        text = f"{self._calls} {call.operation} of {_kind(tensor)} for {call.what}"
        head = text.encode()[:HEAD_BYTES].rstrip()
        exchange = _RingCollective(call, head, writes, write, reads, read, sources or self._peers, ahead)
        self._queue.append(exchange)
        try:
            self._fill_in_turn()
        except BaseException as error:
            self._let_go(str(error) or repr(error), failed=True)
            raise
        if len(self._queue) > 1:
            self._finish(self._queue[-2])
        return PendingCollective(lambda: self._finish(exchange))

    def _finish(self, exchange: _RingCollective) -> None:
        if exchange.ended:
            return
        if self._broken:
            raise CommError(f"{self._where(exchange.call)}: the group was closed earlier: {self._broken}")
        try:
            while not exchange.ended:
                self._complete(self._queue[0])
                self._fill_in_turn()
        except BaseException as error:
            self._let_go(str(error) or repr(error), failed=True)
            raise

    def _fill_in_turn(self) -> None:
        """Write as far as there is room; a collective's rounds come before those of the next."""
        while self._queue and self._queue[0].ended:
            self._queue.popleft()
        for exchange in self._queue:
            self._fill(exchange, blocks=False)
            if exchange.written < exchange.writes:
                return

    def _complete(self, exchange: _RingCollective) -> None:
        rings, call, sources = self._rings, exchange.call, exchange.sources
        while not exchange.ended:
            self._fill(exchange, blocks=True)
            if exchange.done < exchange.reads:
                rings.receive(sources, call)
                if exchange.done == 0:
                    self._compare(exchange)
                exchange.read(exchange.done)
                rings.release(sources)
                exchange.done += 1

    def _fill(self, exchange: _RingCollective, blocks: bool) -> None:
        """Write rounds as far as the ring has room; with ``blocks``, wait for room if nothing else can be done."""
        rings, call = self._rings, exchange.call
        while exchange.written < exchange.writes:
            unread = exchange.written - exchange.done if exchange.reads else 0
            if unread >= exchange.ahead:
                return
            slot = rings.claim(call, blocks and unread == 0)
            if slot < 0:
                return
            if exchange.written == 0:
                rings.rings[self._rank].write_head(slot, exchange.head)
            exchange.write(exchange.written, slot)
            rings.publish()
            exchange.written += 1

    def _compare(self, exchange: _RingCollective) -> None:
        """Check that the sources are in the same collective.

        Otherwise ranks would use each other's bytes as their own.
        """
        for peer in exchange.sources:
            given = self._rings.rings[peer].read_head(self._rings.at[peer])
            if given != exchange.head:
                mine, other = (head.decode(errors="replace") for head in (exchange.head, given))
                raise CommError(
                    f"{self._where(exchange.call)}: this rank is at {mine!r}, rank {self._names[peer]} at {other!r}; "
                    "all ranks must call the same collectives in the same order"
                )

    def _let_go(self, reason: str, failed: bool) -> None:
        """Leave the group for good: a rank that fails between two rounds is out of step with its peers."""
        self._broken = reason
        self._queue.clear()
        self._own.clear()
        self._theirs.clear()
        self._rings.leave(reason, failed)

    def _where(self, call: CollectiveCall) -> str:
        return f"rank {self._names[self._rank]}: {call.operation} of {call.what}"

    def _step(self, dtype: torch.dtype, parts: int) -> int:
        """Return the elements of one of ``parts`` equal pieces of a slot."""
        return self._layout.slot_bytes // parts // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES // dtype.itemsize

    def _slots(
        self, dtype: torch.dtype, parts: int
    ) -> tuple[list[tuple[Tensor, ...]], list[list[Tensor]], list[int]]:
        """Return the own slots, the peers' slots and the positions in them.

        The own slots are cut in ``parts`` parts; of every peer's slot, only this rank's part is returned.
        """
        key = (dtype, parts)
        if key not in self._own:
            step, rings = self._step(dtype, parts), self._rings.rings
            self._own[key] = [
                slot.view(dtype)[: step * parts].split(step) for slot in rings[self._rank].slots
            ]
            self._theirs[key] = []
            for peer, ring in enumerate(rings):
                place = 0 if parts == 1 else self._rank - (self._rank > peer)
                self._theirs[key].append(
                    [slot.view(dtype)[step * place : step * (place + 1)] for slot in ring.slots]
                )
        return self._own[key], self._theirs[key], self._rings.at

    def _contributions(
        self, dtype: torch.dtype, parts: Sequence[Sequence[Tensor]]
    ) -> tuple[Callable[[int, int], None], Callable[[int], list[Tensor]]]:
        """Return functions that write block i of the foreign parts and collect block i of the own part by rank."""
        own, theirs, at = self._slots(dtype, len(parts) - 1)
        peers, mine = self._peers, parts[self._rank]

        def write(block: int, slot: int) -> None:
            for place, peer in zip(own[slot], peers, strict=True):
                _copy(place, parts[peer][block])

        def gather(block: int) -> list[Tensor]:
            elements = mine[block].numel()
            collected = [theirs[peer][at[peer]][:elements] for peer in peers]
            collected.insert(self._rank, mine[block])
            return collected

        return write, gather

    def _sum(self, total: Tensor, parts: Sequence[Tensor], accumulate: bool) -> None:
        """Write the sum of ``parts``, in their order, into ``total``, or add it with ``accumulate``."""
        if len(parts) == 2 and parts[0].dtype == total.dtype and not accumulate:
            torch.add(parts[0], parts[1], out=total)
            return
        is_short = total.is_floating_point() and total.itemsize < 4
        dtype = torch.float32 if is_short else total.dtype
        # The first addition may overwrite the own part if that is one of its operands, a later one not.
        overwrites = self._rank > 1 and total.data_ptr() == parts[self._rank].data_ptr()
        here = total
        if accumulate or overwrites or dtype != total.dtype:
            here = self._temporary(dtype, total.numel())
        if parts[0].dtype == dtype:
            torch.add(parts[0], parts[1], out=here)
        else:
            here.copy_(parts[0]).add_(parts[1])
        for part in parts[2:]:
            here.add_(part)
        if accumulate:
            total.add_(here)
        elif here is not total:
            total.copy_(here)

    def _temporary(self, dtype: torch.dtype, elements: int) -> Tensor:
        if dtype not in self._scratch or self._scratch[dtype].numel() < elements:
            self._scratch[dtype] = torch.empty(elements, dtype=dtype)
        return self._scratch[dtype][:elements]


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy the bytes of the shorter tensor. One thread copies a third faster with memmove than with torch."""
    count = min(to.nbytes, source.nbytes)
    if torch.get_num_threads() == 1:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), count)
    else:
        to[: count // to.itemsize].copy_(source[: count // source.itemsize])


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a flat tensor.

    A tensor of at most one element may have any stride, which ``view`` refuses.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _split(tensor: Tensor, step: int) -> Sequence[Tensor]:
    """Return pieces of ``step`` elements, the last one shorter. ``Tensor.split`` costs 4 us even for a single piece."""
    return (tensor,) if tensor.numel() <= step else tensor.split(step)


def _cut(tensor: Tensor, parts: int, step: int) -> list[list[Tensor]]:
    """Return ``parts`` parts, as equal as possible, each in the same number of pieces of up to ``step`` elements."""
    share = -(-tensor.numel() // parts)
    blocks = range(0, share, step)
    ends = [min((part + 1) * share, tensor.numel()) for part in range(parts)]
    return [
        [tensor[min(part * share + start, end) : min(part * share + start + step, end)] for start in blocks]
        for part, end in enumerate(ends)
    ]


def _kind(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape))
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')} elements"
