"""Rows of embedding tables on disk: append-only segments below the rows in memory.

    write       rows -> block in memory -> (full) segment file     a row that is written again gets a new record
    read        rows -> index -> positions, sorted -> requests on threads -> lines
    compact     the segment with the least rows -> its rows are appended again -> the file is removed

    index       row -> position of its newest record, in memory (``segment_index.py``)
    segment     file of blocks of records with a CRC each (``segment_file.py``, ``kernels/tables/records.py``)

A row in the block that is not full yet is read from memory. A row that no segment holds is new: its caller draws its
start weights, and nothing is written at the start.

Every record to which the index refers is right or raises: CRC, row and order number are compared before a line is
handed out. What compaction appends replaces a row only if the row still lies where compaction read it, so a row that
was removed or written meanwhile does not come back.

Disk space stays below 2 times the bytes of the rows held, and two segments: ``compact``, called once a step, begins at
a lower bound; beyond ``_MUST_AT`` each write first compacts a few times as many bytes as it brings. While a snapshot is
open nothing is compacted, and what is written meanwhile comes on top.

The files are scratch: the folder's seat removes them at the end, and the next run those of a killed one. If the disk
fails, training resumes from a checkpoint, never from these files.

Papers: Rosenblum and Ousterhout 1992, The Design and Implementation of a Log-Structured File System (segments and their
       cleaning); Sheehy and Smith 2010, Bitcask (an index of all keys in memory over a log).
Cost:  a write of 12 bytes and the line for each row, and at most about 4 times as much for compaction; 4 bytes of
       memory a row; a block of 1 MiB in memory; for a read, see ``segment_reader.py``.
Shapes: n rows of one call, lines of w bytes.
"""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.base.errors import TierError
from shardwise.kernels.tables import records
from shardwise.kernels.tables.records import Bytes, Numbers, lines_in, pack
from shardwise.memory import page_reads
from shardwise.memory.direct_io import aligned_empty, bytes_of
from shardwise.memory.leftovers import LEFTOVERS
from shardwise.tiers.scratch_folder import ScratchFolder
from shardwise.tiers.segment_compaction import SegmentCompaction
from shardwise.tiers.segment_file import SegmentFile, SegmentFiles, records_of, shape_for
from shardwise.tiers.segment_index import RowPositions
from shardwise.tiers.segment_reader import SegmentReader
from shardwise.tiers.segment_snapshot import RowSnapshot

__all__ = ["TABLE_DISK", "RowSegments", "SegmentFigures"]

TABLE_DISK = "tables.defaults.tiers.disk"
"""Key of the configuration that names the folder of rows on disk."""
_THREADS = 4
_BEGIN_AT, _MUST_AT = 1.4, 1.75
"""Bytes on disk over bytes of rows held, above which ``compact`` does something, and above which a write does."""
_BYTES_A_BYTE = 4
"""Bytes that a write compacts for each byte that it brings."""
_EXIT_PATIENCE_S = 30.0
_SNAPSHOT_DEPTH = 8
"""Most requests of a snapshot under way together: an eighth of those of steps, which read beside it."""


@dataclass(frozen=True)
class SegmentFigures:
    """Sizes and counts of the segments of one table group."""

    rows: int = 0
    """Rows held."""
    live_bytes: int = 0
    """Bytes of the records of these rows."""
    disk_bytes: int = 0
    """Bytes of the files."""
    index_bytes: int = 0
    """Bytes of memory of the index."""
    buffer_bytes: int = 0
    """Bytes of memory of the block that is not full, and of the memory that is kept for compaction and for reads."""
    rows_read: int = 0
    rows_written: int = 0
    requests: int = 0
    """Requests of reads to the disk."""
    bytes_read: int = 0
    """Bytes of these requests."""
    bytes_written: int = 0
    """Bytes of the blocks that were written, for compaction too."""
    bytes_compacted: int = 0
    """Bytes that compaction has read."""
    read_s: float = 0.0
    """Seconds in ``read``."""
    write_s: float = 0.0
    """Seconds in ``write``, with the compaction that it does."""
    compact_s: float = 0.0
    """Seconds in ``compact``."""


