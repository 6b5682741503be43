"""ALL_TO_ALL: whole matrices of directions to one rank each, which computes their updates, and pieces back (Muon).

    pieces [S] on the stage's ranks  ──all-to-all──►  whole on its owner  ──NS──►  ──all-to-all──►  pieces

All ranks that hold a stage, data-parallel ranks and slices along "tp", share the work: each owns some of the matrices
(optim/stage_matrices.py). Of ranks that hold the same elements one sends them: the rank with the owner's index on that
axis, often the owner itself. A direction travels in the dtype in which Newton-Schulz computes, because the owner would
round it to that dtype anyway.

Cost: of P elements of matrices a rank sends at most P/N to owners, and the owners send back P - P/N of cut state, up to
      P (N-1)/N each of state that all N ranks hold; 2 bytes an element in bf16. The whole matrices of one round beside.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.engine.parts.parts import TrainedBucket
from shardwise.optim.muon import orthogonal
from shardwise.optim.stage_matrices import Counts, HeldElements, StageMatrix, dealt_rounds
from shardwise.plan.slices import TensorSlices


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
        mine = [each for each in trained if each.optimizer.needs == "matrix"]
        self._optimizers = [each.optimizer for each in mine]
        buckets = [(each.bucket.layout, each.bucket.owned_range[1]) for each in mine]
        self._rounds = dealt_rounds(buckets, slices, self._group.ranks)

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
            pieces: dict[int, list[tuple[HeldElements, Tensor]]] = {id(each): [] for each in own}
            for (each, held), piece in zip(sources, came, strict=True):
                pieces[id(each)].append((held, piece))
            updates = {
                id(each): self._parts_of(
                    each,
                    orthogonal(self._whole(each, pieces[id(each)]), self._optimizers[each.bucket].options),
                )
                for each in own
            }
            sent = [updates[id(each)](each.held[rank]) for rank in range(self._group.size) for each in own]
            came = self._exchange(
                sent, back, [each.held[me].elements for each in every], dtype, "updates of matrices"
            )
            for each, piece in zip(every, came, strict=True):
                self._direction(each).copy_(piece)

    def _direction(self, matrix: StageMatrix) -> Tensor:
        """Return this rank's elements of a matrix's direction."""
        start, stop, local, *_ = matrix.held[self._group.index]
        return self._optimizers[matrix.bucket].halves[1][local : local + stop - start]

    def _exchange(
        self, sent: Sequence[Tensor], counts: Counts, sizes: Sequence[int], dtype: torch.dtype, what: str
    ) -> Sequence[Tensor]:
        flat = torch.cat([torch.empty(0, dtype=dtype, device=self._device), *sent])
        output = flat
        if any(count for i, row in enumerate(counts) for j, count in enumerate(row) if i != j):
            output = torch.empty(sum(sizes), dtype=dtype, device=self._device)
            self._group.all_to_all(output, flat, counts, what, purpose="gradients").wait()
        return output.split(list(sizes))

    def _whole(self, matrix: StageMatrix, pieces: Sequence[tuple[HeldElements, Tensor]]) -> Tensor:
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

    def _parts_of(self, matrix: StageMatrix, full: Tensor) -> Callable[[HeldElements], Tensor]:
        """Return a function for the elements of ``full`` that go back to a rank."""
        full = full.contiguous()
        slices: dict[tuple[int, ...], Tensor] = {}

        def part(held: HeldElements) -> Tensor:
            if not held.place:
                return full.view(-1)[held.start : held.stop]
            if held.place not in slices:
                piece = torch.zeros(matrix.slot.elements, dtype=full.dtype, device=self._device)
                for theirs, mine in self._seen_from(matrix, held.place).views(matrix.info, full, piece):
                    mine.copy_(theirs)
                slices[held.place] = piece
            return slices[held.place][held.start : held.stop]

        return part

    def _seen_from(self, matrix: StageMatrix, place: tuple[int, ...]) -> TensorSlices:
        """Return the slices of a rank at the indices ``place``."""
        rank = next(r for r, held in zip(self._group.ranks, matrix.held, strict=True) if held.place == place)
        return self._slices.of(rank)
