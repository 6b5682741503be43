"""Slices: the part of each tensor that one rank holds, over all axes of the ranks that share a model.

    runs      the runs of the whole tensor in this rank's piece           checkpoints, start weights
    views     the same as views of both                                   assembling whole tensors
    addends   the ranks whose gradients are added to this rank's          sums over model-parallel ranks
    holders   the ranks that hold the same elements                       comparing copies
    is_first  True if this rank counts, or writes, for all replicas       the norm, checkpoints

All results follow from the placements in the registry, in loops over the axes that may cut a tensor into slices: cp and
tp, or ep and etp for a tensor of an expert (``Mesh.model_axes``). Data-parallel axes are not among them: their state is
cut flat, bucket by bucket (parallel/zero/context.py), after all slices.

    gradient on an axis    held alike by              its addends are on
    Partial                all ranks (Replicate)      all ranks of the axis
    (any)                  neighbours (Shard)         the neighbours that hold the same part (KV heads, for example)
    Replicate              all ranks                  none: it is equal already
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import product
from typing import NamedTuple

from torch import Tensor

from shardwise.plan.mesh import DENSE, EXPERT, Mesh
from shardwise.plan.placement import AxisCut, ContiguousRun, Partial, Shard, local_shape, runs, spans
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.plan.unit import Bucket, ParameterSlot


class BufferRange(NamedTuple):
    """Elements [start, stop) of the whole tensor ``name`` that lie at ``place`` of a flat buffer."""

    name: str
    start: int
    stop: int
    place: int


class TensorSlices:
    """Slices of all registered tensors, seen from one rank.

    Args:
        registry: The registered tensors.
        mesh: The mesh.
        rank: The rank whose slices are returned.
    """

    def __init__(self, registry: Registry, mesh: Mesh, rank: int):
        self.registry = registry
        self.mesh = mesh
        self.rank = rank
        views = (mesh.model_axes(state) for state in (DENSE, EXPERT))
        self._places = {axis: mesh.index(axis, rank) for axes in views for axis in axes}

    def of(self, rank: int) -> "TensorSlices":
        """Return the slices seen from another rank."""
        return TensorSlices(self.registry, self.mesh, rank)

    def cut_axes(self, info: TensorInfo) -> tuple[str, ...]:
        """Return the axes whose ranks hold different slices of the tensor."""
        named = zip(self.mesh.model_axes(info.axes), self.cuts(info), strict=True)
        return tuple(axis for axis, cut in named if cut.dim is not None)

    def cuts(self, info: TensorInfo) -> tuple[AxisCut, ...]:
        """Return the cut of the tensor by each axis, seen from this rank."""
        return tuple(
            AxisCut(info.on(axis), self._places[axis], self.mesh.size(axis))
            for axis in self.mesh.model_axes(info.axes)
        )

    def local_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """Return the shape of a rank's piece, padding included: the same on every rank."""
        return local_shape(info.shape, self.cuts(info))

    def runs(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> Iterator[ContiguousRun]:
        """Yield the runs in which elements [start, stop) of this rank's flattened piece lie in the whole tensor."""
        return runs(info.shape, self.cuts(info), start, stop)

    def ranges_in(
        self, slots: Iterable[ParameterSlot], first: int, elements: int, window: tuple[int, int] | None
    ) -> Iterator[BufferRange]:
        """Yield the parts of parameters that lie in a flat buffer of a bucket, as ranges of whole tensors.

        Args:
            slots: Parameters of the bucket.
            first: Element of the bucket at which the buffer begins.
            elements: Elements of the buffer.
            window: Range of the bucket that is to be written: elements that several ranks hold are yielded only on the
                first of them. None: the ranges are to be filled, and all are yielded.
        """
        for slot in slots:
            info = self.registry.get("parameter", slot.name)
            start, stop = max(slot.offset, first), min(slot.offset + slot.elements, first + elements)
            if window is not None:
                start, stop = max(start, window[0]), min(stop, window[1])
            if start >= stop:
                continue
            for run in self.runs(info, start - slot.offset, stop - slot.offset):
                if window is None or self.is_first(info, run):
                    place = slot.offset + run.local - first
                    yield BufferRange(slot.name, run.full, run.full + run.elements, place)

    def is_first(self, info: TensorInfo, run: ContiguousRun) -> bool:
        """Return whether this rank is the first of its stage's ranks that hold ``run`` of a tensor."""
        axes = self.mesh.model_axes(info.axes)
        return all(self._places[axis] % held == 0 for axis, held in zip(axes, run.replicas, strict=True))

    def holds_first(self, info: TensorInfo) -> bool:
        """Return whether this rank is the first of its stage's ranks that hold a tensor or own values of it."""
        axes = (axis for axis in self.mesh.stage_axes(info.axes) if not isinstance(info.on(axis), Shard))
        return all(self.mesh.index(axis, self.rank) == 0 for axis in axes)

    def addends(self, info: TensorInfo, run: ContiguousRun) -> tuple[int, ...]:
        """Return the ranks whose gradients of ``run`` are summed, this one included; none if nothing is summed."""
        counts = {}
        for axis, held in zip(self.mesh.model_axes(info.axes), run.replicas, strict=True):
            is_addend = isinstance(info.on(axis), Shard) or isinstance(info.gradient_on(axis), Partial)
            if held > 1 and is_addend:
                counts[axis] = held
        return self.mesh.neighbours(self.rank, counts) if counts else ()

    def holders(self, info: TensorInfo, run: ContiguousRun, is_cut: bool) -> tuple[int, ...]:
        """Return the ranks, ascending and with this rank among them, that hold the same elements as ``run``.

        Args:
            info: A parameter, or state with the parameter's elements.
            run: Elements of this rank's piece.
            is_cut: True if the buffer that holds them is cut over the data-parallel ranks.
        """
        counts = {
            axis: held
            for axis, held in zip(self.mesh.model_axes(info.axes), run.replicas, strict=True)
            if held > 1
        }
        replicate, shard = info.axes
        copied = (replicate,) if is_cut else (replicate, shard)
        counts |= {axis: self.mesh.size(axis) for axis in copied if self.mesh.size(axis) > 1}
        ranks = self.mesh.neighbours(self.rank, counts)
        if len(info.stages) == 1:
            return ranks
        return tuple(sorted({each for rank in ranks for each in self.mesh.stage_ranks(rank, info.stages)}))

    def shared_ranges(
        self, bucket: Bucket, index: int, count: int
    ) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        """Return the ranges of a bucket's owned gradient that other ranks of the model hold too, by these ranks.

        Neighbouring ranges are one.

        Args:
            bucket: A trained bucket.
            index: Number of the owned range of the bucket, of ``count`` equal ranges.
            count: Number of ranges.
        """
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for slot, start, stop, local in bucket.overlaps(index, count):
            info = self.registry.get("parameter", slot.name)
            if not self._has_addends(info):
                continue  # a large tensor that is cut within its rows has as many runs as rows
            for run in self.runs(info, start, stop):
                ranks = self.addends(info, run)
                if ranks:
                    first = local + run.local - start
                    extend(found.setdefault(ranks, []), (first, first + run.elements))
        return found

    def groups_of_addends(self, among: Iterable[int] | None = None) -> list[tuple[int, ...]]:
        """Return every group of ranks that sum gradients of a trained parameter, in the same order on every rank.

        Args:
            among: Ranks whose groups are returned; None: all ranks of the mesh.
        """
        counts: set[tuple[tuple[str, int], ...]] = set()
        ties: set[tuple[int, ...]] = set()
        for gradient in self.registry.of_kind("gradient"):
            info = self.registry.get("parameter", gradient.name)
            if len(info.stages) > 1:
                ties.add(info.stages)
            axes = self.mesh.model_axes(info.axes)
            choices = [self._counts(info, axis) for axis in axes]
            counts |= {tuple(zip(axes, chosen, strict=True)) for chosen in product(*choices)}
        every = range(self.mesh.world_size) if among is None else tuple(among)
        found = {self.mesh.neighbours(rank, dict(chosen)) for chosen in counts for rank in every}
        found |= {self.mesh.stage_ranks(rank, stages) for stages in ties for rank in every}
        return sorted(ranks for ranks in found if len(ranks) > 1)

    def shares_gradients(self, stages: Collection[int]) -> bool:
        """Return whether ranks that hold ``stages`` sum a gradient with other ranks of the model.

        A tie to a stage of their own counts too.
        """
        for gradient in self.registry.of_kind("gradient"):
            info = self.registry.get("parameter", gradient.name)
            if not set(stages).isdisjoint(info.stages) and (len(info.stages) > 1 or self._has_addends(info)):
                return True
        return False

    def _has_addends(self, info: TensorInfo) -> bool:
        """Return whether ranks of one stage sum gradients of some elements of a parameter."""
        return any(max(self._counts(info, axis)) > 1 for axis in self.mesh.model_axes(info.axes))

    def _counts(self, info: TensorInfo, axis: str) -> set[int]:
        """Return the possible numbers of neighbours on the axis that hold addends of the same elements."""
        where, size = info.on(axis), self.mesh.size(axis)
        if isinstance(where, Shard):
            return {block.replicas(size) for block in where.blocks} or {1}
        return {size if isinstance(info.gradient_on(axis), Partial) else 1}

    def views(self, info: TensorInfo, full: Tensor, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of views, of the whole tensor and of this rank's piece, that hold the same elements.

        Args:
            info: The tensor's entry in the registry.
            full: The whole tensor.
            piece: This rank's piece.
        """
        cuts = self.cuts(info)
        piece = piece.view(local_shape(info.shape, cuts))
        for held in product(*(spans(size, dim, cuts)[0] for dim, size in enumerate(info.shape))):
            theirs, mine = full, piece
            for dim, span in enumerate(held):
                theirs = theirs.narrow(dim, span.full, span.size)
                mine = mine.narrow(dim, span.local, span.size)
            yield theirs, mine


def extend(ranges: list[tuple[int, int]], found: tuple[int, int]) -> None:
    """Add a range [start, stop), or extend the last range if ``found`` continues it."""
    if ranges and ranges[-1][1] == found[0]:
        ranges[-1] = (ranges[-1][0], found[1])
    else:
        ranges.append(found)
