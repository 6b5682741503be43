"""Placement: how one tensor lies on one mesh axis, and the moves between placements.

    Replicate            every rank holds the whole
    Shard(dim, blocks)   the ranks hold equal pieces of dimension ``dim``, each block cut by itself; ``FLAT`` cuts the
                         flattened elements
    Partial              every rank holds an addend; the sum is the tensor
    ByHash               rows live where the hash of their key says (dynamic tables)

Legal moves, and the elements that a rank sends for each (ring algorithms, P elements, N ranks on the axis):

    Shard   -> Replicate   all-gather       P (N-1)/N
    Partial -> Shard       reduce-scatter   P (N-1)/N
    Partial -> Replicate   all-reduce      2P (N-1)/N
    Replicate -> Shard     slice            0

Source: the collectives' lower bounds as used in ZeRO (arXiv:1910.02054, section 7).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardwise.plan.errors import PlanError

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
    to the size of the first.
    """

    dim: int = FLAT
    blocks: tuple[Block, ...] = ()

    def __str__(self) -> str:
        return "S" if self.dim == FLAT else f"S({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds an addend of the tensor."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class ByHash:
    """Rows live on the rank that the hash of their key names."""

    def __str__(self) -> str:
        return "H"


Placement: TypeAlias = Replicate | Shard | Partial | ByHash

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


class Run(NamedTuple):
    """Elements that lie together both in a rank's flattened piece and in the flattened full tensor."""

    local: int
    full: int
    elements: int
    replicas: int = 1
    """Neighbouring ranks that hold them; the first of these speaks for all."""


def pieces(shard: Shard, size: int, index: int, ranks: int) -> list[Piece]:
    """What rank ``index`` of ``ranks`` holds of a dimension of ``size``; padding is not in it.

    Errors: PlanError where a block's parts and the ranks do not divide one another.
    """
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


def local_shape(shape: Sequence[int], where: Placement, ranks: int) -> tuple[int, ...]:
    """Shape of one rank's piece, padding included: the same on every rank."""
    if not isinstance(where, Shard) or where.dim == FLAT:
        return tuple(shape)
    size = sum(piece.stop - piece.start for piece in pieces(where, shape[where.dim], 0, ranks))
    return (*shape[: where.dim], size, *shape[where.dim + 1 :])


def runs(
    shape: Sequence[int], where: Placement, index: int, ranks: int, start: int = 0, stop: int | None = None
) -> Iterator[Run]:
    """How elements [start, stop) of rank ``index``'s flattened piece lie in the full tensor of ``shape``."""
    local = local_shape(shape, where, ranks)
    stop = math.prod(local) if stop is None else stop
    if not isinstance(where, Shard) or where.dim == FLAT or ranks == 1:
        if start < stop:
            yield Run(start, start, stop - start, ranks)
        return
    dim = where.dim
    inner = math.prod(shape[dim + 1 :])
    local_row, full_row = local[dim] * inner, shape[dim] * inner
    held = pieces(where, shape[dim], index, ranks)
    first_row = start // local_row if local_row else 0
    last_row = -(-stop // local_row) if local_row else 0
    for row in range(first_row, last_row):
        place = row * local_row
        for piece in held:
            length = (piece.stop - piece.start) * inner
            begin, end = max(place, start), min(place + length, stop)
            if begin < end:
                first = row * full_row + piece.start * inner + begin - place
                yield Run(begin, first, end - begin, piece.replicas)
            place += length
