"""Files of segments: where a record lies, and the life of a segment from its first block to its removal.

    segment    | block 0 | block 1 | ...                    one file, its space reserved when it is made
    block      | record 0 | record 1 | ... | rest |         written whole, at once; no record crosses its end
    position   slot · records of a segment + number of the record in the segment
    order      serial · records of a segment + the same number

A slot is free again when its segment is removed, and positions stay below 2^32. A serial is never used twice, so the
order number, with which a record's CRC begins, names a record of this process for good.

A segment is pinned while somebody reads from it. A segment that compaction has emptied is retired, and its file is
removed when the last pin is gone.

Cost:  the rest of each block, less than one record; at most one unfinished segment of reserved space.
Shapes: n positions.
"""

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.base.errors import DamagedStateError, TierError
from shardwise.base.words import bytes_text, in_words
from shardwise.kernels.tables.records import Bytes, Numbers, record_bytes
from shardwise.memory.direct_io import DirectFile, rounded_up
from shardwise.tiers.scratch_folder import ScratchFolder

__all__ = ["MOST_RECORDS", "SegmentFile", "SegmentFiles", "SegmentShape", "records_of", "shape_for"]

MOST_RECORDS = 2**32 - 2
"""Number of positions; the index holds each in 32 bits, of which one value says that a row is in no segment."""
_BLOCK_BYTES = 2**20
_FEWEST_A_BLOCK = 16
_LEAST_SEGMENT_BYTES, _MOST_SEGMENT_BYTES = 4 * 2**20, 256 * 2**20
_SEGMENTS = 64
"""Segments that hold all rows once, if their number is known: what one unfinished segment takes is little then."""


@dataclass(frozen=True)
class SegmentShape:
    """Sizes of the segments of one table group."""

    line_bytes: int
    """Bytes of a row's line in memory."""
    block_bytes: int
    """Bytes of a block, a multiple of the disk's alignment."""
    blocks: int
    """Blocks of a segment."""

    @property
    def record_bytes(self) -> int:
        """Bytes of a record on disk."""
        return record_bytes(self.line_bytes)

    @property
    def per_block(self) -> int:
        """Records of a block."""
        return self.block_bytes // self.record_bytes

    @property
    def per_segment(self) -> int:
        """Records of a segment."""
        return self.per_block * self.blocks

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment's file."""
        return self.block_bytes * self.blocks

    def offsets(self, numbers: Numbers) -> Numbers:
        """Return the offsets in a segment's file of records with these numbers in the segment: [n] -> [n]."""
        blocks = numbers // self.per_block
        return blocks * self.block_bytes + (numbers - blocks * self.per_block) * self.record_bytes


def records_of(block: Bytes, shape: SegmentShape) -> Bytes:
    """Return a view of the records of a block: [block bytes] -> [records of a block, record bytes]."""
    return block[: shape.per_block * shape.record_bytes].reshape(shape.per_block, shape.record_bytes)


