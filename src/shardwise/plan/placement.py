"""Placement: how one tensor lies on one mesh axis, and the moves between placements.

    Replicate            every rank holds the whole
    Shard(dim, blocks)   the ranks hold equal pieces of dimension ``dim``; ``FLAT`` cuts the flattened elements
    Partial              every rank holds an addend; the sum is the tensor
    ByHash               rows live where the hash of their key says (dynamic tables)

Legal moves, and the elements that a rank sends for each (ring algorithms, P elements, N ranks on the axis):

    Shard   -> Replicate   all-gather       P (N-1)/N
    Partial -> Shard       reduce-scatter   P (N-1)/N
    Partial -> Replicate   all-reduce      2P (N-1)/N
    Replicate -> Shard     slice            0

Source: the collectives' lower bounds as used in ZeRO (arXiv:1910.02054, section 7).
"""

from dataclasses import dataclass
from typing import TypeAlias

from shardwise.plan.errors import PlanError

FLAT = -1
"""The ``dim`` of a Shard that cuts the flattened tensor by elements."""


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Rank i holds piece i of ``dim``; with ``blocks`` > 1 each block (Q, K, V say) is cut by itself.

    ``replicas`` neighbouring ranks hold the same piece (fewer KV heads than ranks).
    """

    dim: int = FLAT
    blocks: int = 1
    replicas: int = 1

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
