"""RowCache: the rows of embedding tables that are in memory, above segments on a disk that hold all other rows.

    lines     [P, bytes of a line]          memory of P rows, each with its optimizer state, by place
    index     row -> place                  a hash table of the rows in memory
    segments  row -> line on a disk         tiers/row_segments.py
    a row that is in neither is drawn       the start row of a static table follows from its key

A row keeps its number; its place is the line of memory in which the row is now. ``lend`` returns the places of rows,
after it has brought those that are missing. Places that the last ``lend`` has returned, and places that ``read_ahead``
fills, are not given to other rows. Rows that the running step has used leave the cache only if no other row can.

[Note: two threads on one cache] The caller's thread lends, changes, overwrites and removes rows; one other thread may
read ahead. Everything that is noted of places changes under one lock. ``read_ahead`` reads from the segments without
the lock, into places that are marked as loading; whoever needs such a row waits until it is there. A changed row that
leaves the cache is written under the lock, before its place is given away, so that nobody reads an older line of it.
If a read or a write fails, the cache stays as it was: a row without its line gets no place, and a row that was not
written keeps its place. A third thread may read a snapshot, which sees the rows as they were (cache_snapshot.py).

Replacement: a second-chance clock. A hand moves over the places; it passes a row that was used since it last came, and
removes a row that was not. Rows leave in batches, and the changed ones of a batch are written in one request, sorted
by ``order``: what a save reads together then lies together on the disk.

Paper: Zhao et al. 2020, arXiv:2003.05622 (hierarchical parameter server).
Cost:  a lookup of each row, a read of each missing row, a write of each changed row that leaves; beside the lines about
       60 bytes a place.
Shapes: N rows of one call, P places.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.kernels.tables.unique import unique
from shardwise.tiers.cache_snapshot import CacheSnapshot, Draw, LineMemory, RecordsBelow, draw_lines
from shardwise.tiers.place_marks import PlaceMarks

LEAVING_PARTS = 64
"""Part of the places, as a divisor, that is freed beyond what is needed when rows leave."""
_COMPACTED = 2
"""Bytes that the tier below may move for each byte written."""
_WINDOW = 4096
"""Fewest places that the hand of the clock looks at together."""


class LinesBelow(Protocol):
    """Interface of the tier below the cache, which ``RowSegments`` has."""

    def write(self, rows: Tensor, lines: Tensor) -> None:
        """Keep the lines [n, line_bytes] of rows [n]."""

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Read the lines of rows into ``out`` [n, line_bytes]."""

    def holds(self, rows: Tensor) -> Tensor:
        """Return a mask of the rows that are held: bool [n]."""

    def remove(self, rows: Tensor) -> None:
        """Forget rows; those that are not held are ignored."""

    def compact(self, most_bytes: int) -> int:
        """Move at most this many live bytes out of segments that are mostly dead, and return the number moved."""

    def snapshot(self) -> RecordsBelow:
        """Return a snapshot, until whose end all records stay where they are."""


Memory = TypeVar("Memory", bound=LineMemory)
Order = Callable[[Tensor], Tensor]
"""Function that returns a number for each row, by which rows are sorted: int64 [n] -> [n]."""


class _Owner(NamedTuple):
    """The functions that a cache calls to learn about its rows."""

    draw: Draw | None
    order: Order | None


@dataclass
class CacheFigures:
    """Counts of one cache since they were last taken."""

    hits: int = 0
    """Rows that were in memory when a pass needed them."""
    misses: int = 0
    """Rows that a pass waited for: read from segments, or drawn."""
    read_ahead: int = 0
    """Rows that were read or drawn ahead of the pass that needs them."""
    written: int = 0
    """Changed rows that left the cache."""
    stall_s: float = 0.0
    """Seconds that passes waited for missing rows."""

    def __add__(self, other: "CacheFigures") -> "CacheFigures":
        pairs = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return CacheFigures(**pairs)


