"""Compaction of segments: the rows of the emptiest segment are appended again, block after block, and its file goes.

    choose     the segment with the fewest rows, except the one that is written to; without rows, it goes at once
    block      read, then the records to which the index still refers are checked and handed to the caller to append
    end        no row may be left in the segment; otherwise a record was damaged, and the segment stays

With a share u of each segment in use, freeing a segment of S bytes reads S and writes u S. The emptiest segment has
at most the average share.

Cost:  memory of one block.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardwise.kernels.tables.records import Bytes, Numbers, intact, lines_in, rows_in
from shardwise.memory.direct_io import aligned_empty, bytes_of
from shardwise.tiers.segment_file import SegmentFile, SegmentFiles, SegmentShape, records_of

__all__ = ["AreAlive", "LoadBlock", "PlacedRows", "SegmentCompaction", "living_rows"]

LoadBlock = Callable[[SegmentFile, int, Bytes], None]
"""Function that fills memory with a block of a segment."""
AreAlive = Callable[[Numbers, Numbers], npt.NDArray[np.bool_]]
"""Function from the rows and positions of records to a mask of those that count: [m], [m] -> [m]."""


class PlacedRows(NamedTuple):
    """Rows of one block, as they lie there."""

    rows: Numbers
    """Rows: [n]."""
    lines: Bytes
    """Their lines: [n, w]."""
    positions: Numbers
    """Their positions: [n]."""


class SegmentCompaction:
    """The segment that is being emptied, and how far that is.

    Args:
        files: The segments.
        shape: Their sizes.
    """

    def __init__(self, files: SegmentFiles, shape: SegmentShape) -> None:
        """Begin without a segment."""
        self.bytes_read = 0
        """Bytes of the blocks that were read."""
        self._files, self._shape = files, shape
        self._victim: SegmentFile | None = None
        self._block = 0
        self._memory: Bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of a block, which is kept from the first compaction on."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def is_under_way(self) -> bool:
        """True if a segment has been emptied in part."""
        return self._victim is not None

    def chosen(self, written: SegmentFile | None) -> SegmentFile | None:
        """Return the segment under way, or choose one; None if there is none to empty.

        Args:
            written: The segment to which records are appended.
        """
        if self._victim is None:
            slots = [slot for slot, each in self._files.by_slot.items() if each is not written]
            if slots:
                live = self._files.live[slots]
                if live.min() < self._shape.per_segment:
                    self._victim, self._block = self._files.by_slot[slots[int(live.argmin())]], 0
        return self._victim

    def next_block(self, victim: SegmentFile, load: LoadBlock, lives: AreAlive) -> PlacedRows | None:
        """Read the next block of the segment, and return its rows that count; None if no row is left in the segment.

        Raises:
            DamagedStateError: If one of the rows is damaged.
            TierError: If the disk fails.
        """
        shape = self._shape
        if not self._files.live[victim.slot]:
            return None
        if self._memory is None:
            self._memory = bytes_of(aligned_empty(shape.block_bytes, torch.uint8))
        load(victim, self._block, self._memory)
        self.bytes_read += shape.block_bytes
        records = records_of(self._memory, shape)
        return living_rows(self._files, shape, victim, self._block * shape.per_block, records, lives)

    def end_of_block(self, victim: SegmentFile) -> list[SegmentFile]:
        """Count a block as emptied; after the last one, return the files that can be removed.

        Raises:
            DamagedStateError: If a row is left in the segment, because the bytes that name it were damaged.
        """
        self._block += 1
        left = int(self._files.live[victim.slot])
        if left and self._block < self._shape.blocks:
            return []
        if left:
            self._block = 0
            raise self._files.damaged(
                victim, "all blocks", f"{left} of the rows that were written there are missing"
            )
        self._victim = None
        return self._files.retire(victim)


def living_rows(
    files: SegmentFiles,
    shape: SegmentShape,
    segment: SegmentFile,
    first: int,
    records: Bytes,
    lives: AreAlive,
) -> PlacedRows:
    """Return the rows of successive records of a segment that count.

    Args:
        files: The segments.
        shape: Their sizes.
        segment: The segment.
        first: Number of the first record in the segment.
        records: The records: [m, b].
        lives: Function that says which records count. It gets rows as they stand there, which may be damaged.

    Raises:
        DamagedStateError: If one of the records that count is damaged.
    """
    rows = rows_in(records)
    begin = segment.slot * shape.per_segment + first
    positions = np.arange(begin, begin + len(rows))
    kept = np.flatnonzero(lives(rows, positions))
    wrong = kept[~intact(records, segment.serial * shape.per_segment + first)[kept]]
    if wrong.size:
        raise files.damaged_record(segment, first + int(wrong[0]), int(rows[wrong[0]]))
    return PlacedRows(rows[kept], lines_in(records, shape.line_bytes)[kept], positions[kept])
