"""Exchange of rows whose number differs from rank to rank: keys to owners, vectors back, gradients to owners.

    share     every rank sends to all others how much it sends to whom: counts[i][j], i to j
    send      rows by those counts; what arrives lies in the order of the ranks it came from; start_send does not wait
    back      the same rows in the other direction: counts read transposed
    gather    every rank gets the rows of all, in rank order
    scatter   every rank gets the sum of all ranks' addends for its rows
    carry     several sends and gathers of one dtype, each kind as one message

Every rank has all counts, so no transport needs a header or a second message, and a rank without data joins with
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
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.plan.exchange_calls import Purpose

Counts = list[list[int]]
"""Numbers of rows: ``counts[i][j]`` go from rank i to rank j."""


def share(leaving: Tensor, group: Group, what: str) -> Tensor:
    """Gather the numbers of rows that leave each rank for each other rank.

    Args:
        leaving: Rows of each kind that leave this rank for each rank, int64 [N, K].
        group: The ranks.
        what: Name of the exchange in errors.

    Returns:
        The numbers of all ranks, [N, N, K].
    """
    everyone = leaving.new_empty(group.size, *leaving.shape)
    group.all_gather(everyone.view(-1), leaving.contiguous().view(-1), what, "control").wait()
    return everyone


def send(rows: Tensor, counts: Counts, group: Group, what: str, purpose: Purpose = "activations") -> Tensor:
    """Send rows to all ranks and return the rows that arrive, in rank order.

    Args:
        rows: Rows for rank 0, then for rank 1 and so on.
        counts: Rows by sender and receiver.
        group: The ranks.
        what: Name of the exchange in errors.
        purpose: Kind of traffic.
    """
    output, pending = start_send(rows, counts, group, what, purpose)
    pending.wait()
    return output


def start_send(
    rows: Tensor, counts: Counts, group: Group, what: str, purpose: Purpose = "activations"
) -> tuple[Tensor, PendingCollective]:
    """Start to send rows as ``send`` does.

    Returns:
        The rows that arrive, which may be read when the collective has been waited for. Until then ``rows`` may not
        change.
    """
    if group.size == 1:
        return rows, DONE
    arriving = sum(row[group.index] for row in counts)
    inner = math.prod(rows.shape[1:])
    output = rows.new_empty(arriving, *rows.shape[1:])
    elements = [[n * inner for n in row] for row in counts]
    sent = rows.contiguous().view(-1)
    return output, group.all_to_all(output.view(-1), sent, elements, what, purpose)


def back(rows: Tensor, counts: Counts, group: Group, what: str, purpose: Purpose = "activations") -> Tensor:
    """Return rows that arrived by ``counts``, or others in their places, to the ranks they came from.

    Args:
        rows: Rows in the order of their arrival.
        counts: Counts of the first exchange.
        group: The ranks.
        what: Name of the exchange in errors.
        purpose: Kind of traffic.
    """
    return send(rows, transposed(counts), group, what, purpose)


def gather(
    rows: Tensor, parts: Sequence[int], group: Group, what: str, purpose: Purpose = "activations"
) -> Tensor:
    """Return the rows of all ranks, in rank order.

    Args:
        rows: This rank's rows.
        parts: Number of rows of each rank.
        group: The ranks.
        what: Name of the exchange in errors.
        purpose: Kind of traffic.
    """
    if group.size == 1:
        return rows
    largest = max(parts)
    full = rows.new_empty(group.size, largest, *rows.shape[1:])
    own = full[group.index]
    own[: rows.shape[0]] = rows
    own[rows.shape[0] :] = 0
    group.all_gather(full.view(-1), own.reshape(-1), what, purpose).wait()
    return torch.cat([part[:count] for part, count in zip(full, parts, strict=True)])


class RowParcel(NamedTuple):
    """Rows of one element each, and their receivers."""

    rows: Tensor
    """Rows [n]; for ``send``, those for rank 0, then for rank 1 and so on."""
    counts: Counts
    """Counts as in ``send``, or one column with the number of rows of each rank, which all ranks get."""

    @property
    def is_for_all(self) -> bool:
        """True if the rows are gathered, not sent."""
        return len(self.counts[0]) == 1


def carry(
    parcels: Sequence[RowParcel], group: Group, what: str, purpose: Purpose = "activations"
) -> list[Tensor]:
    """Exchange several parcels of one dtype in at most two messages.

    Args:
        parcels: The parcels.
        group: The ranks.
        what: Name of the exchange in errors.
        purpose: Kind of traffic.

    Returns:
        The rows that arrive for each parcel, as from ``gather`` and ``send``.
    """
    if group.size == 1:
        return [parcel.rows for parcel in parcels]
    gathered = [parcel for parcel in parcels if parcel.is_for_all]
    sent = [parcel for parcel in parcels if not parcel.is_for_all]
    came = iter(_gather_all(gathered, group, what, purpose) if gathered else [])
    arrived = iter(_send_all(sent, group, what, purpose) if sent else [])
    return [next(came if parcel.is_for_all else arrived) for parcel in parcels]


def _gather_all(parcels: Sequence[RowParcel], group: Group, what: str, purpose: Purpose) -> list[Tensor]:
    sizes = [[count for (count,) in parcel.counts] for parcel in parcels]
    if len(parcels) == 1:
        return [gather(parcels[0].rows, sizes[0], group, what, purpose)]
    parts = list(zip(*sizes, strict=True))  # number of rows of each rank, by parcel
    totals = list(map(sum, parts))
    full = parcels[0].rows.new_zeros(group.size, max(totals))
    own = full[group.index]
    torch.cat([parcel.rows for parcel in parcels], out=own[: totals[group.index]])
    group.all_gather(full.view(-1), own, what, purpose).wait()
    every = zip(full, totals, parts, strict=True)
    pieces = [piece for line, total, part in every for piece in line[:total].split(part)]
    return [torch.cat(pieces[i :: len(parcels)]) for i in range(len(parcels))]


def _send_all(parcels: Sequence[RowParcel], group: Group, what: str, purpose: Purpose) -> list[Tensor]:
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
    """Return this rank's part of the sum of all ranks' ``addends``.

    Nothing is padded. Sums are computed in rank order, sums of 16-bit floats in fp32.

    Args:
        addends: This rank's addends for the rows of all ranks.
        parts: Number of rows of each rank.
        group: The ranks.
        what: Name of the exchange in errors.
        purpose: Kind of traffic.
    """
    if group.size == 1:
        return addends
    arrived = send(addends, [list(parts)] * group.size, group, what, purpose)
    wide = torch.promote_types(addends.dtype, torch.float32)
    return arrived.view(group.size, -1, *addends.shape[1:]).sum(0, dtype=wide).to(addends.dtype)


def transposed(counts: Sequence[Sequence[int]]) -> Counts:
    """Return the counts of the way back."""
    return [list(column) for column in zip(*counts, strict=True)]