class RowCache(Generic[Memory]):
    """The rows in memory of one group of tables on one rank. See [Note: two threads on one cache].

    Args:
        lines: memory of the lines.
        window: memory of some lines, for copies of rows that do not enter the cache.
        places: number of lines.
        below: the tier below.
        draw: writes start lines of rows that were never written; None if every row is written before it is read, as
            those of dynamic tables are.
        order: returns the number by which each row is sorted before rows are written to the tier below together, so
            that rows that a save reads together lie together; None writes them as they come.
    """

    def __init__(
        self,
        lines: Memory,
        window: Memory,
        places: int,
        below: LinesBelow,
        draw: Draw | None,
        order: Order | None = None,
    ) -> None:
        if places < 1:
            raise ValueError(f"a cache of {places} rows; expected at least 1")
        self.lines = lines
        self.window = window
        self.places = places
        self.below = below
        self._owner = _Owner(draw, order)
        self._figures = CacheFigures()
        self._changed = threading.Condition()
        self._reads = threading.Lock()
        self._hand = 0
        self._call = 0
        self._step = 0
        self._to_compact = 0
        """Rows written since the tier below was last compacted."""
        self._index = HashIndex(places, places)
        self._marks = PlaceMarks(places)
        self._snapshot: CacheSnapshot | None = None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of the index, of what is noted of places, and of the window."""
        return self._index.nbytes + self._marks.nbytes + self.window.nbytes

    # Lending -----------------------------------------------------------------------------------------------------

    def lend(self, rows: Tensor, *, changes: bool = False, learns: bool = False) -> Tensor:
        """Return the places of rows, which stay there until the next call: int64 [N] -> [N].

        Args:
            rows: rows, possibly repeated; at most as many distinct ones as there are places.
            changes: True if the caller will change the lines.
            learns: True if the running step will update the rows.
        """
        with self._changed:
            self._call += 1
            places, absent = self._with_room(rows)
            missed = int(np.count_nonzero(absent))
            self._figures.hits += rows.numel() - missed
            step, at = self._step, places.numpy()
            again = at if not missed else at[~absent]
            if changes:
                self._keep(rows[torch.from_numpy(~absent)], torch.from_numpy(again))
            self._marks.use(again, step, changes=changes, learns=learns, is_new=False)
            if missed:
                some = rows[torch.from_numpy(absent)]
                missing = unique(some).keys
                self._figures.misses += missing.numel()
                with self._stalls():
                    self._bring(missing)
                at[absent] = self._index.find(some).numpy()
                if changes:
                    self._keep(some, torch.from_numpy(at[absent]))
                self._marks.use(at[absent], step, changes=changes, learns=learns, is_new=True)
                self._marks.held[at[absent]] = self._call
            return places

    def begin(self, rows: Tensor) -> Tensor:
        """Return places for distinct rows whose lines the caller writes anew: int64 [N] -> [N]."""
        with self._changed:
            self._call += 1
            places, absent = self._with_room(rows)
            at = places.numpy()
            if absent.any():
                at[absent] = self._seated(rows[torch.from_numpy(absent)]).numpy()
            self._keep(rows, places)
            self._marks.held[at] = self._call
            self._marks.dirty[at] = True
            self._marks.step[at] = self._step
            return places

    def _with_room(self, rows: Tensor) -> tuple[Tensor, npt.NDArray[np.bool_]]:
        """Return the places of rows and a mask of those that are not in memory, when there is room for these."""
        while True:
            places = self._settled(rows)
            absent = places.numpy() < 0
            count = len(unique(rows[torch.from_numpy(absent)]).keys) if absent.any() else 0
            if self._make_room(count):
                return places, absent

    def _settled(self, rows: Tensor) -> Tensor:
        """Return the place of each row, -1 if it is not in memory, after places that are being filled are filled.

        The places are held from now on.
        """
        while True:
            places = self._index.find(rows)
            if self._marks.hold(places.numpy(), self._call):
                return places
            with self._stalls():
                self._changed.wait()

    def _bring(self, rows: Tensor) -> None:
        """Bring distinct rows that are not in memory into free places."""
        places = self._seated(rows)
        try:
            self._fill(self.lines, places, rows)
        except BaseException:
            self._unseat(rows, places)
            raise

    def _seated(self, rows: Tensor) -> Tensor:
        """Give free places to distinct rows that have none."""
        places, _ = self._index.find_or_insert(rows)
        at = places.numpy()
        if self._snapshot is not None:
            self._snapshot.seated(at)
        self._marks.live[at], self._marks.step[at] = True, -1
        self._marks.dirty[at] = self._marks.recent[at] = False
        self._marks.held[at] = self._call
        return places

    def _unseat(self, rows: Tensor, places: Tensor) -> None:
        self._index.remove(rows)
        at = places.numpy()
        self._marks.live[at] = self._marks.dirty[at] = self._marks.loading[at] = False
        self._marks.held[at] = -1

    def _fill(self, memory: LineMemory, places: Tensor, rows: Tensor) -> None:
        """Write the lines of rows that are not in memory to places of ``memory``."""
        held = self.below.holds(rows)
        stored = rows[held]
        if stored.numel():
            out = torch.empty(stored.numel(), memory.line_bytes, dtype=torch.uint8)
            with self._reads:
                self.below.read(stored, out)
            memory.from_bytes(places[held], out)
        if stored.numel() < rows.numel():
            draw_lines(self._owner.draw, memory, places[~held], rows[~held])

    @contextmanager
    def _stalls(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._figures.stall_s += time.perf_counter() - started

    # Leaving -----------------------------------------------------------------------------------------------------

    def _make_room(self, count: int) -> bool:
        """Free places until ``count`` are free.

        Returns:
            False if the call had to wait for another thread, so that rows may have come and gone since.
        """
        while (lack := count - (self.places - len(self._index))) > 0:
            if not self._leave(lack, self.places // LEAVING_PARTS, self._step) and not self._leave(
                lack, 0, None
            ):
                assert self._marks.loading.any(), f"{count} rows for {self.places} places"
                with self._stalls():
                    self._changed.wait()
                return False
        return True

    def _leave(self, count: int, more: int, before: int | None) -> int:
        """Remove ``count`` rows from memory, and up to ``more``, after writing the changed ones; return the number.

        Args:
            count: number of rows that must leave.
            more: number of further rows that may leave in the same batch.
            before: rows of this step and of later ones stay; None lets them leave.
        """
        places = self._victims(count + more, before)
        if places.size:
            self._write_changed(places)
            rows = self._index.keys_of(torch.from_numpy(places))
            self._index.remove(rows)
            self._marks.live[places] = False
        return places.size

    def _write_changed(self, places: np.ndarray) -> None:
        """Write the changed lines at ``places`` to the tier below."""
        dirty = torch.from_numpy(places[self._marks.dirty[places]])
        if dirty.numel():
            rows = self._index.keys_of(dirty)
            if self._owner.order is not None:
                by = self._owner.order(rows).argsort()
                rows, dirty = rows[by], dirty[by]
            self.below.write(rows, self.lines.to_bytes(dirty))
            self._marks.dirty[dirty.numpy()] = False
            self._figures.written += dirty.numel()
            self._to_compact += dirty.numel()

    def _victims(self, count: int, before: int | None) -> np.ndarray:
        """Return up to ``count`` places whose rows may leave, and move the hand of the clock."""
        marks, found, left = self._marks, [], count
        seen, window = 0, max(_WINDOW, 4 * count)
        while left > 0 and seen < 2 * self.places:
            stop = min(self._hand + window, self.places)
            part = slice(self._hand, stop)
            may = marks.live[part] & ~marks.loading[part] & (marks.held[part] != self._call)
            if before is not None:
                may &= marks.step[part] < before
            old = np.flatnonzero(may & ~marks.recent[part])
            if old.size > left:
                old = old[:left]
                stop = self._hand + int(old[-1]) + 1
            marks.recent[self._hand : stop] = False
            found.append(old + self._hand)
            # A second turn of the hand must not find the same places again.
            marks.recent[found[-1]] = True
            left -= old.size
            seen += stop - self._hand
            self._hand = 0 if stop == self.places else stop
        places = np.concatenate(found) if found else np.empty(0, np.int64)
        return np.unique(places)

    # Reading ahead -----------------------------------------------------------------------------------------------

    def read_ahead(self, rows: Tensor, steps: int = 1) -> int:
        """Bring distinct rows into memory that a later step needs, as far as there is room; return the number brought.

        Rows that the running step or an earlier reading ahead needs stay. Another thread than the one that lends may
        call this method.

        Args:
            rows: distinct rows: [N].
            steps: number of steps after the running one in which the rows are needed.
        """
        with self._changed:
            places = self._index.find(rows)
            at = places.numpy()[places.numpy() >= 0]
            self._marks.step[at] = np.maximum(self._marks.step[at], self._step + steps)
            self._marks.recent[at] = True
            missing = rows[places < 0]
            if self._owner.draw is None:
                missing = missing[self.below.holds(missing)]
            free = self.places - len(self._index)
            if missing.numel() > free:
                free += self._leave(missing.numel() - free, self.places // LEAVING_PARTS, self._step)
            missing = missing[:free]
            if not missing.numel():
                return 0
            places = self._seated(missing)
            at = places.numpy()
            self._marks.held[at] = -1
            self._marks.loading[at] = True
            self._marks.step[at] = self._step + steps
        try:
            self._fill(self.lines, places, missing)
        except BaseException:
            with self._changed:
                self._unseat(missing, places)
                self._changed.notify_all()
            raise
        with self._changed:
            self._marks.loading[at] = False
            self._figures.read_ahead += missing.numel()
            self._changed.notify_all()
        return missing.numel()

    # Copies ------------------------------------------------------------------------------------------------------

    def copy(self, rows: Tensor, memory: LineMemory) -> None:
        """Write the lines of distinct rows to the first places of ``memory``; no row enters or leaves the cache."""
        with self._changed:
            self._call += 1
            places = self._settled(rows)
            here = places >= 0
            index = torch.arange(rows.numel())
            if bool(here.any()):
                memory.from_bytes(index[here], self.lines.to_bytes(places[here]))
            if not bool(here.all()):
                self._fill(memory, index[~here], rows[~here])

    def overwrite(self, rows: Tensor, memory: LineMemory, at: Tensor) -> None:
        """Replace the lines of distinct rows by those at places ``at`` of ``memory``; no row enters or leaves."""
        with self._changed:
            self._call += 1
            places = self._settled(rows)
            self._keep(rows, places)
            here = places >= 0
            if not bool(here.all()):
                self.below.write(rows[~here], memory.to_bytes(at[~here]))
            if bool(here.any()):
                self.lines.from_bytes(places[here], memory.to_bytes(at[here]))
                self._marks.dirty[places[here].numpy()] = True

    def remove(self, rows: Tensor) -> None:
        """Forget rows, here and below; unknown rows are ignored."""
        if not rows.numel():
            return
        with self._changed:
            places = self._settled(rows)
            self._keep(rows, places)
            here = places >= 0
            if bool(here.any()):
                self._unseat(rows[here], places[here])
            self.below.remove(rows)

    # Snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> CacheSnapshot:
        """Return the rows as they are now, which another thread may read until it is closed; one at a time."""
        with self._changed:
            assert self._snapshot is None, "a cache has one snapshot at a time"
            self._snapshot = CacheSnapshot(
                self.lines,
                self._index,
                self._marks,
                self.below.snapshot(),
                self._changed,
                self._owner.draw,
                self._end_snapshot,
            )
            return self._snapshot

    def _end_snapshot(self) -> None:
        with self._changed:
            self._snapshot = None

    def _keep(self, rows: Tensor, places: Tensor) -> None:
        """Keep rows that are about to change as they were for the snapshot, if there is one."""
        if self._snapshot is not None:
            self._snapshot.keep(rows, places)

    # Steps -------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End the running step, whose rows may leave now, and let the tier below compact as much as was written."""
        with self._changed:
            self._step += 1
            self._call += 1
            if self._to_compact:
                self.below.compact(_COMPACTED * self._to_compact * self.lines.line_bytes)
                self._to_compact = 0

    def take_figures(self) -> CacheFigures:
        """Return the counts since the last call, and begin new ones."""
        with self._changed:
            found, self._figures = self._figures, CacheFigures()
            return found


def bytes_beside(places: int) -> int:
    """Return the bytes of the index and the marks of a full cache of ``places`` rows.

    Its lines and its window are left out. The rows that leave in one batch beyond those that are needed wait in the
    index for other rows.
    """
    return PlaceMarks.BYTES * places + HashIndex.bytes_for(places, places // LEAVING_PARTS)
