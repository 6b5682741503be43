"""TRUST_RATIO: the norms of whole tensors, for updates whose step is in proportion to them (LAMB, LARS).

A rank sums the squares of the elements that it counts of each tensor, as in the gradient norm: ranks that hold the same
elements each sum a share, and the first stage sums tied weights (engine/parts/shared.py). One all-reduce over all
ranks gives the sums of all tensors to every rank, with the same bits, so that copies of weights stay equal.

    [‖w‖² of each tensor, ‖direction‖² of each tensor]         fp64

Cost: one read of masters and directions; 4 T (N-1)/N numbers sent for T tensors and N ranks.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.engine.parts.parts import TrainedBucket
from shardwise.engine.parts.shared import Range, SharedGradients
from shardwise.optim.clip import share, square_sum
from shardwise.optim.two_pass import WholeTensor
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.registry import Registry


class WholeNorms:
    """The norms of the whole tensors that optimizers need.

    Args:
        trained: Trained buckets with their optimizers.
        shared: The ranges that this rank counts.
        registry: Every persistent tensor.
        world: All ranks.
        device: Device of the all-reduce.
    """

    def __init__(
        self,
        trained: Sequence[TrainedBucket],
        shared: SharedGradients,
        registry: Registry,
        world: Group,
        device: torch.device,
    ):
        self._world = world
        self._device = device
        self._shapes = {info.name: info.shape for info in registry.needs("norm")}
        self._place = {name: place for place, name in enumerate(self._shapes)}
        self._counted: list[tuple[TrainedBucket, list[tuple[int, Range]]]] = []
        """By bucket: the ranges that this rank counts, each with the index of its tensor."""
        for each in trained:
            if each.optimizer.needs == "norm":
                self._counted.append((each, list(self._ranges(each.bucket, shared.counted(each.bucket)))))
        self._norms: list[float] = []

    def _ranges(self, bucket: BucketState, counted: Sequence[Range]) -> Iterator[tuple[int, Range]]:
        for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
            for first, last in counted:
                found = (max(first, local), min(last, local + stop - start))
                if found[0] < found[1]:
                    yield self._place[slot.name], found

    def trust_ratio(self) -> None:
        """Compute the norms, between the two halves of the updates. Collective."""
        places: list[int] = []
        squares: list[Tensor] = []
        for (bucket, optimizer), ranges in self._counted:
            for offset, flat in zip((0, len(self._shapes)), optimizer.halves, strict=True):
                for place, (start, stop) in ranges:
                    places.append(offset + place)
                    squares.append(square_sum(share(flat[start:stop], *bucket.copy)))
        sums = torch.zeros(2 * len(self._shapes), dtype=torch.float64, device=self._device)
        if squares:
            sums.index_add_(0, torch.tensor(places, device=self._device), torch.stack(squares))
        self._world.all_reduce(sums, "the norms of whole tensors", purpose="control").wait()
        self._norms = sums.sqrt_().tolist()

    def of(self, name: str) -> WholeTensor:
        """Return the shape and the norms of the whole tensor ``name``."""
        place = self._place[name]
        return WholeTensor(self._shapes[name], self._norms[place], self._norms[len(self._shapes) + place])

    def forget(self) -> None:
        """Drop the norms of the step that has ended."""
        self._norms = []
