"""Placement: how one tensor lies on one mesh axis, and the moves between placements.

    Replicate            every rank holds the whole
    Shard(dim, blocks)   the ranks hold equal pieces of dimension ``dim``, each block cut by itself; ``FLAT`` cuts the
                         flattened elements
    Partial              every rank holds an addend; the sum is the tensor
    PerRank              every rank holds values of its own; the first rank's stand for all
    OnRank(index)        one rank holds the whole, the others nothing
    ByHash(buckets)      rows live where the bucket of their key says

Legal moves, and the elements that a rank sends for each (ring algorithms, P elements, N ranks on the axis):

    Shard   -> Replicate   all-gather       P (N-1)/N
    Partial -> Shard       reduce-scatter   P (N-1)/N
    Partial -> Replicate   all-reduce      2P (N-1)/N
    Replicate -> Shard     slice            0

Beside where it lies among the ranks, a tensor lies on a ``Tier`` of its rank: the device, host memory, or a disk.

Source: the collectives' lower bounds as used in ZeRO (arXiv:1910.02054, section 7).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from shardwise.plan.errors import PlanError

Tier = Literal["device", "host", "disk"]
"""Where a rank keeps a buffer between its uses. On a CPU host memory is the device's."""

FLAT = -1
"""The ``dim`` of a Shard that cuts the flattened tensor by elements."""


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


class Block(NamedTuple):
    """A stretch of a dimension that is cut by itself: the queries of a fused QKV matrix, say."""

    size: int
    """Elements along the dimension."""
    parts: int
    """Indivisible equal parts (heads). With fewer parts than ranks, neighbouring ranks hold the same part."""

    def replicas(self, ranks: int) -> int:
        """Neighbouring ranks that hold the same part."""
        return max(ranks // self.parts, 1)


@dataclass(frozen=True)
class Shard:
    """Rank i holds piece i of ``dim``; each of ``blocks`` is cut by itself.

    Without blocks the dimension is one, cut by elements; where the ranks do not divide it, the last pieces are padded
    to the size of the first, or, ``balanced``, pieces differ by one element and none is padded.
    """

    dim: int = FLAT
    blocks: tuple[Block, ...] = ()
    balanced: bool = False

    def __str__(self) -> str:
        return "S" if self.dim == FLAT else f"S({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds an addend of the tensor."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class PerRank:
    """Every rank holds values of its own, as statistics of its own batches; the first rank's stand for all."""

    def __str__(self) -> str:
        return "1"


@dataclass(frozen=True)
class OnRank:
    """One rank holds the whole tensor, the others nothing of it."""

    index: int = 0

    def __str__(self) -> str:
        return f"on {self.index}"


@dataclass(frozen=True)
class ByHash:
    """Rows live on the rank that their bucket names, bucket b on rank b mod N.

    Of a static table row q·buckets + b is in bucket b, and each bucket has as many lines as the fullest. Without
    ``buckets``, of a dynamic table, the hash of a row's key says where it is: about as many on every rank.
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
    """Name of the collective that takes a tensor from ``source`` to ``target``; "" where they are equal."""
    if source == target:
        return ""
    if (type(source), type(target)) not in _MOVES:
        raise PlanError(f"placement: no move leads from {source} to {target}; legal: S->R, P->S, P->R, R->S")
    return _MOVES[type(source), type(target)][0]


def elements_sent(source: Placement, target: Placement, elements: int, ranks: int) -> int:
    """Elements that one rank sends to move a tensor of ``elements``, rounded down."""
    if source == target:
        return 0
    move(source, target)
    return _MOVES[type(source), type(target)][1] * elements * (ranks - 1) // ranks


# Pieces of one tensor ----------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Places [start, stop) of the dimension that is cut, in the order in which a rank holds them."""

    start: int
    stop: int
    replicas: int = 1
    """Neighbouring ranks that hold them."""


def pieces(shard: Shard, size: int, index: int, ranks: int) -> list[Piece]:
    """What rank ``index`` of ``ranks`` holds of a dimension of ``size``; padding is not in it.

    Errors: PlanError where a block's parts and the ranks do not divide one another.
    """
    if not shard.blocks and shard.balanced:
        return [Piece(index * size // ranks, (index + 1) * size // ranks)]
    if not shard.blocks:
        step = -(-size // ranks)
        return [Piece(min(index * step, size), min((index + 1) * step, size))]
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
        found.append(Piece(start, start + step, replicas))
        first += block.size
    return found


# Pieces over several axes ------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """What one axis does to a tensor, seen from one rank on it."""

    where: Placement
    place: int
    """The rank's, on the axis."""
    ranks: int
    """On the axis."""

    @property
    def dim(self) -> int | None:
        """The dimension that is cut; None where the whole is held, or cut flat."""
        is_slice = isinstance(self.where, Shard) and self.where.dim != FLAT and self.ranks > 1
        return self.where.dim if isinstance(self.where, Shard) and is_slice else None


class LocalSpan(NamedTuple):
    """Places of one dimension that lie together both in a rank's piece and in the whole tensor."""

    local: int
    full: int
    size: int
    replicas: dict[int, int]
    """Neighbouring ranks that hold them, by the number of the cut, where it is more than one."""


class Run(NamedTuple):
    """Elements that lie together both in a rank's flattened piece and in the flattened whole tensor."""

    local: int
    full: int
    elements: int
    replicas: tuple[int, ...] = ()
    """Neighbouring ranks that hold them, by cut; the first of these stands for all."""


def spans(size: int, dim: int, cuts: Sequence[Cut]) -> tuple[list[LocalSpan], int]:
    """What a rank holds of dimension ``dim`` of ``size``, in the order in which it holds it, and the size of its piece,
    padding included. Where several axes cut the dimension, each cuts what those before it left."""
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


def local_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Shape of one rank's piece, padding included: the same on every rank."""
    return tuple(spans(size, dim, cuts)[1] for dim, size in enumerate(shape))


def shape_on(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Shape of what the rank of ``cuts`` holds, padding included: pieces that differ from rank to rank too."""
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


def runs(shape: Sequence[int], cuts: Sequence[Cut], start: int = 0, stop: int | None = None) -> Iterator[Run]:
    """How elements [start, stop) of a rank's flattened piece lie in the whole tensor of ``shape``; padding is left out.

    A tensor may be cut along several dimensions by several axes: ``[E/ep, 2F/etp, D]``.
    """
    everywhere = tuple(1 if cut.dim is not None else cut.ranks for cut in cuts)
    dims = {cut.dim for cut in cuts if cut.dim is not None}
    if not dims:
        stop = math.prod(shape) if stop is None else stop
        if start < stop:
            yield Run(start, start, stop - start, everywhere)
        return
    last = max(dims)
    held, local = zip(*(spans(shape[dim], dim, cuts) for dim in range(last + 1)), strict=True)
    inner = math.prod(shape[last + 1 :])
    row_elements = local[last] * inner
    stop = math.prod(local) * inner if stop is None else stop
    # By outer dimension where each place of the piece lies in the whole; padding lies nowhere.
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
                yield Run(begin, full, end - begin, replicas)


def _outer(
    row: int,
    local: Sequence[int],
    shape: Sequence[int],
    places: Sequence[Mapping[int, tuple[int, dict[int, int]]]],
) -> tuple[int, dict[int, int]] | None:
    """The row of the whole tensor that is row ``row`` of a piece, and who else holds it; None for padding."""
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