class RowSegments:
    """Rows of one table group on disk, each a line of bytes.

    One thread may read while another writes; writes, ``remove`` and ``compact`` may come from different threads.

    Args:
        path: Folder of the files.
        name: Name of the table group for errors, such as ``table 'clicks'``.
        line_bytes: Bytes of a line.
        rows: The most rows; row numbers lie below it. It may be far more than there will be.
        rank: Number of the rank.
        local_ranks: Number of ranks on this host.
        key: Key of the configuration that names the folder, for errors.
        segment_bytes: Bytes of a segment; None chooses by the number of rows.
        block_bytes: Bytes of a block, written at once; None chooses 1 MiB.
        threads: Number of read requests under way at once.

    Raises:
        ConfigError: If the folder is missing or cannot hold files.
        UsageError: If another run uses the folder; the error names that run.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        line_bytes: int,
        rows: int,
        rank: int = 0,
        local_ranks: int = 1,
        *,
        key: str = TABLE_DISK,
        segment_bytes: int | None = None,
        block_bytes: int | None = None,
        threads: int = _THREADS,
    ) -> None:
        """Claim a seat in the folder and remove the files of dead runs."""
        records.compile_loops()
        page_reads.compile_loops()
        self.line_bytes = line_bytes
        self.name = name
        self.shape = shape_for(line_bytes, rows, segment_bytes, block_bytes)
        """Sizes of records, blocks and segments."""
        self._index = RowPositions(rows)
        folder = ScratchFolder(path, rank, local_ranks, key)
        self._files = SegmentFiles(folder, name, key, self.shape)
        self._reader = SegmentReader(self._files, self.shape, threads)
        self._state = threading.Condition()
        """Lock of index, block, pins and figures, held for copies in memory and never for a request to the disk."""
        self._writing = threading.RLock()
        """Lock of whoever appends; taken before ``_state``."""
        self._tail = _Tail(bytes_of(aligned_empty(self.shape.block_bytes, torch.uint8).zero_()))
        self._compaction = SegmentCompaction(self._files, self.shape)
        self._snapshots: list[RowSnapshot] = []
        self._figures = SegmentFigures()
        self._reads = 0
        """Reads under way."""
        self._end = LEFTOVERS.keep(self, folder.end, at_exit=True)
        self._is_closed = False

    # Rows in and out ---------------------------------------------------------------------------------------------

    def write(self, rows: Tensor, lines: Tensor) -> None:
        """Write the lines of rows, each named once; they can be read at once.

        After an error the caller must keep its rows and may call again with the same ones: each row is then read as it
        was before the call or as given to it.

        Args:
            rows: Rows, int64 on the CPU: [n].
            lines: Their lines, uint8 on the CPU: [n, w].

        Raises:
            TierError: If the disk is full or fails.
            DamagedStateError: If compaction, which makes room for the rows, finds a damaged segment.
        """
        begin = time.perf_counter()
        numbers, given = self._checked(rows), self._checked_lines(rows, lines)
        with self._writing:
            self._refuse_if_closed()
            if numbers.size:
                self._compact(_BYTES_A_BYTE * numbers.size * self.shape.record_bytes, _MUST_AT)
                self._append(numbers, given)
            with self._state:
                now = self._figures
                self._figures = replace(
                    now,
                    rows_written=now.rows_written + numbers.size,
                    write_s=now.write_s + time.perf_counter() - begin,
                )

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Read the lines of rows that segments hold.

        Args:
            rows: Rows, int64 on the CPU: [n]. All of them must be held.
            out: Memory for the lines, contiguous uint8 on the CPU: [n, w].

        Raises:
            DamagedStateError: If the bytes of a row are not those that were written; the error names the segment.
            TierError: If the disk fails.
        """
        self._read(self._reader, rows, None, out)

    def _read(self, reader: SegmentReader, rows: Tensor, at: Tensor | None, out: Tensor) -> None:
        """Read the lines of rows from their newest records, or from records at positions ``at``."""
        begin = time.perf_counter()
        numbers, into = self._checked(rows), self._checked_lines(rows, out)
        with self._state:
            self._refuse_if_closed()
            positions = self._index.find(numbers) if at is None else at.numpy()
            self._assert_held(numbers, positions)
            first, end = self._tail_positions()
            is_here = (positions >= first) & (positions < end)
            into[is_here] = lines_in(
                records_of(self._tail.block, self.shape)[positions[is_here] - first], self.line_bytes
            )
            away = np.flatnonzero(~is_here)
            pinned = self._files.pin(np.unique(positions[away] // self.shape.per_segment).tolist())
            self._reads += 1
        try:
            reader.read(pinned, positions[away], numbers[away], into, away)
        finally:
            with self._state:
                free = self._files.unpin(pinned.values())
                self._reads -= 1
                now = self._figures
                self._figures = replace(
                    now,
                    rows_read=now.rows_read + numbers.size,
                    read_s=now.read_s + time.perf_counter() - begin,
                )
                self._state.notify_all()
            self._files.remove(free)

    def holds(self, rows: Tensor) -> Tensor:
        """Return a mask of the rows that segments hold: int64 [n] -> bool [n]."""
        with self._state:
            return torch.from_numpy(self._index.find(self._checked(rows)) >= 0)

    def remove(self, rows: Tensor) -> None:
        """Forget rows; rows that no segment holds are ignored."""
        numbers = np.unique(self._checked(rows))
        with self._state:
            self._refuse_if_closed()
            self._put(numbers, np.full(numbers.size, -1))

    def rows_held(self) -> int:
        """Return the number of rows that segments hold."""
        with self._state:
            return len(self._index)

    def snapshot(self) -> RowSnapshot:
        """Return a snapshot, until whose end all records stay where they are, and nothing is compacted."""
        with self._state:
            self._refuse_if_closed()
            reader = SegmentReader(self._files, self.shape, 1, _SNAPSHOT_DEPTH)
            made = RowSnapshot(self._positions, self._read, reader, self._let_go)
            self._snapshots.append(made)
        return made

    def _positions(self, rows: Tensor) -> Tensor:
        """Return the position of the newest record of each row, -1 for rows without one: int64 [n] -> [n]."""
        with self._state:
            return torch.from_numpy(self._index.find(self._checked(rows)))

    # Upkeep ------------------------------------------------------------------------------------------------------

    def compact(self, most_bytes: int) -> int:
        """Free disk space that no row uses, if it is worth it; called once a step.

        Args:
            most_bytes: Bytes to read and to append again, at most, up to one block.

        Returns:
            The bytes that were read and appended.

        Raises:
            DamagedStateError: If a segment is damaged.
            TierError: If the disk is full or fails; no row is lost.
        """
        begin = time.perf_counter()
        with self._writing:
            self._refuse_if_closed()
            done = self._compact(most_bytes, _BEGIN_AT)
            with self._state:
                now = self._figures
                self._figures = replace(now, compact_s=now.compact_s + time.perf_counter() - begin)
        return done

    def figures(self) -> SegmentFigures:
        """Return sizes and counts of the segments."""
        with self._state:
            return replace(
                self._figures,
                rows=len(self._index),
                live_bytes=len(self._index) * self.shape.record_bytes,
                disk_bytes=self._files.disk_bytes,
                index_bytes=self._index.nbytes,
                buffer_bytes=self._tail.block.nbytes + self._compaction.nbytes + self._reader.nbytes,
                requests=self._reader.requests,
                bytes_read=self._reader.bytes_read,
                bytes_compacted=self._compaction.bytes_read,
            )

    def close(self) -> None:
        """Remove the files after the reads and writes under way; a second call does nothing."""
        with self._writing, self._state:
            self._is_closed = True
            self._state.wait_for(lambda: not self._reads, _EXIT_PATIENCE_S)
        self._reader.close()
        self._end()

    # Appending ---------------------------------------------------------------------------------------------------

    def _append(self, rows: Numbers, lines: Bytes, moved_from: Numbers | None = None) -> None:
        """Append records; with ``moved_from``, only of rows that still have that position."""
        tail, shape = self._tail, self.shape
        done = 0
        while done < rows.size:
            self._make_room()
            assert tail.segment is not None, "room is in a segment"
            count = min(rows.size - done, shape.per_block - tail.count)
            some = slice(done, done + count)
            number = tail.number * shape.per_block + tail.count
            into = records_of(tail.block, shape)[tail.count : tail.count + count]
            pack(into, rows[some], lines[some], self._files.order(tail.segment.slot, number))
            with self._state:
                first = tail.segment.slot * shape.per_segment + number
                positions = np.arange(first, first + count)
                tail.count += count
                if moved_from is None:
                    self._put(rows[some], positions)
                else:
                    stayed = self._index.find(rows[some]) == moved_from[some]
                    self._put(rows[some][stayed], positions[stayed])
            done += count

    def _make_room(self) -> None:
        """Write the block if it is full, and begin the next one."""
        tail, shape = self._tail, self.shape
        number, segment = tail.number, tail.segment
        if segment is not None:
            if tail.count < shape.per_block:
                return
            self._files.write_block(segment, number, tail.block)
            number += 1
            with self._state:
                now = self._figures
                self._figures = replace(now, bytes_written=now.bytes_written + shape.block_bytes)
        if segment is None or number == shape.blocks:
            segment, number = self._files.begin(), 0
            with self._state:
                self._files.add(segment)
        with self._state:
            tail.segment, tail.number, tail.count = segment, number, 0

    def _put(self, rows: Numbers, positions: Numbers) -> None:
        """Give rows new positions, and count the records of each segment to which the index refers."""
        before = self._index.put(rows, positions)
        assert np.array_equal(self._index.find(rows), positions), "rows of a call are named once"
        live, size = self._files.live, self.shape.per_segment
        came, went = positions[positions >= 0], before[before >= 0]
        live += np.bincount(came // size, minlength=live.size) - np.bincount(
            went // size, minlength=live.size
        )

    def _tail_positions(self) -> tuple[int, int]:
        """Return the first position of the block in memory, and the one behind its last record."""
        tail = self._tail
        if tail.segment is None:
            return 0, 0
        first = tail.segment.slot * self.shape.per_segment + tail.number * self.shape.per_block
        return first, first + tail.count

    def _load_block(self, segment: SegmentFile, number: int, into: Bytes) -> None:
        """Fill memory with a block of a segment, from memory if it is not on the disk yet."""
        with self._state:
            if segment is self._tail.segment and number == self._tail.number:
                into[:] = self._tail.block
                return
        self._files.read_pages(segment, into, number * self.shape.block_bytes)

    # Compaction --------------------------------------------------------------------------------------------------

    def _compact(self, most_bytes: int, at: float) -> int:
        """Compact while there is too much on the disk, up to a number of bytes; return the bytes read and appended."""
        done = 0
        while done < most_bytes:
            with self._state:
                if self._snapshots or not self._is_wasteful(at):
                    return done
                victim = self._compaction.chosen(self._tail.segment)
            if victim is None:
                return done
            kept = self._compaction.next_block(victim, self._load_block, self._lives)
            if kept is not None:
                self._append(kept.rows, kept.lines, kept.positions)
                done += self.shape.block_bytes + kept.rows.size * self.shape.record_bytes
            with self._state:
                free = self._compaction.end_of_block(victim)
            self._files.remove(free)
        return done

    def _lives(self, rows: Numbers, positions: Numbers) -> npt.NDArray[np.bool_]:
        with self._state:
            return self._index.refers(rows, positions)

    def _is_wasteful(self, at: float) -> bool:
        if self._compaction.is_under_way:
            return True
        live_bytes = len(self._index) * self.shape.record_bytes
        return self._files.disk_bytes > at * live_bytes + self.shape.segment_bytes

    # Checks ------------------------------------------------------------------------------------------------------

    def _let_go(self, snapshot: RowSnapshot) -> None:
        with self._state:
            self._snapshots.remove(snapshot)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise TierError(f"{self.name}: its rows on disk were closed; build the engine again to use them")

    def _checked(self, rows: Tensor) -> Numbers:
        assert rows.dtype == torch.int64 and rows.dim() == 1, f"rows are {rows.dtype} {list(rows.shape)}"
        numbers: Numbers = rows.contiguous().numpy()
        if numbers.size:
            low, high = int(numbers.min()), int(numbers.max())
            assert low >= 0 and high < self._index.rows, f"rows {low} to {high} of {self._index.rows}"
        return numbers

    def _checked_lines(self, rows: Tensor, lines: Tensor) -> Bytes:
        wanted = (rows.numel(), self.line_bytes)
        assert lines.dtype == torch.uint8 and tuple(lines.shape) == wanted, f"lines are {list(lines.shape)}"
        return bytes_of(lines).reshape(wanted)

    def _assert_held(self, rows: Numbers, positions: Numbers) -> None:
        absent = rows[positions < 0]
        assert not absent.size, f"{self.name}: row {absent[:1]} is in no segment"


class _Tail:
    """The block to which records are appended."""

    def __init__(self, block: Bytes) -> None:
        self.block = block
        self.segment: SegmentFile | None = None
        """Segment of the block; None before the first write."""
        self.number = 0
        """Number of the block in the segment."""
        self.count = 0
        """Records in the block."""
