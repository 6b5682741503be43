"""Row counts: the numbers of rows between ranks in a pass, in every hop and direction, computed from one table.

    a rank's line   its layer | pairs of each expert [E] | of each hop, rows that reach each place: hosts, then ranks
    the table       the lines of all ranks of ep and etp, gathered; read by the host once

With hops of sizes s_0, s_1, ... a rank of ep has the digits (d_0, d_1, ...). A hop changes one of them: before hop l,
the first l digits of a row's rank are those of its destination and the others are those of its source. So

    counts_l[i][j] = Σ over sources with digit i of hop l, and this rank's own digits after it, of
                     their rows that reach the place (this rank's digits before l, j)

rows go from i to j; the rows that arrive, the pairs of each expert and those of the fullest rank are sums of the same
table. No further exchange is needed: the way back, backward and recomputations use the numbers of the first pass. The
layer is a number computed from its name: torch's backends do not compare layers, and if the data of a rank skipped a
layer, rows of two layers would be mixed up silently.

If a router's capacity bounds the pairs of an expert, bounds may replace counts (``block_counts``): every rank sends
every other a block of one size, padded with unused rows, and no host reads anything from a device.

Cost:   one gather over ep, one over etp, of 1 + E + Σ places numbers of 8 bytes a rank; one wait for the device.
Shapes: E experts, N tokens of this rank, k experts a token.
"""

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import CommError
from shardwise.base.words import named_ranks
from shardwise.comm.collectives import Group
from shardwise.comm.exchange import Counts, share
from shardwise.kernels.expert_choice import route_counts
from shardwise.parallel.expert.cost import expected_reach


class RowCounts(NamedTuple):
    """Row counts of one pass that this rank needs."""

    hops: tuple[Counts, ...]
    """Rows from rank to rank of each hop's group."""
    parts: list[int]
    """Number of rows that arrive at each rank of etp."""
    experts: list[int]
    """Number of pairs of each expert of this rank."""
    fullest: int
    """Number of pairs of the rank that has most; the same on all ranks."""
    is_bound: bool = False
    """True if the numbers are bounds, the same on all ranks, up to which messages are padded."""


def row_counts(
    choices: Sequence[Tensor], experts: int, levels: Sequence[Group], ep: Group, etp: Group, name: str
) -> list[RowCounts]:
    """Return the row counts of each of ``choices``. All ranks of ``ep`` and ``etp`` call this together.

    The host reads one table, whatever the number of choices.

    Args:
        choices: experts of the rows, [N, k] each; -1 for none.
        experts: number of experts.
        levels: the groups of each hop, which make up ``ep``.
        ep: ranks over which experts are spread.
        etp: ranks over which the features of an expert are cut.
        name: name of the layer.

    Raises:
        CommError: on all ranks of ``ep``, if the ranks are at different layers.
    """
    sizes, places = [group.size for group in levels], places_of(levels)
    layer = zlib.crc32(name.encode())
    each = [route_counts(index, experts, places, layer) for index in choices]
    lines = torch.stack(each) if len(each) > 1 else each[0][None]
    table = gathered_lines(lines, ep, etp, name).cpu()  # [etp, ep, choices, 1 + E + Σ places]
    ep.clock.check_intact()
    _check_layers(table[etp.index, :, 0, 0].tolist(), ep, name)
    found = []
    for line in table.unbind(2):
        _, pairs, *reached = line.split([1, experts, *places], -1)
        to_me = reached[-1][:, :, ep.index].sum(1)
        of_ranks = pairs.reshape(etp.size, ep.size, ep.size, -1).sum((0, 1))  # [ep, E/ep]
        hops = tuple(
            _between(rows[etp.index], sizes, level, ep.index).tolist() for level, rows in enumerate(reached)
        )
        found.append(RowCounts(hops, to_me.tolist(), of_ranks[ep.index].tolist(), int(of_ranks.sum(1).max())))
    return found


def places_of(levels: Sequence[Group]) -> list[int]:
    """Return the numbers of places that the rows of each hop may reach."""
    sizes = [group.size for group in levels]
    return [math.prod(sizes[: level + 1]) for level in range(len(sizes))]


def gathered_lines(lines: Tensor, ep: Group, etp: Group, name: str) -> Tensor:
    """Return the lines of all ranks, [etp, ep, choices, 1 + E + Σ places]; see the module's docstring."""
    what = f"counts of {name}"
    return share(share(lines, ep, what), etp, what)


def block_counts(tokens: int, room: int, experts: int, levels: Sequence[Group], etp: Group) -> RowCounts:
    """Return bounds of the row counts, for padded blocks.

    Args:
        tokens: largest number of rows of a rank.
        room: largest number of pairs that an expert gets of a rank's rows.
        experts: number of experts.
        levels: the groups of each hop.
        etp: ranks over which the features of an expert are cut.
    """
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
    """Return the expected row counts of a part of a pass whose router chooses evenly (``cost.py``), rounded up.

    Shapes are enough to compute them.

    Args:
        rows: number of rows of each rank.
        parts: number of parts of the pass.
        top_k: experts of a token.
        experts: number of experts.
        levels: the groups of each hop.
        ep: ranks over which experts are spread.
        etp: ranks over which the features of an expert are cut.
    """
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


def _between(reached: Tensor, sizes: Sequence[int], level: int, own: int) -> Tensor:
    """Return the rows from rank to rank of this rank's group in hop ``level``: [s, s].

    ``reached`` [ep, places] has the rows that each rank has for each place of the hop.
    """
    size, behind = sizes[level], math.prod(sizes[level + 1 :])
    before = math.prod(sizes[:level])
    place, rest = own // (size * behind), own % behind
    return reached.reshape(before, size, behind, before, size)[:, :, rest, place].sum(0)
