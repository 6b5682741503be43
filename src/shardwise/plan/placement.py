"""Placement: how one tensor lies on one mesh axis, and the moves between placements.

    Replicate            every rank holds the whole
    Shard(dim, blocks)   the ranks hold equal pieces of dimension ``dim``, each block cut by itself; ``FLAT`` cuts the
                         flattened elements
    Partial              every rank holds an addend; the sum is the tensor
    PerRank              every rank holds values of its own; the first rank's values stand for all
    OnRank(index)        one rank holds the whole, the others nothing
    ByHash(buckets)      a row lies on the rank that the bucket of its key names

Legal moves, and the elements that a rank sends for each (ring algorithms, P elements, N ranks on the axis):

    Shard   -> Replicate   all-gather       P (N-1)/N
    Partial -> Shard       reduce-scatter   P (N-1)/N
    Partial -> Replicate   all-reduce      2P (N-1)/N
    Replicate -> Shard     slice            0

Besides its placement among the ranks, a tensor has a ``Tier`` on its rank: the device, host memory, or a disk.

Source: the collectives' lower bounds as used in ZeRO (arXiv:1910.02054, section 7).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from shardwise.base.errors import PlanError

Tier = Literal["device", "host", "disk"]
"""Memory in which a rank keeps a buffer between uses. On a CPU, host memory is the device's memory."""

FLAT = -1
"""Value of ``Shard.dim`` that cuts the flattened tensor by elements."""


