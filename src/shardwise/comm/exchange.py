"""Exchange of rows whose number differs from rank to rank: keys one way, their vectors back, gradients forth again.

    share     every rank tells all others how much it sends to whom: counts[i][j], i to j
    send      rows by those counts; what arrives lies in the order of the ranks it came from
    back      the same rows the other way: counts read transposed
    gather    every rank gets the rows of all, in rank order
    scatter   every rank gets the sum of what all ranks made of its rows

Every rank knows all counts, so no transport needs a header or a second message, and a rank without data joins with
counts of 0.

Cost:   share sends N·(N-1)·K numbers of 8 bytes; send what leaves the rank; gather (N-1) times the largest part;
        scatter the parts of the others.
Shapes: rows [n, ...]; N ranks; K kinds of rows.
"""

import math
from collections.abc import Sequence

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
