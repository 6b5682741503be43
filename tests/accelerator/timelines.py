"""Timelines of the pretended device: streams, events and memory as a device with streams would have them.

A stream of a device runs its work in order, beside other streams and beside the host. Which orders are possible between
two streams follows from events alone. One run of a program shows one order; a mistake shows itself in another. So the
bench does not try orders: it proves, for every two uses of the same bytes of which one writes, that one is ordered
before the other in every run. This is the test of a race detector with vector clocks (Mattern 1989; Flanagan and
Freund, FastTrack, 2009):

    a stream s counts its operations; an operation knows, of each stream, how many operations are over before it begins
    launch          the operation knows what its stream knows, and what the host has waited for
    event           what its stream knows there; a stream or the host that waits for it knows that too
    host reads      the host knows what the stream that it reads from knows
    a use (t, k)    is ordered before an operation that knows k operations of t or more

What a stream other than the default one copies, or a communicator brings, is also late: it runs when the host has
waited for it, or when an operation that is ordered behind it uses the same memory, and its target holds NaNs until
then. That the computation's stream waits for it lets nothing run: the host is ahead of its device. So a missing wait
shows in numbers too, where bytes are read by what no bench sees (files, numpy). A late copy can be let run at once, by
chance (``Timelines.hurry``).

Memory is that of a caching allocator (torch's CUDACachingAllocator): a tensor's block belongs to the stream that made
it; the block is free when the tensor dies, at once, for the next request of that size on that stream, unless another
stream was recorded (``record_stream``): then it waits until the host knows that this stream is past the tensor's death.
Uses of a block are kept over its tenants, so memory that is given away too early is a race too.

Ranks are threads of one process; each has timelines of its own.
"""

