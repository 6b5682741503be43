"""CacheSnapshot: the rows of a cache and of the tier below as they were at one moment, read while steps change them.

    a step changes a row for the first time   only memory has the row's line    the line is copied
                                              the tier below has it             the position of its record is noted
                                              no tier has it                    that it is drawn is noted
    the reader wants a row                    noted: the copy, the record at that position, or a start row
                                              otherwise: the row as it is, in memory or below

The tier below is only appended to, and keeps the records of a moment where they are until the snapshot is closed. So a
copy in memory is made of those rows alone that had changed and had not been written when the snapshot began: at most
as many as the cache has places.

[Note: first changes] The cache calls ``keep`` under its lock before rows change, are begun anew, or are removed. A mark
by place says that the row at a place has been noted. A row that leaves the cache loses the mark, and is noted once more
if it comes back and changes; its first note counts (first_notes.py). The reader copies lines out of memory and takes
the notes under the same lock. A row that has no note then has not changed until then, so what was copied of it, or
where its record lies, is what it was at the beginning.

Cost:   1 byte a place; 16 bytes for each row that changes and a line for those that only memory has; for the reader,
        a read of each row that is not in memory.
Shapes: n rows of one call, w bytes of a line.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import DamagedStateError
from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.tiers.first_notes import NO_NUMBER, FirstNotes, Numbers
from shardwise.tiers.place_marks import PlaceMarks

__all__ = ["CacheSnapshot", "Draw", "LineMemory", "RecordsBelow", "draw_lines"]

_BLOCK_LINES = 4096
_LOCKED_ROWS = 1 << 11
"""Number of rows that are copied out of the cache at once, while steps wait for its lock."""
_DRAWN = -1
"""Number of a row that no tier held; a position is noted as it is, and copied line i as -2 - i."""


class LineMemory(Protocol):
    """Interface of memory that holds lines by place."""

    @property
    def line_bytes(self) -> int:
        """Bytes of one line."""

    @property
    def nbytes(self) -> int:
        """Bytes of all lines."""

    def to_bytes(self, places: Tensor) -> Tensor:
        """Return the lines at places: uint8 [n, line_bytes]."""

    def from_bytes(self, places: Tensor, lines: Tensor) -> None:
        """Write lines [n, line_bytes] to places."""


class RecordsBelow(Protocol):
    """Interface of a snapshot of the tier below, as ``RowSegments.snapshot`` returns it."""

    def positions(self, rows: Tensor) -> Tensor:
        """Return the position of the newest record of each row, -1 for rows without one: int64 [n] -> [n]."""

    def read(self, rows: Tensor, positions: Tensor, out: Tensor) -> None:
        """Read the lines of records into ``out`` [n, w], also of rows that have newer records."""

    def close(self) -> None:
        """Let the tier remove records again."""


Draw = Callable[[LineMemory, Tensor, Tensor], None]
"""Function that writes the start lines of rows to places of a memory: (memory, places, rows)."""


def draw_lines(draw: Draw | None, memory: LineMemory, places: Tensor, rows: Tensor) -> None:
    """Write the start lines of rows that no tier holds to places of a memory.

    Raises:
        DamagedStateError: If rows are not drawn, because each is written before it is read.
    """
    if draw is None:
        raise DamagedStateError(
            f"rows of a dynamic table: {rows.numel()} rows, the first of them {int(rows[0])}, are in no segment; the "
            "files of the tier were changed while the run used them. Resume from a checkpoint"
        )
    draw(memory, places, rows)


class CacheSnapshot:
    """The rows of one cache at the moment at which the snapshot is made. See [Note: first changes].

    Args:
        lines: Memory of the cache.
        index: Places of the rows in memory.
        marks: Marks of the places.
        below: Snapshot of the tier below.
        lock: Lock of the cache.
        draw: Writes start lines of rows that were never written; None if every row is written before it is read.
        let_go: Function that ends the calls of ``keep``.
    """

    def __init__(
        self,
        lines: LineMemory,
        index: HashIndex,
        marks: PlaceMarks,
        below: RecordsBelow,
        lock: threading.Condition,
        draw: Draw | None,
        let_go: Callable[[], None],
    ) -> None:
        self._lines, self._index, self._marks, self._below = lines, index, marks, below
        self._lock, self._draw, self._let_go = lock, draw, let_go
        self._is_noted = np.zeros(marks.live.size, np.bool_)
        self._notes = FirstNotes()
        self._copies = _Copies(lines.line_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the marks, the notes and the copies."""
        return self._is_noted.nbytes + self._notes.nbytes + self._copies.nbytes

    # The thread that changes rows, under the lock of the cache ----------------------------------------------------

    def keep(self, rows: Tensor, places: Tensor) -> None:
        """Note rows that are about to change, unless they have been noted.

        Args:
            rows: Rows: [n].
            places: Their places in memory, -1 for rows that are not there: [n].
        """
        at = places.numpy()
        is_here = at >= 0
        lacks = ~(is_here & self._is_noted[at])
        if not lacks.any():
            return
        chosen = torch.from_numpy(lacks.nonzero()[0])
        rows, at, is_here = rows[chosen], at[lacks], is_here[lacks]
        numbers = self._below.positions(rows).numpy()
        only_here = is_here & self._marks.dirty[at]
        if only_here.any():
            first = self._copies.add(self._lines.to_bytes(torch.from_numpy(at[only_here])))
            numbers[only_here] = -2 - np.arange(first, first + int(only_here.sum()))
        self._is_noted[at[is_here]] = True
        # A row that no tier held does not exist yet if rows are not drawn.
        some = slice(None) if self._draw is not None else numbers != _DRAWN
        self._notes.add(rows.numpy()[some], numbers[some])

    def seated(self, places: Numbers) -> None:
        """Forget the marks of places that other rows get."""
        self._is_noted[places] = False

    # The thread that reads ----------------------------------------------------------------------------------------

    def read(self, rows: Tensor, memory: LineMemory) -> None:
        """Write the lines of distinct rows, as they were, to the first places of ``memory``.

        Raises:
            DamagedStateError: If the bytes of a row are not those that were written, or if it is in no tier.
            TierError: If the disk fails.
        """
        is_here, positions = np.empty(rows.numel(), np.bool_), np.empty(rows.numel(), np.int64)
        for start in range(0, rows.numel(), _LOCKED_ROWS):
            part = slice(start, start + _LOCKED_ROWS)
            is_here[part], positions[part] = self._read_memory(rows[part], memory, start)
        numbers = self._notes.find(rows.numpy())
        is_noted = numbers != NO_NUMBER
        is_live, is_copied = is_here & ~is_noted, is_noted & (numbers < _DRAWN)
        positions = np.where(is_noted, numbers, positions)
        is_below = ~is_live & ~is_copied & (positions != _DRAWN)
        is_fresh = ~is_live & ~is_copied & (positions == _DRAWN)
        if is_copied.any():
            memory.from_bytes(_places(is_copied), self._copies.lines(-2 - numbers[is_copied]))
        if is_below.any():
            some = _places(is_below)
            out = torch.empty(some.numel(), memory.line_bytes, dtype=torch.uint8)
            self._below.read(rows[some], torch.from_numpy(positions[is_below]), out)
            memory.from_bytes(some, out)
        if is_fresh.any():
            some = _places(is_fresh)
            draw_lines(self._draw, memory, some, rows[some])

    def _read_memory(self, rows: Tensor, memory: LineMemory, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Copy the lines of rows in the cache to places ``first``, ... of ``memory``, and take the new notes.

        What is copied of a row that has changed before, or that changes before the notes are asked, is overwritten.

        Returns:
            (whether each row was in the cache, position of its newest record): [n], [n].
        """
        with self._lock:
            at = self._index.find(rows).numpy()
            is_here = (at >= 0) & ~self._marks.loading[at]
            lines = self._lines.to_bytes(torch.from_numpy(at[is_here]))
            positions = self._below.positions(rows).numpy()
            added = self._notes.take()
        self._notes.sort(added)
        memory.from_bytes(_places(is_here) + first, lines)
        return is_here, positions

    def close(self) -> None:
        """End the snapshot: nothing is noted any more, and the tier below may remove records."""
        self._let_go()
        self._below.close()


def _places(mask: np.ndarray) -> Tensor:
    return torch.from_numpy(mask.nonzero()[0])


class _Copies:
    """Lines that were copied, by number. Memory comes in blocks, so that no copy is moved."""

    def __init__(self, line_bytes: int) -> None:
        self._line_bytes = line_bytes
        self._blocks: list[Tensor] = []
        self._count = 0

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._blocks)

    def add(self, lines: Tensor) -> int:
        """Add lines [n, w], and return the number of the first."""
        first, done = self._count, 0
        while done < len(lines):
            at = self._count % _BLOCK_LINES
            if at == 0:
                self._blocks.append(torch.empty(_BLOCK_LINES, self._line_bytes, dtype=torch.uint8))
            count = min(len(lines) - done, _BLOCK_LINES - at)
            self._blocks[-1][at : at + count] = lines[done : done + count]
            self._count += count
            done += count
        return first

    def lines(self, numbers: Numbers) -> Tensor:
        """Return the lines with these numbers: [n] -> [n, w]."""
        found = torch.empty(numbers.size, self._line_bytes, dtype=torch.uint8)
        blocks = numbers // _BLOCK_LINES
        for block in np.unique(blocks).tolist():
            which = torch.from_numpy((blocks == block).nonzero()[0])
            found[which] = self._blocks[block][torch.from_numpy(numbers)[which] % _BLOCK_LINES]
        return found
