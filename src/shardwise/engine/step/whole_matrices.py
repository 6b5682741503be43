"""ALL_TO_ALL: whole matrices of directions to one rank each, which computes their updates, and pieces back (Muon).

    pieces [S] on the stage's ranks  ──all-to-all──►  whole on its owner  ──NS──►  ──all-to-all──►  pieces

All ranks that hold a stage, data-parallel ranks and slices along "tp", share the work: each owns some of the matrices
(optim/dealing.py). Of ranks that hold the same elements one sends them: the rank with the owner's index on that axis,
often the owner itself. A direction travels in the dtype in which Newton-Schulz computes, because the owner would round
it to that dtype anyway.

Cost: of P elements of matrices a rank sends at most P/N to owners, and the owners send back P - P/N of cut state, up to
      P (N-1)/N each of state that all N ranks hold; 2 bytes an element in bf16. The whole matrices of one round beside.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.engine.parts.parts import TrainedBucket
from shardwise.optim.dealing import owners, rounds
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.muon import dtype_of, orthogonal
from shardwise.plan.registry import TensorInfo
from shardwise.plan.slices import TensorSlices
from shardwise.plan.unit import ParameterSlot

Counts = list[list[int]]
"""Elements that travel from one rank to another, as [sender][receiver]."""


class _HeldElements(NamedTuple):
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
        return self.stop - self.start


class _StageMatrix(NamedTuple):
    """A matrix as the ranks of a stage hold it."""

    info: TensorInfo
    slot: ParameterSlot
    optimizer: FlatOptimizer
    owner: int
    """Index of the owner in the group."""
    held: list[_HeldElements]
    """Elements that each rank holds, by index in the group."""


class _MatrixRound(NamedTuple):
    """Matrices that are exchanged together, so that the whole matrices of one round fit into memory."""

    dtype: torch.dtype
    by_owner: list[list[_StageMatrix]]
    there: Counts
    back: Counts


class WholeMatrices:
    """The matrices of a stage that are dealt to owners, in rounds.

    Args:
        trained: Trained buckets with their optimizers.
        slices: This rank's pieces of the tensors in the registry.
        stage: The ranks that hold the same stage; None if nothing is dealt.
        device: Device of the exchanges.
    """

    def __init__(
        self,
        trained: Sequence[TrainedBucket],
        slices: TensorSlices,
        stage: Group | None,
        device: torch.device,
    ):
        self._slices = slices
        self._group = stage or Group.alone("stage")
        self._device = device
        self._rounds: list[_MatrixRound] = []
        mine = [each for each in trained if each.optimizer.needs == "matrix"]
        for dtype in sorted({dtype_of(each.optimizer.options) for each in mine}, key=str):
            found = [
                (each, slot, slices.registry.get("master", slot.name))
                for each in mine
                if dtype_of(each.optimizer.options) == dtype
                for slot in each.bucket.layout.slots
            ]
            shapes = [info.shape for _, _, info in found]
            spread = [self._ranges(each, slot) for each, slot, _ in found]
            owner = owners(shapes, [[stop - start for start, stop, _ in ranges] for ranges in spread])
            placed = [
                self._placed(*each, ranges, to) for each, ranges, to in zip(found, spread, owner, strict=True)
            ]
            for places in rounds(shapes, owner):
                self._rounds.append(self._round_of(dtype, [placed[place] for place in places]))

    def _ranges(self, trained: TrainedBucket, slot: ParameterSlot) -> list[tuple[int, int, int]]:
        """Return (start, stop, local) by index in the group.

        Elements [start, stop) are those of the rank's slice; ``local`` is the index of the first in its part of the
        bucket.
        """
        mesh, layout, count = self._slices.mesh, trained.bucket.layout, trained.bucket.owned_range[1]
        size = layout.elements // count
        found = []
        for rank in self._group.ranks:
            first = (mesh.index("dp_shard", rank) if count > 1 else 0) * size
            start = max(first, slot.offset)
            stop = max(min(first + size, slot.offset + slot.elements), start)
            found.append((start - slot.offset, stop - slot.offset, start - first))
        return found

    def _placed(
        self,
        trained: TrainedBucket,
        slot: ParameterSlot,
        info: TensorInfo,
        ranges: list[tuple[int, int, int]],
        owner: int,
    ) -> _StageMatrix:
        mesh, ranks = self._slices.mesh, self._group.ranks
        slicing = self._slices.cut_axes(info)
        cut = {*slicing, *(("dp_shard",) if trained.bucket.owned_range[1] > 1 else ())}
        alike = [axis for axis in mesh.stage_axes(info.axes) if axis not in cut]
        held = []
        for rank, range_ in zip(ranks, ranges, strict=True):
            brings = all(mesh.index(axis, rank) == mesh.index(axis, ranks[owner]) for axis in alike)
            place = tuple(mesh.index(axis, rank) for axis in slicing)
            held.append(_HeldElements(*range_, place, brings))
        return _StageMatrix(info, slot, trained.optimizer, owner, held)

    def _round_of(self, dtype: torch.dtype, matrices: Sequence[_StageMatrix]) -> _MatrixRound:
        every = range(self._group.size)
        by_owner = [[each for each in matrices if each.owner == owner] for owner in every]

        def elements(owner: int, rank: int, all_ranks: bool) -> int:
            held = (each.held[rank] for each in by_owner[owner])
            return sum(part.elements for part in held if part.brings or all_ranks)

        there = [[elements(owner, rank, False) for owner in every] for rank in every]
        back = [[elements(owner, rank, True) for rank in every] for owner in every]
        return _MatrixRound(dtype, by_owner, there, back)

    def all_to_all(self) -> None:
        """Turn all directions into updates, between the two halves of the optimizer's step. Collective."""
        me = self._group.index
        for dtype, by_owner, there, back in self._rounds:
            own, every = by_owner[me], [each for some in by_owner for each in some]
            sent = [self._direction(each).to(dtype) for each in every if each.held[me].brings]
            sources = [
                (each, held)
                for rank in range(self._group.size)
                for each in own
                if (held := each.held[rank]).brings
            ]
            came = self._exchange(
                sent, there, [held.elements for _, held in sources], dtype, "matrices to owners"
            )
            pieces: dict[int, list[tuple[_HeldElements, Tensor]]] = {id(each): [] for each in own}
            for (each, held), piece in zip(sources, came, strict=True):
                pieces[id(each)].append((held, piece))
            updates = {
                id(each): self._parts_of(
                    each, orthogonal(self._whole(each, pieces[id(each)]), each.optimizer.options)
                )
                for each in own
            }
            sent = [updates[id(each)](each.held[rank]) for rank in range(self._group.size) for each in own]
            came = self._exchange(
                sent, back, [each.held[me].elements for each in every], dtype, "updates of matrices"
            )
            for each, piece in zip(every, came, strict=True):
                self._direction(each).copy_(piece)

    def _direction(self, matrix: _StageMatrix) -> Tensor:
        """Return this rank's elements of a matrix's direction."""
        start, stop, local, *_ = matrix.held[self._group.index]
        return matrix.optimizer.halves[1][local : local + stop - start]

    def _exchange(
        self, sent: Sequence[Tensor], counts: Counts, sizes: Sequence[int], dtype: torch.dtype, what: str
    ) -> Sequence[Tensor]:
        flat = torch.cat([torch.empty(0, dtype=dtype, device=self._device), *sent])
        output = flat
        if any(count for i, row in enumerate(counts) for j, count in enumerate(row) if i != j):
            output = torch.empty(sum(sizes), dtype=dtype, device=self._device)
            self._group.all_to_all(output, flat, counts, what, purpose="gradients").wait()
        return output.split(list(sizes))

    def _whole(self, matrix: _StageMatrix, pieces: Sequence[tuple[_HeldElements, Tensor]]) -> Tensor:
        """Return the whole matrix, put together from the pieces that ranks have sent."""
        info, dtype = matrix.info, pieces[0][1].dtype
        slices: dict[tuple[int, ...], Tensor] = {}
        for held, piece in pieces:
            if held.place not in slices:
                slices[held.place] = torch.zeros(matrix.slot.elements, dtype=dtype, device=self._device)
            slices[held.place][held.start : held.stop] = piece
        if () in slices:
            return slices[()].view(info.shape)
        full = torch.empty(info.shape, dtype=dtype, device=self._device)
        for place, part in slices.items():
            for theirs, mine in self._seen_from(matrix, place).views(info, full, part):
                theirs.copy_(mine)
        return full

    def _parts_of(self, matrix: _StageMatrix, full: Tensor) -> Callable[[_HeldElements], Tensor]:
        """Return a function for the elements of ``full`` that go back to a rank."""
        full = full.contiguous()
        slices: dict[tuple[int, ...], Tensor] = {}

        def part(held: _HeldElements) -> Tensor:
            if not held.place:
                return full.view(-1)[held.start : held.stop]
            if held.place not in slices:
                piece = torch.zeros(matrix.slot.elements, dtype=full.dtype, device=self._device)
                for theirs, mine in self._seen_from(matrix, held.place).views(matrix.info, full, piece):
                    mine.copy_(theirs)
                slices[held.place] = piece
            return slices[held.place][held.start : held.stop]

        return part

    def _seen_from(self, matrix: _StageMatrix, place: tuple[int, ...]) -> TensorSlices:
        """Return the slices of a rank at the indices ``place``."""
        rank = next(r for r, held in zip(self._group.ranks, matrix.held, strict=True) if held.place == place)
        return self._slices.of(rank)