def shape_for(
    line_bytes: int, rows: int, segment_bytes: int | None = None, block_bytes: int | None = None
) -> SegmentShape:
    """Return the sizes of segments for a table group.

    Args:
        line_bytes: Bytes of a line.
        rows: The most rows that the group may have, which may be far more than it will have.
        segment_bytes: Bytes of a segment; None chooses 4 to 256 MiB by the number of rows.
        block_bytes: Bytes of a block; None chooses 1 MiB, or more for long lines.
    """
    record = record_bytes(line_bytes)
    block = rounded_up(block_bytes or max(_BLOCK_BYTES, _FEWEST_A_BLOCK * record))
    assert block >= record, f"a block of {block} bytes is shorter than a record of {record}"
    wanted = segment_bytes or min(_MOST_SEGMENT_BYTES, max(_LEAST_SEGMENT_BYTES, rows * record // _SEGMENTS))
    return SegmentShape(line_bytes, block, max(1, wanted // block))


@dataclass(slots=True, eq=False)
class SegmentFile:
    """One segment of a table group."""

    slot: int
    serial: int
    kind: str
    """Name of the file in its folder."""
    file: DirectFile
    pins: int = 0
    """Number of readers, whose file must stay."""
    is_retired: bool = False
    """True if no row lies in the segment any more."""


class SegmentFiles:
    """The segments of one table group, by slot. Whoever calls holds the lock of the group, except for reads and writes.

    Args:
        folder: Folder of the files, with a seat for this table group alone.
        name: Name of the table group for errors, such as ``table 'clicks'``.
        key: Key of the configuration that names the folder, for errors.
        shape: Sizes of the segments.
    """

    def __init__(self, folder: ScratchFolder, name: str, key: str, shape: SegmentShape) -> None:
        """Begin without segments."""
        self.by_slot: dict[int, SegmentFile] = {}
        self.serials = np.zeros(64, np.int64)
        """Serial of the segment in each slot."""
        self.live = np.zeros(64, np.int64)
        """Number of records in each slot to which the index refers."""
        self._folder, self._name, self._key, self._shape = folder, name, key, shape
        self._free: list[int] = []
        self._slots = 0
        """Number of slots ever used; a slot is in use, free, or waits for the last reader of its segment."""
        self._made = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files, with those that wait for their last reader."""
        return len(self._folder.files) * self._shape.segment_bytes

    def begin(self) -> SegmentFile:
        """Make the file of a new segment; the caller adds it with ``add``.

        Raises:
            TierError: If the file or its space cannot be had; nothing has changed then.
        """
        shape = self._shape
        slot = self._free[-1] if self._free else self._slots
        if (slot + 1) * shape.per_segment > MOST_RECORDS:
            raise TierError(
                f"{self._name}: {self._key}: rows on disk need more than {MOST_RECORDS:,} records of one rank; use "
                "more ranks for the table"
            )
        serial = self._made + 1
        kind = f"segment_{serial}"
        try:
            file = self._folder.add(kind, shape.segment_bytes)
        except OSError as error:
            raise self._no_room(error) from None
        return SegmentFile(slot, serial, kind, file)

    def _no_room(self, error: OSError) -> TierError:
        held = bytes_text(self.disk_bytes)
        wanted = bytes_text(self._shape.segment_bytes)
        advice = {
            errno.EMFILE: "raise the limit of open files of the process (ulimit -n)",
            errno.ENFILE: "raise the limit of open files of the system",
            errno.ENOSPC: "make room on the disk",
            errno.EDQUOT: "make room on the disk",
        }.get(error.errno or 0, "look to the disk")
        return TierError(
            f"{self._name}: {self._key}: {self._folder.path} holds {held} of rows and cannot hold a further segment of "
            f"{wanted}: {in_words(error)}; {advice} or give another folder; no row is lost, and the rows stay in "
            "memory until a later write succeeds"
        )

    def add(self, segment: SegmentFile) -> None:
        """Register a segment that ``begin`` made."""
        if segment.slot == self._slots:
            self._slots += 1
        else:
            self._free.remove(segment.slot)
        self._made = segment.serial
        if segment.slot >= len(self.serials):
            self.serials = np.concatenate([self.serials, np.zeros_like(self.serials)])
            self.live = np.concatenate([self.live, np.zeros_like(self.live)])
        self.by_slot[segment.slot] = segment
        self.serials[segment.slot], self.live[segment.slot] = segment.serial, 0

    def pin(self, slots: Iterable[int]) -> dict[int, SegmentFile]:
        """Keep the files of segments until ``unpin``, and return the segments by slot."""
        found = {slot: self.by_slot[slot] for slot in slots}
        for segment in found.values():
            segment.pins += 1
        return found

    def unpin(self, segments: Iterable[SegmentFile]) -> list[SegmentFile]:
        """Release pins; return the retired segments that nobody reads any more, for ``remove``."""
        done = []
        for segment in segments:
            segment.pins -= 1
            if segment.is_retired and not segment.pins:
                done.append(segment)
        return done

    def retire(self, segment: SegmentFile) -> list[SegmentFile]:
        """Take a segment without rows out of use; return it if nobody reads it, for ``remove``."""
        assert self.live[segment.slot] == 0, f"segment {segment.slot} with rows"
        segment.is_retired = True
        del self.by_slot[segment.slot]
        return [] if segment.pins else [segment]

    def remove(self, segments: Iterable[SegmentFile]) -> None:
        """Remove the files of retired segments, without the lock of the group, and free their slots."""
        for segment in segments:
            self._folder.drop(segment.kind)
            self._free.append(segment.slot)  # an append is whole for other threads

    def order(self, slot: int, number: int = 0) -> int:
        """Return the order number of a record of a slot."""
        return int(self.serials[slot]) * self._shape.per_segment + number

    # Reads and writes, without the lock of the group ------------------------------------------------------------

    def write_block(self, segment: SegmentFile, number: int, data: Bytes) -> None:
        """Write a whole block.

        Raises:
            TierError: If the disk fails or is full.
        """
        offset = number * self._shape.block_bytes
        try:
            segment.file.write(data, offset, data[:0])
        except OSError as error:
            raise TierError(
                f"{self._name}: segment {segment.file.path}: write of {data.nbytes} bytes at {offset}: "
                f"{in_words(error)}; look to the disk or give another {self._key}; no row is lost, and the rows "
                "stay in memory until a later write succeeds"
            ) from error

    def read_pages(self, segment: SegmentFile, data: Bytes, offset: int) -> None:
        """Fill aligned memory from a segment's file.

        Raises:
            DamagedStateError: If the file is shorter than it was written.
            TierError: If the disk fails.
        """
        try:
            segment.file.read_pages(data, offset)
        except OSError as error:
            where = f"{data.nbytes} bytes at {offset}"
            if segment.file.size_bytes() < offset + data.nbytes:
                raise self.damaged(segment, where, "the file has been cut short") from error
            raise TierError(
                f"{self._name}: segment {segment.file.path}: read of {where}: {in_words(error)}; look to the disk or "
                f"give another {self._key}, and resume from the last checkpoint"
            ) from error

    def damaged(self, segment: SegmentFile, where: str, what: str) -> DamagedStateError:
        """Return the error for bytes of a segment that are not those that were written."""
        return DamagedStateError(
            f"{self._name}: segment {segment.file.path}, {where}: {what}; look to the disk or give another "
            f"{self._key}, and resume from the last checkpoint"
        )

    def damaged_record(self, segment: SegmentFile, number: int, row: int) -> DamagedStateError:
        """Return the error for a record whose CRC or row is wrong."""
        shape = self._shape
        offset = int(shape.offsets(np.array([number]))[0])
        return self.damaged(
            segment,
            f"row {row} ({shape.record_bytes} bytes at {offset})",
            "its bytes are not those that were written (CRC-32)",
        )

    @property
    def path(self) -> Path:
        """Folder of the files."""
        return self._folder.path
