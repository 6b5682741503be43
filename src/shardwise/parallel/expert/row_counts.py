"""Row counts: how many rows go from whom to whom in a pass, over every hop, there and back. One table tells all of it.

    a rank's line   its layer | pairs of each expert [E] | of each hop, rows that reach each place: hosts, then ranks
    the table       the lines of all ranks of ep and etp, gathered; read by the host once

With hops of sizes s_0, s_1, ... a rank of ep has the digits (d_0, d_1, ...). A hop changes one of them: before hop l a
row lies where the first l digits are those of where it goes and the others are those of where it comes from. So

    counts_l[i][j] = Σ over sources with digit i of hop l, and this rank's own behind it, of
                     their rows that reach the place (this rank's digits before l, j)

go from i to j, and what arrives, what each expert gets and what the fullest rank takes are sums of the same table. No
rank asks again: the way back, backward and what runs again go by the numbers of the first. The layer is a number of
its name: torch's backends compare none, and rows of two layers would pass for one another wherever the data of a rank
leave a layer out.

Where a router's capacity bounds what an expert may get, bounds may stand in the place of counts (``block_counts``):
from every rank to every other goes a block of one size, filled up with rows that nobody wants, and no host asks at all.

Cost:   one gather over ep, one over etp, of 1 + E + Σ places numbers of 8 bytes a rank; one wait for the device.
Shapes: E experts, N tokens of this rank, k experts a token.
"""

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.exchange import Counts, share
from shardwise.parallel.expert.cost import expected_reach
from shardwise.plan.errors import CommError
from shardwise.plan.words import named_ranks


class RowCounts(NamedTuple):
    """Of one pass, as this rank needs them."""

    hops: tuple[Counts, ...]
    """By hop, rows from rank to rank of its group."""
    parts: list[int]
    """Rows that arrive at each rank of etp."""
    experts: list[int]
    """Pairs of each expert of this rank."""
    fullest: int
    """Pairs of the rank that has most; the same on all ranks."""
    is_bound: bool = False
    """Whether these are bounds, the same on all ranks, and what is less is filled up."""


def owner_of(index: Tensor, local: int, places: int) -> Tensor:
    """Which of ``places``, each with ``local`` experts, holds those of ``index``; ``places`` where it is nobody's."""
    return torch.where(index < 0, places, index.div(local, rounding_mode="floor"))


def reaches(owner: Tensor, places: int) -> Tensor:
    """Which of ``places`` each row goes to, by those of its experts: [N, k] -> bool [N, places]."""
    return owner.new_zeros(len(owner), places + 1, dtype=torch.bool).scatter_(1, owner, True)[:, :places]


def row_counts(
    choices: Sequence[Tensor], experts: int, levels: Sequence[Group], ep: Group, etp: Group, name: str
) -> list[RowCounts]:
    """Of each of ``choices``, rows' experts [N, k]. All ranks of ``ep``, which ``levels`` make, and ``etp`` call this
    together. One read, however many.

    Errors: CommError where a rank of ``ep`` is at another layer than this one, on all of them.
    """
    sizes = [group.size for group in levels]
    places = [math.prod(sizes[: level + 1]) for level in range(len(sizes))]
    lines = torch.stack([_line(index, experts, places, zlib.crc32(name.encode())) for index in choices])
    what = f"counts of {name}"
    table = share(share(lines, ep, what), etp, what).cpu()  # [etp, ep, choices, 1 + E + Σ places]
    ep.clock.check_intact()
    _check_layers(table[etp.index, :, 0, 0].tolist(), ep, name)
    found = []
    for each in table.unbind(2):
        _, pairs, *reached = each.split([1, experts, *places], -1)
        to_me = reached[-1][:, :, ep.index].sum(1)
        of_ranks = pairs.reshape(etp.size, ep.size, ep.size, -1).sum((0, 1))  # [ep, E/ep]
        hops = tuple(
            _between(rows[etp.index], sizes, level, ep.index).tolist() for level, rows in enumerate(reached)
        )
        found.append(RowCounts(hops, to_me.tolist(), of_ranks[ep.index].tolist(), int(of_ranks.sum(1).max())))
    return found


def block_counts(tokens: int, room: int, experts: int, levels: Sequence[Group], etp: Group) -> RowCounts:
    """Bounds, where no rank has more than ``tokens`` rows and no expert gets more than ``room`` pairs of a rank's."""
    hops, rows, local, sources = [], tokens, experts, 1
    for group in levels:
        local //= group.size
        block = min(rows, sources * local * room)
        hops.append([[block] * group.size] * group.size)
        rows, sources = group.size * block, sources * group.size
    each = etp.size * min(rows, sources * room)
    return RowCounts(tuple(hops), [rows] * etp.size, [each] * local, each * local, is_bound=True)


def even_counts(
    rows: int, parts: int, top_k: int, experts: int, levels: Sequence[Group], ep: Group, etp: Group
) -> RowCounts:
    """What each of ``parts`` of a pass has whose ranks bring ``rows`` each and whose router chooses evenly
    (``cost.py``): for who knows shapes alone. Rounded up."""
    places, sources, hops = 1, 1, []
    for group in levels:
        places *= group.size
        reaching = rows * sources * expected_reach(experts, top_k, places) / parts
        hops.append([[math.ceil(reaching)] * group.size] * group.size)
        sources *= group.size
    local, pairs = experts // ep.size, -(-etp.size * rows * top_k // parts)
    each = [pairs * (i + 1) // local - pairs * i // local for i in range(local)]
    arrived = sum(row[0] for row in hops[-1])
    return RowCounts(tuple(hops), [arrived] * etp.size, each, pairs)


def _check_layers(layers: Sequence[int], ep: Group, name: str) -> None:
    ranks = ep.names or ep.ranks
    others = [rank for rank, layer in zip(ranks, layers, strict=True) if layer != layers[ep.index]]
    if others:
        raise CommError(
            f"rank {ranks[ep.index]}, step {ep.clock.step}, is at {name}, {named_ranks(others)} at another layer of "
            "experts: the ranks of mesh.ep use one another's, so all run every such layer, whatever their data are"
        )


def _line(index: Tensor, experts: int, places: Sequence[int], layer: int) -> Tensor:
    """[1 + E + Σ places]"""
    chosen = torch.where(index < 0, experts, index).view(-1)
    pairs = chosen.new_zeros(experts + 1).scatter_add_(0, chosen, torch.ones_like(chosen))
    reached = [reaches(owner_of(index, experts // each, each), each).sum(0) for each in places]
    return torch.cat([pairs.new_full((1,), layer), pairs[:experts], *reached])


def _between(reached: Tensor, sizes: Sequence[int], level: int, own: int) -> Tensor:
    """Of the rows that each rank has for each place of hop ``level``, [ep, places], those from rank to rank of this
    one's group in that hop: [s, s]."""
    size, behind = sizes[level], math.prod(sizes[level + 1 :])
    before = math.prod(sizes[:level])
    place, rest = own // (size * behind), own % behind
    return reached.reshape(before, size, behind, before, size)[:, :, rest, place].sum(0)
