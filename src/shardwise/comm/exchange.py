"""Exchange of rows whose number differs from rank to rank: keys one way, their vectors back, gradients forth again.

    share     every rank tells all others how much it sends to whom: counts[i][j], i to j
    send      rows by those counts; what arrives lies in the order of the ranks it came from
    back      the same rows the other way: counts read transposed
    gather    every rank gets the rows of all, in rank order
    scatter   every rank gets the sum of what all ranks made of its rows
    carry     several sends and gathers of one dtype, each kind as one message

Every rank knows all counts, so no transport needs a header or a second message, and a rank without data joins with
counts of 0.

Cost:   share sends N·(N-1)·K numbers of 8 bytes; send what leaves the rank; gather (N-1) times the largest part;
        scatter the parts of the others.
Shapes: rows [n, ...]; N ranks; K kinds of rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.trace import Purpose

Counts = list[list[int]]
"""``counts[i][j]``: rows that go from rank i to rank j."""


def share(leaving: Tensor, group: Group, what: str) -> Tensor:
    """From the rows of each kind that leave this rank for each, int64 [N, K], to those of all ranks: [N, N, K]."""
    everyone = leaving.new_empty(group.size, *leaving.shape)
    group.all_gather(everyone.view(-1), leaving.contiguous().view(-1), what, "control").wait()
    return everyone


def send(rows: Tensor, counts: Counts, group: Group, what: str, purpose: Purpose = "activations") -> Tensor:
    """The rows that arrive: ``rows`` holds what leaves for rank 0, then for rank 1 and so on."""
    if group.size == 1:
        return rows
    arriving = sum(row[group.index] for row in counts)
    inner = math.prod(rows.shape[1:])
    output = rows.new_empty(arriving, *rows.shape[1:])
    elements = [[n * inner for n in row] for row in counts]
    group.all_to_all(output.view(-1), rows.contiguous().view(-1), elements, what, purpose).wait()
    return output


def back(rows: Tensor, counts: Counts, group: Group, what: str, purpose: Purpose = "activations") -> Tensor:
    """Rows that arrived by ``counts``, or others in their places, return to where they came from."""
    return send(rows, transposed(counts), group, what, purpose)


def gather(
    rows: Tensor, parts: Sequence[int], group: Group, what: str, purpose: Purpose = "activations"
) -> Tensor:
    """The rows of all ranks, rank i bringing ``parts[i]`` of them."""
    if group.size == 1:
        return rows
    largest = max(parts)
    full = rows.new_empty(group.size, largest, *rows.shape[1:])
    own = full[group.index]
    own[: rows.shape[0]] = rows
    own[rows.shape[0] :] = 0
    group.all_gather(full.view(-1), own.reshape(-1), what, purpose).wait()
    return torch.cat([part[:count] for part, count in zip(full, parts, strict=True)])


class Parcel(NamedTuple):
    """Rows of one number each, and who gets them."""

    rows: Tensor
    """[n]: for ``send`` what leaves for rank 0, then for rank 1 and so on."""
    counts: Counts
    """As ``send``'s; or one column, of what each rank brings, which all ranks get."""

    @property
    def is_for_all(self) -> bool:
        """Gathered, not sent."""
        return len(self.counts[0]) == 1


def carry(
    parcels: Sequence[Parcel], group: Group, what: str, purpose: Purpose = "activations"
) -> list[Tensor]:
    """What arrives of each, as from ``gather`` and ``send``: two messages at most. All have one dtype."""
    if group.size == 1:
        return [parcel.rows for parcel in parcels]
    gathered = [parcel for parcel in parcels if parcel.is_for_all]
    sent = [parcel for parcel in parcels if not parcel.is_for_all]
    came = iter(_gather_all(gathered, group, what, purpose) if gathered else [])
    arrived = iter(_send_all(sent, group, what, purpose) if sent else [])
    return [next(came if parcel.is_for_all else arrived) for parcel in parcels]


def _gather_all(parcels: Sequence[Parcel], group: Group, what: str, purpose: Purpose) -> list[Tensor]:
    sizes = [[count for (count,) in parcel.counts] for parcel in parcels]
    if len(parcels) == 1:
        return [gather(parcels[0].rows, sizes[0], group, what, purpose)]
    parts = list(zip(*sizes, strict=True))  # of each rank what it brings, by parcel
    totals = list(map(sum, parts))
    full = parcels[0].rows.new_zeros(group.size, max(totals))
    own = full[group.index]
    torch.cat([parcel.rows for parcel in parcels], out=own[: totals[group.index]])
    group.all_gather(full.view(-1), own, what, purpose).wait()
    every = zip(full, totals, parts, strict=True)
    pieces = [piece for line, total, part in every for piece in line[:total].split(part)]
    return [torch.cat(pieces[i :: len(parcels)]) for i in range(len(parcels))]


def _send_all(parcels: Sequence[Parcel], group: Group, what: str, purpose: Purpose) -> list[Tensor]:
    if len(parcels) == 1:
        return [send(parcels[0].rows, parcels[0].counts, group, what, purpose)]
    ranks, me = range(group.size), group.index
    leaving = [parcel.rows.split(parcel.counts[me]) for parcel in parcels]
    packed = torch.cat([pieces[target] for target in ranks for pieces in leaving])
    totals = [[sum(parcel.counts[i][j] for parcel in parcels) for j in ranks] for i in ranks]
    arrived = send(packed, totals, group, what, purpose)
    pieces = arrived.split([parcel.counts[source][me] for source in ranks for parcel in parcels])
    return [torch.cat(pieces[i :: len(parcels)]) for i in range(len(parcels))]


def scatter(
    addends: Tensor, parts: Sequence[int], group: Group, what: str, purpose: Purpose = "activations"
) -> Tensor:
    """This rank's part of the sum of all ranks' ``addends``, of which ``parts[i]`` rows are rank i's.

    Nothing is padded. Sums are taken in rank order, those of 16-bit floats in fp32.
    """
    if group.size == 1:
        return addends
    arrived = send(addends, [list(parts)] * group.size, group, what, purpose)
    wide = torch.promote_types(addends.dtype, torch.float32)
    return arrived.view(group.size, -1, *addends.shape[1:]).sum(0, dtype=wide).to(addends.dtype)


def transposed(counts: Sequence[Sequence[int]]) -> Counts:
    """Counts of the way back."""
    return [list(column) for column in zip(*counts, strict=True)]
