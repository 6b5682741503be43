"""Matrices of one stage as its ranks hold them, dealt to owners in rounds. Pure: the result is the same on every rank.

All ranks that hold a stage own some of its matrices (dealing.py). Of ranks that hold the same elements one sends them
to the owner: the rank with the owner's index on that axis, often the owner itself.

Cost: one look at each matrix and rank of the stage.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.optim.dealing import owners, rounds
from shardwise.plan.registry import TensorInfo
from shardwise.plan.slices import TensorSlices
from shardwise.plan.unit import Bucket, ParameterSlot

Counts = list[list[int]]
"""Elements that travel from one rank to another, as [sender][receiver]."""


class HeldElements(NamedTuple):
    """The elements of a matrix that a rank holds."""

    start: int
    stop: int
    """End of the elements [start, stop) of the rank's slice."""
    local: int
    """Index of the first element in the rank's part of the bucket."""
    place: tuple[int, ...]
    """Indices of the rank on the axes that cut the matrix into slices."""
    brings: bool
    """True if the rank sends these elements to the owner, False if another rank sends the same elements."""

    @property
    def elements(self) -> int:
        """Number of the elements."""
        return self.stop - self.start


class StageMatrix(NamedTuple):
    """A matrix as the ranks of a stage hold it."""

    info: TensorInfo
    slot: ParameterSlot
    bucket: int
    """Index of its bucket among those with matrices."""
    owner: int
    """Index of the owner in the group."""
    held: list[HeldElements]
    """Elements that each rank holds, by index in the group."""


class MatrixRound(NamedTuple):
    """Matrices that are exchanged together, so that the whole matrices of one round fit into memory."""

    dtype: torch.dtype
    by_owner: list[list[StageMatrix]]
    there: Counts
    back: Counts


def dealt_rounds(
    buckets: Sequence[tuple[Bucket, int]], slices: TensorSlices, ranks: Sequence[int]
) -> list[MatrixRound]:
    """Return the rounds in which the matrices of a stage are exchanged.

    Args:
        buckets: Buckets of matrices, each with the number of equal ranges in which ranks own it.
        slices: The slices of the registered tensors, seen from any rank of the stage.
        ranks: The ranks that hold the stage.
    """
    found: list[MatrixRound] = []
    every = [
        (place, slot, slices.registry.get("master", slot.name))
        for place, (layout, _) in enumerate(buckets)
        for slot in layout.slots
    ]
    for dtype in sorted({info.wire for _, _, info in every if info.wire is not None}, key=str):
        of_dtype = [each for each in every if each[2].wire == dtype]
        shapes = [info.shape for _, _, info in of_dtype]
        spread = [_ranges(*buckets[place], slot, slices, ranks) for place, slot, _ in of_dtype]
        owner = owners(shapes, [[stop - start for start, stop, _ in ranges] for ranges in spread])
        placed = [
            StageMatrix(info, slot, place, to, _held(info, ranges, buckets[place][1], ranks, to, slices))
            for (place, slot, info), ranges, to in zip(of_dtype, spread, owner, strict=True)
        ]
        for places in rounds(shapes, owner):
            found.append(_round_of(dtype, [placed[place] for place in places], len(ranks)))
    return found


def _ranges(
    layout: Bucket, count: int, slot: ParameterSlot, slices: TensorSlices, ranks: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return (start, stop, local) by index in the group.

    Elements [start, stop) are those of the rank's slice; ``local`` is the index of the first in its part of the bucket.
    """
    size, found = layout.elements // count, []
    for rank in ranks:
        first = (slices.mesh.index("dp_shard", rank) if count > 1 else 0) * size
        start = max(first, slot.offset)
        stop = max(min(first + size, slot.offset + slot.elements), start)
        found.append((start - slot.offset, stop - slot.offset, start - first))
    return found


def _held(
    info: TensorInfo,
    ranges: Sequence[tuple[int, int, int]],
    count: int,
    ranks: Sequence[int],
    owner: int,
    slices: TensorSlices,
) -> list[HeldElements]:
    mesh, slicing = slices.mesh, slices.cut_axes(info)
    cut = {*slicing, *(("dp_shard",) if count > 1 else ())}
    alike = [axis for axis in mesh.stage_axes(info.axes) if axis not in cut]
    held = []
    for rank, range_ in zip(ranks, ranges, strict=True):
        brings = all(mesh.index(axis, rank) == mesh.index(axis, ranks[owner]) for axis in alike)
        place = tuple(mesh.index(axis, rank) for axis in slicing)
        held.append(HeldElements(*range_, place, brings))
    return held


def _round_of(dtype: torch.dtype, matrices: Sequence[StageMatrix], size: int) -> MatrixRound:
    every = range(size)
    by_owner = [[each for each in matrices if each.owner == owner] for owner in every]

    def elements(owner: int, rank: int, all_ranks: bool) -> int:
        held = (each.held[rank] for each in by_owner[owner])
        return sum(part.elements for part in held if part.brings or all_ranks)

    there = [[elements(owner, rank, False) for owner in every] for rank in every]
    back = [[elements(owner, rank, True) for rank in every] for owner in every]
    return MatrixRound(dtype, by_owner, there, back)
