"""Snapshots of the segments of one table group: records that are there at one moment stay readable until it is closed.

    positions   row -> position of its newest record, now
    read        record at a position, whether its row has a newer one by now, or none

Segments are only appended to, and nothing is compacted while a snapshot is open, so a record stays where it is. Who
wants a row as it was at the beginning notes its position before the row changes (cache_snapshot.py).

A snapshot reads through a queue of its own with few requests under way, so that reads of steps neither wait for it nor
find the disk's queue full.

Cost:  the dead records of what is written meanwhile stay on the disk; memory of one job of reads.
"""

from collections.abc import Callable

from torch import Tensor

from shardwise.tiers.segment_reader import SegmentReader

__all__ = ["RowSnapshot"]


class RowSnapshot:
    """Records of one table group, which stay until the snapshot is closed.

    Args:
        positions: Function that returns the positions of rows.
        read: Function that reads the lines of rows from records at positions, through a reader.
        reader: Reader of this snapshot alone.
        let_go: Function that lets the group remove records again.
    """

    def __init__(
        self,
        positions: Callable[[Tensor], Tensor],
        read: Callable[[SegmentReader, Tensor, Tensor, Tensor], None],
        reader: SegmentReader,
        let_go: Callable[["RowSnapshot"], None],
    ) -> None:
        self._positions, self._read, self._reader, self._let_go = positions, read, reader, let_go
        self._is_open = True

    def positions(self, rows: Tensor) -> Tensor:
        """Return the position of the newest record of each row, -1 for rows without one: int64 [n] -> [n]."""
        return self._positions(rows)

    def read(self, rows: Tensor, positions: Tensor, out: Tensor) -> None:
        """Read the lines of rows from records at positions that ``positions`` has returned.

        Args:
            rows: Rows, int64 on the CPU: [n].
            positions: Positions of their records: [n].
            out: Memory for the lines, contiguous uint8 on the CPU: [n, w].

        Raises:
            DamagedStateError: If the bytes of a record are not those that were written; the error names the segment.
            TierError: If the disk fails.
        """
        self._read(self._reader, rows, positions, out)

    def close(self) -> None:
        """Let the group remove records; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._let_go(self)
            self._reader.close()
