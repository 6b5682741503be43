"""Gradients of parameters that several model-parallel ranks hold, summed according to the registry.

    held alike on an axis, gradient Partial    norm weights under sequence parallelism     sum over the axis
    rows that neighbours hold alike            KV heads, if there are more ranks           sum over the neighbours
    tied across pipeline stages                embedding and head                          sum over the stages' ranks

The sum runs once a step, after the data-parallel reduction, on the range that this rank owns: the addends of one group
travel in one all-reduce. This module depends on no layer: the elements that are summed, and the rank that counts them
in the gradient norm, follow from placements only (plan/slices.py), on any number of axes.

Cost: 2 P (N-1)/N elements for P shared elements of the owned range.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.slices import TensorSlices, extend

Range = tuple[int, int]
"""Elements [start, stop) of a bucket's owned gradient."""


class SharedGradients:
    """The gradients on this rank that other model-parallel ranks hold too.

    Args:
        buckets: Trained buckets, each with the index of its pipeline stage.
        slices: This rank's pieces of the tensors in the registry.
        groups_of: Makes the process groups of given tuples of ranks. All ranks call it with the same tuples.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[int, BucketState]],
        slices: TensorSlices,
        groups_of: Callable[[list[tuple[int, ...]]], Mapping[tuple[int, ...], Group]],
    ):
        self._held: dict[tuple[int, ...], dict[BucketState, list[Range]]] = {}
        """Ranges of buckets, by the ranks that hold addends of the same elements."""
        self._ties: dict[str, list[BucketState]] = {}
        self._tied_ranks: dict[str, tuple[int, ...]] = {}
        self._counted: dict[BucketState, list[Range]] = {}
        for stage, bucket in buckets:
            counted: list[Range] = []
            counts_all = True
            for ranks, ranges in slices.shared_ranges(bucket.layout, *bucket.owned_range).items():
                self._held.setdefault(ranks, {})[bucket] = ranges
            for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
                info = slices.registry.get("parameter", slot.name)
                for run in slices.runs(info, start, stop):
                    first = local + run.local - start
                    found = (first, first + run.elements)
                    if stage == info.stages[0] and slices.is_first(info, run):
                        extend(counted, found)
                    else:
                        counts_all = False
            if bucket.layout.key.tie:
                name = bucket.layout.key.tie
                stages = slices.registry.get("parameter", name).stages
                self._ties.setdefault(name, []).append(bucket)
                self._tied_ranks[name] = slices.mesh.stage_ranks(slices.rank, stages)
            # If nothing is left out, one range covers the bucket: the padding between parameters is zero.
            self._counted[bucket] = [(0, bucket.owned_elements)] if counts_all else counted
        # All ranks make all groups, including groups of other ranks. [Note: one function makes all groups]
        self._groups = groups_of(slices.groups_of_addends())

    def counted(self, bucket: BucketState) -> list[Range]:
        """Return the ranges whose squares this rank adds to the gradient norm, for all ranks that hold them."""
        return self._counted[bucket]

    @property
    def tied(self) -> dict[str, list[BucketState]]:
        """Buckets on this rank of parameters that other stages hold too, by name.

        The order is the same on all ranks that share them.
        """
        return dict(sorted(self._ties.items()))

    def sum(self) -> None:
        """Run SUM: add up the gradients that other ranks hold too."""
        for ranks, held in sorted(self._held.items(), key=lambda item: item[0]):
            addends = [bucket.gradient.owned[start:stop] for bucket in held for start, stop in held[bucket]]
            flat = torch.cat(addends)
            self._groups[ranks].all_reduce(flat, "gradients that the ranks share").wait()
            for addend, total in zip(addends, flat.split([len(each) for each in addends]), strict=True):
                addend.copy_(total)
        for name, buckets in self.tied.items():
            total = buckets[0].gradient.owned
            for other in buckets[1:]:
                total.add_(other.gradient.owned)
            ranks = self._tied_ranks[name]
            if len(ranks) > 1:
                self._groups[ranks].all_reduce(total, f"the gradient of {name}, tied across stages").wait()
            is_used: bool | Tensor = any(any(bucket.gradient.used) for bucket in buckets)
            if len(ranks) > 1:
                # The count stays on the device: NORM reads it together with all other numbers.
                count = torch.full((1,), float(is_used), dtype=torch.float64, device=total.device)
                self._groups[ranks].all_reduce(count, f"the use of {name}", purpose="control").wait()
                is_used = count[0]
            for bucket in buckets:
                bucket.gradient.used = [is_used] * len(bucket.gradient.used)
            for other in buckets[1:]:
                other.gradient.owned.copy_(total)