@dataclass(frozen=True)
class Replicate:
    """Placement in which every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


class ShardBlock(NamedTuple):
    """A range of a dimension that is cut by itself: the queries of a fused QKV matrix, for example."""

    size: int
    """Elements along the dimension."""
    parts: int
    """Indivisible equal parts (heads). With fewer parts than ranks, neighbouring ranks hold the same part."""

    def replicas(self, ranks: int) -> int:
        """Return the number of neighbouring ranks that hold the same part."""
        return max(ranks // self.parts, 1)


@dataclass(frozen=True)
class Shard:
    """Placement in which rank i holds piece i of ``dim``; each of ``blocks`` is cut by itself.

    Without blocks, the dimension is one block that is cut by elements. If the number of ranks does not divide its size,
    the last pieces are padded to the size of the first. With ``balanced``, pieces differ by at most one element instead
    and none is padded.
    """

    dim: int = FLAT
    blocks: tuple[ShardBlock, ...] = ()
    balanced: bool = False

    def __str__(self) -> str:
        return "S" if self.dim == FLAT else f"S({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Placement in which every rank holds an addend of the tensor."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class PerRank:
    """Placement in which every rank holds values of its own; the first rank's values stand for all.

    An example are the statistics that each rank keeps of its own batches.
    """

    def __str__(self) -> str:
        return "1"


@dataclass(frozen=True)
class OnRank:
    """Placement in which one rank holds the whole tensor and the others nothing."""

    index: int = 0

    def __str__(self) -> str:
        return f"on {self.index}"


@dataclass(frozen=True)
class ByHash:
    """Placement in which a row lies on the rank that its bucket names: bucket b on rank b mod N.

    In a static table, row q·buckets + b is in bucket b, and each bucket has as many lines as the fullest. In a dynamic
    table, which has ``buckets`` = 0, the hash of a row's key determines the rank, so that every rank holds about as
    many rows.
    """

    buckets: int = 0

    def __str__(self) -> str:
        return "H"


Placement: TypeAlias = Replicate | Shard | Partial | PerRank | OnRank | ByHash

_MOVES: dict[tuple[type, type], tuple[str, int]] = {
    (Shard, Replicate): ("all_gather", 1),
    (Partial, Shard): ("reduce_scatter", 1),
    (Partial, Replicate): ("all_reduce", 2),
    (Replicate, Shard): ("slice", 0),
}


def move(source: Placement, target: Placement) -> str:
    """Return the name of the collective that takes a tensor from ``source`` to ``target``; "" if the two are equal.

    Raises:
        PlanError: if no legal move leads from ``source`` to ``target``.
    """
    if source == target:
        return ""
    if (type(source), type(target)) not in _MOVES:
        raise PlanError(f"placement: no move leads from {source} to {target}; legal: S->R, P->S, P->R, R->S")
    return _MOVES[type(source), type(target)][0]


def elements_sent(source: Placement, target: Placement, elements: int, ranks: int) -> int:
    """Return the elements that one rank sends to move a tensor of ``elements``, rounded down.

    Args:
        source: Placement before the move.
        target: Placement after the move.
        elements: Elements of the full tensor.
        ranks: Ranks on the axis.
    """
    if source == target:
        return 0
    move(source, target)
    return _MOVES[type(source), type(target)][1] * elements * (ranks - 1) // ranks


# Pieces of one tensor ----------------------------------------------------------------------------------------------


class PieceRange(NamedTuple):
    """Positions [start, stop) of the dimension that is cut, in the order in which a rank holds them."""

    start: int
    stop: int
    replicas: int = 1
    """Number of neighbouring ranks that hold these positions."""


def pieces(shard: Shard, size: int, index: int, ranks: int) -> list[PieceRange]:
    """Return the positions that rank ``index`` holds of a dimension; padding is left out.

    Args:
        shard: Placement of the tensor.
        size: Size of the full dimension.
        index: Index of the rank on the axis.
        ranks: Ranks on the axis.

    Raises:
        PlanError: if a block's parts and the ranks do not divide one another.
    """
    if not shard.blocks and shard.balanced:
        return [PieceRange(index * size // ranks, (index + 1) * size // ranks)]
    if not shard.blocks:
        step = -(-size // ranks)
        return [PieceRange(min(index * step, size), min((index + 1) * step, size))]
    assert sum(block.size for block in shard.blocks) == size, "the blocks fill the dimension"
    found, first = [], 0
    for block in shard.blocks:
        if block.parts % ranks and ranks % block.parts:
            near = [
                n
                for n in range(1, max(block.parts, ranks) + 1)
                if block.parts % n == 0 or n % block.parts == 0
            ]
            best = min(near, key=lambda n: (abs(n - ranks), n))
            raise PlanError(
                f"placement: {block.parts} heads (or other indivisible parts) do not divide over {ranks} ranks; the "
                f"nearest number of ranks that works is {best}"
            )
        replicas = block.replicas(ranks)
        step = block.size // (ranks // replicas)
        start = first + index // replicas * step
        found.append(PieceRange(start, start + step, replicas))
        first += block.size
    return found


# Pieces over several axes ------------------------------------------------------------------------------------------


class AxisCut(NamedTuple):
    """The effect of one axis on a tensor, seen from one rank on the axis."""

    where: Placement
    place: int
    """Index of the rank on the axis."""
    ranks: int
    """Number of ranks on the axis."""

    @property
    def dim(self) -> int | None:
        """The dimension that is cut; None if the whole tensor is held or the cut is flat."""
        is_slice = isinstance(self.where, Shard) and self.where.dim != FLAT and self.ranks > 1
        return self.where.dim if isinstance(self.where, Shard) and is_slice else None


class LocalSpan(NamedTuple):
    """Positions of one dimension that are contiguous both in a rank's piece and in the whole tensor."""

    local: int
    full: int
    size: int
    replicas: dict[int, int]
    """Number of neighbouring ranks that hold the positions, keyed by cut number.

    Cuts with one such rank are left out.
    """


class ContiguousRun(NamedTuple):
    """Elements that are contiguous both in a rank's flattened piece and in the flattened whole tensor."""

    local: int
    full: int
    elements: int
    replicas: tuple[int, ...] = ()
    """Number of neighbouring ranks that hold the elements, by cut; the first of these ranks stands for all."""


def spans(size: int, dim: int, cuts: Sequence[AxisCut]) -> tuple[list[LocalSpan], int]:
    """Return the positions of dimension ``dim`` that a rank holds, and the size of its piece with padding.

    The positions come in the order in which the rank holds them. If several axes cut the dimension, each cuts what the
    axes before it left.
    """
    held, length = [LocalSpan(0, 0, size, {})], size
    for number, cut in enumerate(cuts):
        if cut.dim != dim:
            continue
        assert isinstance(cut.where, Shard), "a cut along a dimension is a Shard"
        found, local = [], 0
        for piece in pieces(cut.where, length, cut.place, cut.ranks):
            replicas = {number: piece.replicas} if piece.replicas > 1 else {}
            for span in held:
                start, stop = max(piece.start, span.local), min(piece.stop, span.local + span.size)
                if start < stop:
                    full = span.full + start - span.local
                    found.append(
                        LocalSpan(local + start - piece.start, full, stop - start, span.replicas | replicas)
                    )
            local += piece.stop - piece.start
        first = pieces(cut.where, length, 0, cut.ranks)
        held, length = found, sum(piece.stop - piece.start for piece in first)
    return held, length