import math
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Known = dict["Line", int]
"""Number of operations that are over, by stream."""
_ROUND = 512
"""Bytes to which the allocator rounds."""


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let one thread of a rank at a time change its timelines."""

    @wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with (self.rank if isinstance(self, Line) else self).lock:
            return method(self, *args, **kwargs)

    return locked


class Line:
    """A stream of one rank."""

    def __init__(self, rank: "RankTimelines", name: str):
        self.rank = rank
        self.name = name
        self.count = 0
        self.known: Known = {}
        self.late: deque[LateCopy] = deque()
        """Copies that have not run."""

    def __repr__(self) -> str:
        return self.name

    @_locked
    def launch(self) -> Known:
        """What a new operation on the stream knows, itself included."""
        _join(self.known, self.rank.host)
        self.count += 1
        self.known[self] = self.count
        return self.known

    @_locked
    def mark(self) -> Known:
        """What an event that is recorded now knows."""
        _join(self.known, self.rank.host)
        return dict(self.known)

    @_locked
    def learn(self, known: Known) -> None:
        """The stream has waited. What the computation waits for has run."""
        _join(self.known, known)

    def run_late(self, until: int) -> None:
        """Let the late copies run, up to a number; other threads of the rank go on while they are still to come."""
        while True:
            with self.rank.lock:
                first = self.late[0] if self.late and self.late[0].count <= until else None
            if first is None:
                return
            try:
                first.come()
                run_all({line: count for line, count in first.known.items() if line is not self})
            except BaseException:
                self._take(first)
                raise
            with (
                self.rank.lock,
                _disable_current_modes(),
            ):  # it is no operation of the thread that lets it run
                if self._take(first):
                    first.run()

    @_locked
    def _take(self, first: "LateCopy") -> bool:
        """Remove the first late copy, unless another thread has."""
        is_here = bool(self.late) and self.late[0] is first
        if is_here:
            self.late.popleft()
        return is_here

    @_locked
    def late_until(self, count: int) -> "list[LateCopy]":
        """The copies up to a number that have not run."""
        return [each for each in self.late if each.count <= count]


class LateCopy(NamedTuple):
    """A copy that has not run."""

    count: int
    """Number on its stream."""
    known: Known
    run: Callable[[], None]
    blocks: "frozenset[Block] | None"
    """Memory that it reads and writes; None: unknown."""
    come: Callable[[], None]
    """Returns when the bytes are there, which another process may send."""


def run_all(known: Known) -> None:
    """Let all late copies run that are known to be over."""
    for line, count in list(known.items()):
        if line.late:
            line.run_late(count)


def run_needed(known: Known, blocks: "Collection[Block]") -> None:
    """Let the late copies run that are known to be over and that use the same memory, and those before them."""
    for line, count in list(known.items()):
        if not line.late:
            continue
        found = [
            each.count
            for each in line.late_until(count)
            if each.blocks is None or not each.blocks.isdisjoint(blocks)
        ]
        if found:
            line.run_late(found[-1])


def _join(known: Known, other: Known) -> None:
    for line, count in other.items():
        if known.get(line, 0) < count:
            known[line] = count


class _Use(NamedTuple):
    line: Line
    count: int
    start: int
    stop: int
    writes: bool
    what: str


class Block:
    """Memory of an allocator, and its uses, over all its tenants."""

    __slots__ = ("line", "size", "users", "uses")

    def __init__(self, size: int, line: Line | None):
        self.size = size
        self.line = line
        self.uses: list[_Use] = []
        self.users: set[Line] = set()
        """Other streams that were recorded for the present tenant."""

    def use(self, use: _Use, known: Known) -> _Use | None:
        """Note a use; return one that it races with."""
        found, kept = None, []
        for each in self.uses:
            overlaps = each.start < use.stop and use.start < each.stop
            is_before = known.get(each.line, 0) >= each.count
            if overlaps and (use.writes or each.writes) and not is_before and found is None:
                found = each
            is_covered = use.start <= each.start and each.stop <= use.stop and is_before
            if not (is_covered and (use.writes or (each.line is use.line and not each.writes))):
                kept.append(each)
        kept.append(use)
        self.uses = kept
        return found


class Tenant:
    """Hangs on a storage, and gives its block back when the storage dies."""

    __slots__ = ("block", "rank")

    def __init__(self, rank: "RankTimelines", block: Block):
        self.rank = rank
        self.block = block

    def __del__(self) -> None:
        self.rank.died.append(self.block)


class RankTimelines:
    """The streams, the host and the allocator of one rank."""

    def __init__(self, races: list[str], hurry: random.Random | None):
        self.lock = threading.RLock()
        self.host: Known = {}
        self.default = Line(self, "the computation's stream")
        self._lines: dict[Any, Line] = {0: self.default}
        self._races = races
        self._hurry = hurry
        self._free: dict[tuple[int, Line], list[Block]] = defaultdict(list)
        self._waiting: list[tuple[Block, Known]] = []
        self.died: deque[Block] = deque()
        """Blocks of storages that have died; any thread may drop the last use."""
        self.stats = dict.fromkeys(("allocated", "active", "reserved"), 0)
        self.peaks = dict(self.stats)

    @_locked
    def line(self, key: Any, name: str = "stream") -> Line:
        """The stream of that key; 0 is the computation's."""
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = Line(self, f"{name} {len(self._lines)}")
        return found

    # The host ----------------------------------------------------------------------------------------------------

    def host_knows(self, known: Known) -> None:
        """The host has waited."""
        known = dict(known)
        run_all(known)
        with self.lock:
            _join(self.host, known)

    def synchronize(self) -> None:
        """The host has waited for all streams."""
        with self.lock:
            lines = list(self._lines.values())
        for line in lines:
            self.host_knows(line.mark())

    # Uses of memory ----------------------------------------------------------------------------------------------

    @_locked
    def use(
        self, line: Line, uses: Sequence[tuple[Tensor, Block, bool]], what: str, known: Known | None = None
    ) -> None:
        """Note an operation's uses: (tensor, block, whether it writes). ``known`` is that of the operation."""
        known = line.launch() if known is None else known
        for tensor, block, writes in uses:
            start, stop = _bytes_of(tensor)
            if start == stop:
                continue
            other = block.use(_Use(line, line.count, start, stop, writes, what), known)
            if other is not None and other.line.rank is self:
                self._tell(_text(writes, what, line), other)

    @_locked
    def host_use(self, tensor: Tensor, block: Block, writes: bool, what: str) -> None:
        """The host uses memory that a device copies from or to."""
        start, stop = _bytes_of(tensor)
        for each in block.uses:
            overlaps = each.start < stop and start < each.stop and each.line.rank is self
            if overlaps and (writes or each.writes) and self.host.get(each.line, 0) < each.count:
                self._tell(_text(writes, what, "the host"), each)
                return

    def _tell(self, text: str, other: _Use) -> None:
        told = f"{text}, not ordered behind {_text(other.writes, other.what, other.line)}"
        if told not in self._races:
            self._races.append(told)

    def copy(
        self,
        line: Line,
        known: Known,
        run: Callable[[], None],
        target: Tensor | None,
        blocks: frozenset[Block] | None = None,
        come: Callable[[], None] = lambda: None,
    ) -> None:
        """Let a copy run: at once on the computation's stream, else late; ``target`` is host memory of its bytes."""
        known = dict(known)
        with self.lock:
            is_late = line is not self.default and (self._hurry is None or self._hurry.random() >= 0.5)
            if is_late:
                if target is not None:
                    poison(target)
                line.late.append(LateCopy(known[line], known, run, blocks, come))
        if not is_late:
            come()
            run_all(known)
            with _disable_current_modes():
                run()

    # The allocator -----------------------------------------------------------------------------------------------

    @_locked
    def take(self, nbytes: int, line: Line) -> Tenant:
        """Memory for a new storage that is made on a stream."""
        self._settle()
        size = max(-(-nbytes // _ROUND) * _ROUND, _ROUND)
        free = self._free[size, line]
        if free:
            block = free.pop()
            block.users = set()
        else:
            block = Block(size, line)
            self._count("reserved", size)
        self._count("allocated", size)
        self._count("active", size)
        return Tenant(self, block)

    def _settle(self) -> None:
        while self.died:
            block = self.died.popleft()
            self._count("allocated", -block.size)
            others = {line: line.count for line in block.users if line is not block.line}
            self._waiting.append((block, others))
        left = []
        for block, others in self._waiting:
            if any(self.host.get(line, 0) < count for line, count in others.items()):
                left.append((block, others))
                continue
            self._count("active", -block.size)
            assert block.line is not None, "blocks of a device have a stream"
            self._free[block.size, block.line].append(block)
        self._waiting = left

    def _count(self, what: str, nbytes: int) -> None:
        self.stats[what] += nbytes
        self.peaks[what] = max(self.peaks[what], self.stats[what])

    @_locked
    def reset_peaks(self) -> None:
        """Peaks from now on."""
        self._settle()
        self.peaks = dict(self.stats)

    @_locked
    def memory_stats(self) -> dict[str, int]:
        """As torch names them."""
        self._settle()
        rows = {f"{what}_bytes.all.current": size for what, size in self.stats.items()}
        return rows | {f"{what}_bytes.all.peak": size for what, size in self.peaks.items()}


class Timelines:
    """Those of all ranks of a job, and the races that were found.

    ``hurry``: a seed by which some late copies run at once; None: each is as late as it may be.
    """

    def __init__(self, hurry: int | None = None):
        self.races: list[str] = []
        self._hurry = None if hurry is None else random.Random(hurry)
        self._ranks: dict[int, RankTimelines] = {}

    def of(self, rank: int) -> RankTimelines:
        """Those of a rank."""
        found = self._ranks.get(rank)
        if found is None:
            found = self._ranks.setdefault(rank, RankTimelines(self.races, self._hurry))
        return found


class Where(threading.local):
    """Rank and streams of the running thread."""

    rank = 0
    streams: tuple[Any, ...] = ()


WHERE = Where()


def poison(host: Tensor) -> None:
    """Fill memory whose bytes are still to come."""
    if host.dtype.is_floating_point or host.dtype.is_complex:
        host.fill_(math.nan)
    elif host.dtype is not torch.bool:
        host.fill_(0x5A)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """First and behind the last byte of a tensor in its storage."""
    if not tensor.numel():
        return 0, 0
    first = tensor.storage_offset() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


def _text(writes: bool, what: str, line: Any) -> str:
    return f"{what} {'writes' if writes else 'reads'} on {line}"
