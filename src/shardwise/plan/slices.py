"""Slices: what one rank holds of each tensor, over all axes of the ranks that share a model.

    runs      how this rank's piece lies in the whole tensor              checkpoints, start weights
    views     the same as views of both                                   whole tensors put together
    addends   the ranks whose gradients are added to this rank's          sums over model-parallel ranks
    is_first  whether this rank counts, or writes, for all that hold it   the norm, checkpoints

Everything is read off the placements in the registry, in loops over the axes that may cut a tensor into slices: cp and
tp, for one of an expert ep and etp (``Mesh.model_axes``). Data-parallel axes are not among these: their state is cut
flat, bucket by bucket (parallel/zero/context.py), after all slices.

    gradient on an axis    held alike there           its addends are on
    Partial                by all ranks (Replicate)   all ranks of the axis
    (any)                  by neighbours (Shard)      the neighbours that hold the same part, KV heads say
    Replicate              by all ranks               none: it is equal already
"""

from collections.abc import Collection, Iterator
from itertools import product

from torch import Tensor

from shardwise.plan.mesh import DENSE, EXPERT, Mesh
from shardwise.plan.placement import Cut, Partial, Run, Shard, local_shape, runs, spans
from shardwise.plan.registry import Registry, TensorInfo


class Slices:
    """See the module's docstring. ``rank`` is the one that looks."""

    def __init__(self, registry: Registry, mesh: Mesh, rank: int):
        self.registry = registry
        self.mesh = mesh
        self.rank = rank
        views = (mesh.model_axes(state) for state in (DENSE, EXPERT))
        self._places = {axis: mesh.index(axis, rank) for axes in views for axis in axes}

    def of(self, rank: int) -> "Slices":
        """The same as another rank sees it."""
        return Slices(self.registry, self.mesh, rank)

    def cut_axes(self, info: TensorInfo) -> tuple[str, ...]:
        """The axes whose ranks hold different slices of the tensor."""
        named = zip(self.mesh.model_axes(info.axes), self.cuts(info), strict=True)
        return tuple(axis for axis, cut in named if cut.dim is not None)

    def cuts(self, info: TensorInfo) -> tuple[Cut, ...]:
        """How each axis cuts the tensor, seen from this rank."""
        return tuple(
            Cut(info.on(axis), self._places[axis], self.mesh.size(axis))
            for axis in self.mesh.model_axes(info.axes)
        )

    def local_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """Shape of a rank's piece, padding included: the same on every rank."""
        return local_shape(info.shape, self.cuts(info))

    def runs(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> Iterator[Run]:
        """How elements [start, stop) of this rank's flattened piece lie in the whole tensor."""
        return runs(info.shape, self.cuts(info), start, stop)

    def is_first(self, info: TensorInfo, run: Run) -> bool:
        """Whether this rank is the first of its stage's that hold ``run`` of a tensor."""
        axes = self.mesh.model_axes(info.axes)
        return all(self._places[axis] % held == 0 for axis, held in zip(axes, run.replicas, strict=True))

    def holds_first(self, info: TensorInfo) -> bool:
        """Whether this rank is the first of its stage's that hold a tensor, or values of their own for it."""
        axes = (axis for axis in self.mesh.stage_axes(info.axes) if not isinstance(info.on(axis), Shard))
        return all(self.mesh.index(axis, self.rank) == 0 for axis in axes)

    def addends(self, info: TensorInfo, run: Run) -> tuple[int, ...]:
        """The ranks whose gradients of ``run`` are added up, this one among them; none where nothing is to add."""
        counts = {}
        for axis, held in zip(self.mesh.model_axes(info.axes), run.replicas, strict=True):
            is_addend = isinstance(info.on(axis), Shard) or isinstance(info.gradient_on(axis), Partial)
            if held > 1 and is_addend:
                counts[axis] = held
        return self.mesh.neighbours(self.rank, counts) if counts else ()

    def groups_of_addends(self) -> list[tuple[int, ...]]:
        """Every group of ranks in the mesh that add up gradients of some trained parameter, in one order: the same for
        every rank that looks."""
        counts: set[tuple[tuple[str, int], ...]] = set()
        ties: set[tuple[int, ...]] = set()
        for gradient in self.registry.of_kind("gradient"):
            info = self.registry.get("parameter", gradient.name)
            if len(info.stages) > 1:
                ties.add(info.stages)
            axes = self.mesh.model_axes(info.axes)
            choices = [self._counts(info, axis) for axis in axes]
            counts |= {tuple(zip(axes, chosen, strict=True)) for chosen in product(*choices)}
        every = range(self.mesh.world_size)
        found = {self.mesh.neighbours(rank, dict(chosen)) for chosen in counts for rank in every}
        found |= {self.mesh.stage_ranks(rank, stages) for stages in ties for rank in every}
        return sorted(ranks for ranks in found if len(ranks) > 1)

    def shares_gradients(self, stages: Collection[int]) -> bool:
        """Whether ranks that hold ``stages`` add up some gradient with other ranks of the model, or with a stage of
        their own that it is tied to."""
        for gradient in self.registry.of_kind("gradient"):
            info = self.registry.get("parameter", gradient.name)
            if not set(stages).isdisjoint(info.stages) and (
                len(info.stages) > 1
                or any(max(self._counts(info, axis)) > 1 for axis in self.mesh.model_axes(info.axes))
            ):
                return True
        return False

    def _counts(self, info: TensorInfo, axis: str) -> set[int]:
        """How many neighbours on the axis may hold addends of the same elements."""
        where, size = info.on(axis), self.mesh.size(axis)
        if isinstance(where, Shard):
            return {block.replicas(size) for block in where.blocks} or {1}
        return {size if isinstance(info.gradient_on(axis), Partial) else 1}

    def views(self, info: TensorInfo, full: Tensor, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of a whole tensor and of this rank's piece that hold the same elements."""
        cuts = self.cuts(info)
        piece = piece.view(local_shape(info.shape, cuts))
        for held in product(*(spans(size, dim, cuts)[0] for dim, size in enumerate(info.shape))):
            theirs, mine = full, piece
            for dim, span in enumerate(held):
                theirs = theirs.narrow(dim, span.full, span.size)
                mine = mine.narrow(dim, span.local, span.size)
            yield theirs, mine
