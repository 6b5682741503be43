"""Sums and coverage out of extents."""

import random
import zlib

import pytest
import torch

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.coverage import FileExtent, cut_at_blocks, stored_tensors, sum_up
from shardwise.checkpoint.layout import FileLayout, LayoutSizes, arrange
from shardwise.checkpoint.piece import TensorSpec

BLOCK = 64
SPECS = [
    TensorSpec("m", name, (n,), torch.float32)
    for name, n in [("a", 7), ("b", 0), ("c", 30), ("d", 1), ("e", 0)]
]


def extents_of(layout: FileLayout, contents: bytes, cuts: list[int]) -> list[FileExtent]:
    """One file cut at ``cuts``, at slots and at blocks."""
    ends = sorted({len(layout.header), layout.bytes, *cuts, *(slot.offset for slot in layout.slots)})
    found, position = [], 0
    for end in ends:
        for start, stop in cut_at_blocks(position, end, BLOCK):
            found.append(FileExtent(0, start, stop, zlib.crc32(contents[start:stop])))
        position = end
    return found


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sums_are_those_of_the_bytes(ranks: int) -> None:
    draws = random.Random(ranks)
    (layout,) = arrange(SPECS, LayoutSizes(), {})
    contents = layout.header + draws.randbytes(layout.bytes - len(layout.header))
    cuts = [4 * draws.randrange(len(layout.header) // 4, layout.bytes // 4) for _ in range(9)]
    dealt: list[list[FileExtent]] = [[] for _ in range(ranks)]
    for extent in extents_of(layout, contents, cuts):
        dealt[draws.randrange(ranks)].append(extent)
    (sums,) = sum_up([layout], dealt, BLOCK)
    assert sums.blocks == [zlib.crc32(contents[i : i + BLOCK]) for i in range(0, layout.bytes, BLOCK)]
    assert sums.slots == [zlib.crc32(contents[slot.offset : slot.end]) for slot in layout.slots]
    stored = {tensor.name: tensor for tensor in stored_tensors([layout], [sums])}
    assert [stored[name].pieces[0].stop for name in "abcde"] == [7, 0, 30, 1, 0]


@pytest.mark.parametrize(
    ("name", "story"),
    [("a", "'a' .* no rank wrote elements 0..7"), ("d", "'d' .* no rank wrote elements 0..1")],
)
def test_gaps_and_overlaps_are_named(name: str, story: str) -> None:
    (layout,) = arrange(SPECS, LayoutSizes(), {})
    slot = next(slot for slot in layout.slots if slot.spec.name == name)
    whole = extents_of(layout, bytes(layout.bytes), [])
    mine = [extent for extent in whole if slot.offset <= extent.start < slot.end]
    with pytest.raises(CheckpointError, match=story):
        sum_up([layout], [[extent for extent in whole if extent not in mine]], BLOCK)
    with pytest.raises(CheckpointError, match=story.replace("no rank", "several ranks")):
        sum_up(
            [layout],
            [whole, mine[:1] if len(mine) == 1 else [FileExtent(0, slot.offset, slot.end, 0)]],
            BLOCK,
        )
    with pytest.raises(CheckpointError, match="no rank wrote bytes 0..64 of the header"):
        sum_up([layout], [whole[1:]], BLOCK)
