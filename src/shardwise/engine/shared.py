"""Gradients of parameters that several model-parallel ranks hold, summed as the registry says.

    held alike on "tp", gradient Partial       norm weights under sequence parallelism     sum over tp
    rows that neighbours on "tp" hold alike    KV heads, where tp has more ranks           sum over the neighbours
    tied across pipeline stages                embedding and head                          sum over the stages' ranks

It happens once a step, after the data-parallel reduction, on the range that this rank owns: the addends of one group
travel in one all-reduce. Nothing here knows a layer: which elements are summed, and which rank counts them in the
gradient norm, follows from placements alone.

Cost: 2 P (N-1)/N elements for P shared elements of the owned range.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.comm.collectives import Group
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard, runs
from shardwise.plan.registry import Registry

Range = tuple[int, int]
"""Elements [start, stop) of a bucket's owned gradient."""


class SharedGradients:
    """See the module's docstring. ``buckets`` come with the pipeline stage that they belong to."""

    def __init__(
        self,
        buckets: Sequence[tuple[int, BucketState]],
        registry: Registry,
        mesh: Mesh,
        rank: int,
        groups_of: Callable[[list[tuple[int, ...]]], Mapping[tuple[int, ...], Group]],
    ):
        self._held: dict[tuple[int, ...], dict[BucketState, list[Range]]] = {}
        """By the ranks that hold the same elements."""
        self._ties: dict[str, list[BucketState]] = {}
        self._tied_ranks: dict[str, tuple[int, ...]] = {}
        self._counted: dict[BucketState, list[Range]] = {}
        self._is_summed = False
        tp, here, size = mesh.ranks("tp", rank), mesh.index("tp", rank), mesh.size("tp")
        pp = mesh.ranks("pp", rank)
        for stage, bucket in buckets:
            counted: list[Range] = []
            counts_all = True
            for slot, start, stop, local in bucket.layout.overlaps(*bucket.owned_range):
                info = registry.get("parameter", slot.name)
                gradient = info.grad_placement.get("tp", Replicate())
                whole = isinstance(info.on("tp"), Replicate)
                for run in runs(info.shape, info.on("tp"), here, size, start, stop):
                    first = local + run.local - start
                    found = (first, first + run.elements)
                    neighbours = here // run.replicas * run.replicas
                    if run.replicas > 1 and (not whole or isinstance(gradient, Partial)):
                        held = self._held.setdefault(tp[neighbours : neighbours + run.replicas], {})
                        _extend(held.setdefault(bucket, []), found)
                    if here == neighbours and stage == info.stages[0]:
                        _extend(counted, found)
                    else:
                        counts_all = False
            if bucket.layout.key.tie:
                name = bucket.layout.key.tie
                stages = registry.get("parameter", name).stages
                self._ties.setdefault(name, []).append(bucket)
                self._tied_ranks[name] = tuple(sorted({pp[other % len(pp)] for other in stages}))
            # One range where there is nothing to leave out: the padding between parameters is zero.
            self._counted[bucket] = [(0, bucket.owned_elements)] if counts_all else counted
        # All ranks make all groups, those that they are not in as well. [Note: one function makes all groups]
        self._groups = groups_of(holders(registry, mesh))

    def counted(self, bucket: BucketState) -> list[Range]:
        """The ranges whose squares this rank brings to the gradient norm, for all ranks that hold them."""
        return self._counted[bucket]

    @property
    def tied(self) -> dict[str, list[BucketState]]:
        """Buckets here of parameters that other stages hold too, by name in one order on all ranks that share them."""
        return dict(sorted(self._ties.items()))

    def sum(self) -> None:
        """Add up what other ranks hold, once: a second call before ``reset`` does nothing."""
        if self._is_summed:
            return
        self._is_summed = True
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
            used = torch.tensor([any(any(bucket.gradient.used) for bucket in buckets)], dtype=torch.float64)
            used = used.to(total.device)
            if len(ranks) > 1:
                self._groups[ranks].all_reduce(used, f"the use of {name}", purpose="control").wait()
            for bucket in buckets:
                bucket.gradient.used = [bool(used.item())] * len(bucket.gradient.used)
            for other in buckets[1:]:
                other.gradient.owned.copy_(total)

    def reset(self) -> None:
        """After the step."""
        self._is_summed = False


def holders(registry: Registry, mesh: Mesh) -> list[tuple[int, ...]]:
    """Every group of ranks in the mesh that hold the same elements of some trained parameter, in one order: what
    ``SharedGradients`` may sum over, on whichever rank."""
    found: set[tuple[int, ...]] = set()
    size = mesh.size("tp")
    for gradient in registry.of_kind("gradient"):
        info = registry.get("parameter", gradient.name)
        where = info.on("tp")
        replicas: set[int] = set()
        if isinstance(where, Shard):
            replicas = {block.replicas(size) for block in where.blocks}
        elif isinstance(info.grad_placement.get("tp", Replicate()), Partial):
            replicas = {size}
        for count in replicas:
            found |= {tp[i : i + count] for tp in mesh.groups("tp") for i in range(0, size, count)}
        if len(info.stages) > 1:
            found |= {tuple(sorted({pp[s % len(pp)] for s in info.stages})) for pp in mesh.groups("pp")}
    return sorted(ranks for ranks in found if len(ranks) > 1)


def _extend(ranges: list[Range], found: Range) -> None:
    """One more range, or the last one longer where ``found`` goes on from there."""
    if ranges and ranges[-1][1] == found[0]:
        ranges[-1] = (ranges[-1][0], found[1])
    else:
        ranges.append(found)
