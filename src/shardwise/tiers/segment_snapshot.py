"""Snapshots of the rows in segments: all rows as they were at one moment, read in the order of the disk.

    the index refers to the record        its row has not changed since the beginning
    its position is among those replaced  its row has changed since; this record is the one of the beginning

Segments are only appended to, so the record of the beginning stays where it was while its segment is pinned.

Cost:  8 bytes for each row that changes while the snapshot is open; memory of one block.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.kernels.tables.records import Numbers
from shardwise.memory.direct_io import aligned_empty, bytes_of
from shardwise.tiers.segment_compaction import LoadBlock, living_rows
from shardwise.tiers.segment_file import SegmentFile, SegmentFiles, SegmentShape, records_of
from shardwise.tiers.segment_index import RowPositions

__all__ = ["RowSnapshot"]


class RowSnapshot:
    """The rows of one table group at one moment.

    Example:
        >>> with segments.snapshot() as parts:  # doctest: +SKIP
        ...     for rows, lines in parts:       # int64 [n], uint8 [n, w]
        ...         save(rows, lines)
    """

    def __init__(
        self,
        files: SegmentFiles,
        shape: SegmentShape,
        index: RowPositions,
        state: threading.Condition,
        load: LoadBlock,
        let_go: Callable[["RowSnapshot", Iterable[SegmentFile]], None],
    ) -> None:
        self._files, self._shape, self._index, self._state = files, shape, index, state
        self._load, self._let_go = load, let_go
        self._counts: list[tuple[SegmentFile, int, int]] = []
        """Segments in the order in which they were written, with their records and their rows at the beginning."""
        self._replaced: list[Numbers] = [np.empty(0, np.int64)]
        self._is_open = True

    def begin(self, written: SegmentFile | None, count: int) -> None:
        """Pin all segments; the caller holds the lock of the group.

        Args:
            written: The segment to which records are appended.
            count: Number of its records.
        """
        for segment in sorted(self._files.pin(self._files.by_slot).values(), key=lambda each: each.serial):
            records = count if segment is written else self._shape.per_segment
            self._counts.append((segment, records, int(self._files.live[segment.slot])))

    def keep(self, positions: Numbers) -> None:
        """Note positions whose rows have changed; the caller holds the lock of the group."""
        self._replaced.append(positions)

    def __enter__(self) -> "RowSnapshot":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the segments; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._let_go(self, [segment for segment, _, _ in self._counts])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows, int64 [n], and their lines, uint8 [n, w], block after block.

        Raises:
            DamagedStateError: If a segment is damaged.
            TierError: If the disk fails.
        """
        shape = self._shape
        memory = bytes_of(aligned_empty(shape.block_bytes, torch.uint8))
        records = records_of(memory, shape)
        for segment, count, live in self._counts:
            found = 0
            for first in range(0, count, shape.per_block):
                if found == live:
                    break
                self._load(segment, first // shape.per_block, memory)
                kept = living_rows(self._files, shape, segment, first, records[: count - first], self._lived)
                found += kept.rows.size
                if kept.rows.size:
                    yield torch.from_numpy(kept.rows), torch.from_numpy(kept.lines)
            if found != live:
                raise self._files.damaged(
                    segment, "all blocks", f"{live - found} of the rows that were written there are missing"
                )

    def _lived(self, rows: Numbers, positions: Numbers) -> npt.NDArray[np.bool_]:
        """Return a mask of the records to which the index referred at the beginning: [m], [m] -> [m]."""
        with self._state:
            return self._index.refers(rows, positions) | np.isin(positions, np.concatenate(self._replaced))
