"""Coverage of files by the ranks' writes: every byte once, and the sums of blocks and tensors.

A rank reports one ``FileExtent`` per range of bytes that it wrote, cut where a tensor or a CRC block ends. Sorted by
position, the extents of all ranks must tile every file. A gap is an element that no rank wrote; an overlap is an
element that two ranks wrote. The CRC-32s of blocks and pieces follow by ``crc32_combine``; no byte is read again.

Cost: O(extents) on rank 0; 40 bytes of text per extent from each rank.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.layout import FileLayout, FileSlot
from shardwise.checkpoint.manifest import ManifestTensor, StoredFile, StoredPiece
from shardwise.formats.safetensors import CODES
from shardwise.kernels.crc import crc32_combine


class FileExtent(NamedTuple):
    """Bytes ``[start, stop)`` of file number ``file``, written with the CRC-32 ``crc``."""

    file: int
    start: int
    stop: int
    crc: int


@dataclass
class FileSums:
    """The CRC-32s of one file: per block, and per slot in the layout's order."""

    bytes: int
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def stored(self) -> StoredFile:
        """Return the file's entry of the manifest."""
        return StoredFile(bytes=self.bytes, crc32="".join(f"{crc:08x}" for crc in self.blocks))


def cut_at_blocks(start: int, stop: int, block_bytes: int) -> list[tuple[int, int]]:
    """Return ``[start, stop)`` as ranges that are cut where blocks end."""
    cuts = []
    while start < stop:
        end = min(stop, (start // block_bytes + 1) * block_bytes)
        cuts.append((start, end))
        start = end
    return cuts


def sum_up(
    layouts: Sequence[FileLayout], extents: Iterable[Sequence[FileExtent]], block_bytes: int
) -> list[FileSums]:
    """Return the sums of every file from the extents of every rank.

    Args:
        layouts: Layout of every file.
        extents: Extents of each rank, in rising order.
        block_bytes: Bytes covered by one CRC-32.

    Raises:
        CheckpointError: if a byte was written never or twice.
    """
    by_file: list[list[FileExtent]] = [[] for _ in layouts]
    for extent in heapq.merge(*extents):
        by_file[extent.file].append(extent)
    return [_sum_file(layout, found, block_bytes) for layout, found in zip(layouts, by_file, strict=True)]


def _sum_file(layout: FileLayout, extents: list[FileExtent], block_bytes: int) -> FileSums:
    sums = FileSums(layout.bytes, [0] * -(-layout.bytes // block_bytes), [0] * len(layout.slots))
    position = 0
    slot = -1  # -1: the header, which lies before the first slot
    for extent in extents:
        if extent.start != position:
            _refuse(layout, position, extent.start)
        while slot + 1 < len(layout.slots) and layout.slots[slot + 1].offset <= extent.start:
            slot += 1
        length = extent.stop - extent.start
        block = extent.start // block_bytes
        sums.blocks[block] = crc32_combine(sums.blocks[block], extent.crc, length)
        if slot >= 0:
            sums.slots[slot] = crc32_combine(sums.slots[slot], extent.crc, length)
        position = extent.stop
    if position != layout.bytes:
        _refuse(layout, position, layout.bytes)
    return sums


def _refuse(layout: FileLayout, position: int, found: int) -> None:
    """Raise the error for an extent that starts at ``found`` instead of ``position``."""
    first, last = min(position, found), max(position, found)
    slot = next((slot for slot in layout.slots if slot.offset <= first < slot.end), None)
    many = "no rank wrote" if found > position else "several ranks wrote"
    if slot is None:
        raise CheckpointError(f"{layout.path}: {many} bytes {first}..{last} of the header")
    itemsize = slot.spec.dtype.itemsize
    start = slot.start + (first - slot.offset) // itemsize
    stop = slot.start + (min(last, slot.end) - slot.offset) // itemsize
    raise CheckpointError(
        f"{slot.spec.kind} {slot.spec.name!r} of shape {slot.spec.shape}: {many} elements {start}..{stop}; "
        "the ranks' pieces must cover each element exactly once"
    )


def stored_tensors(layouts: Sequence[FileLayout], sums: Sequence[FileSums]) -> list[ManifestTensor]:
    """Return the manifest's list of tensors, by kind and name."""
    pieces: dict[tuple[str, str], list[StoredPiece]] = {}
    slots: dict[tuple[str, str], FileSlot] = {}
    for layout, file in zip(layouts, sums, strict=True):
        for slot, crc in zip(layout.slots, file.slots, strict=True):
            key = (slot.spec.kind, slot.spec.name)
            slots[key] = slot
            stored = StoredPiece(
                file=layout.path, offset=slot.offset, start=slot.start, stop=slot.stop, crc32=f"{crc:08x}"
            )
            pieces.setdefault(key, []).append(stored)
    return [
        ManifestTensor(
            kind=kind,
            name=name,
            shape=list(slots[kind, name].spec.shape),
            dtype=CODES[slots[kind, name].spec.dtype],
            pieces=sorted(pieces[kind, name], key=lambda piece: piece.start),
        )
        for kind, name in sorted(slots)
    ]