def local_shape(shape: Sequence[int], cuts: Sequence[AxisCut]) -> tuple[int, ...]:
    """Return the shape of one rank's piece, padding included: the same on every rank."""
    return tuple(spans(size, dim, cuts)[1] for dim, size in enumerate(shape))


def shape_on(shape: Sequence[int], cuts: Sequence[AxisCut]) -> tuple[int, ...]:
    """Return the shape of what the rank of ``cuts`` holds, padding included.

    Unlike ``local_shape``, this also covers placements whose pieces differ from rank to rank.
    """
    rows, rest = shape[0] if shape else 1, []
    for cut in cuts:
        if isinstance(cut.where, OnRank):
            rows *= cut.place == cut.where.index
        elif isinstance(cut.where, ByHash):
            each = cut.where.buckets or cut.ranks
            rows = -(-rows // each) * len(range(cut.place, each, cut.ranks))
        else:
            rest.append(cut)
    found = list(local_shape((rows, *shape[1:]), rest)) if shape else []
    for cut in rest:
        if isinstance(cut.where, Shard) and cut.where.balanced and cut.dim is not None:
            (piece,) = pieces(cut.where, shape[cut.dim], cut.place, cut.ranks)
            found[cut.dim] = piece.stop - piece.start
    return tuple(found)


def runs(
    shape: Sequence[int], cuts: Sequence[AxisCut], start: int = 0, stop: int | None = None
) -> Iterator[ContiguousRun]:
    """Yield the runs in which a rank's flattened piece lies in the whole tensor, without padding.

    A tensor may be cut along several dimensions by several axes: ``[E/ep, 2F/etp, D]``.

    Args:
        shape: Shape of the whole tensor.
        cuts: The axes' cuts, seen from the rank.
        start: First element of the flattened piece.
        stop: End of the elements; None: the end of the piece.
    """
    everywhere = tuple(1 if cut.dim is not None else cut.ranks for cut in cuts)
    dims = {cut.dim for cut in cuts if cut.dim is not None}
    if not dims:
        stop = math.prod(shape) if stop is None else stop
        if start < stop:
            yield ContiguousRun(start, start, stop - start, everywhere)
        return
    last = max(dims)
    held, local = zip(*(spans(shape[dim], dim, cuts) for dim in range(last + 1)), strict=True)
    inner = math.prod(shape[last + 1 :])
    row_elements = local[last] * inner
    stop = math.prod(local) * inner if stop is None else stop
    # For each outer dimension, map each position of the piece to its position in the whole; padding has no entry.
    places = [
        {span.local + i: (span.full + i, span.replicas) for span in each for i in range(span.size)}
        for each in (held[:last] if len(dims) > 1 else ())
    ]
    for row in range(start // row_elements, -(-stop // row_elements)) if row_elements else ():
        outer = _outer(row, local[:last], shape[:last], places) if len(dims) > 1 else (row, {})
        if outer is None:
            continue
        for span in held[last]:
            first = row * row_elements + span.local * inner
            begin, end = max(first, start), min(first + span.size * inner, stop)
            if begin < end:
                full = (outer[0] * shape[last] + span.full) * inner + begin - first
                found = outer[1] | span.replicas
                replicas = tuple(found.get(i, n) for i, n in enumerate(everywhere)) if found else everywhere
                yield ContiguousRun(begin, full, end - begin, replicas)


def _outer(
    row: int,
    local: Sequence[int],
    shape: Sequence[int],
    places: Sequence[Mapping[int, tuple[int, dict[int, int]]]],
) -> tuple[int, dict[int, int]] | None:
    """Return the row of the whole tensor that is row ``row`` of a piece, and its replicas by cut; None for padding."""
    full, stride = 0, 1
    replicas: dict[int, int] = {}
    for size, whole, known in zip(reversed(local), reversed(shape), reversed(places), strict=True):
        row, place = divmod(row, size)
        if place not in known:
            return None
        full += known[place][0] * stride
        stride *= whole
        replicas |= known[place][1]
    return full, replicas
