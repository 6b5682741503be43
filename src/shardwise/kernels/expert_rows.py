"""Rows of experts: the places that rows take in messages and in the order of the experts, and sums over such places.

    places      [n, m]: row i lies at places[i, j] of another tensor, for each j; -1 for no place
    sum         out[i] = Σ_j w[i, j] · values[places[i, j]]                      over the places that there are
    gradients   dvalues[p] = w[slot p] · g[row p]           dw[slot p] = g[row p] · values[p]

Every operation has a plain form in torch operations, which is the reference. On a device with Triton an operation is
one launch, so that a layer of experts is few launches; integers are the same, and sums are in fp32.

Cost:   each operation reads its inputs and writes its results once; plain forms write intermediates of [n, m].
Shapes: N rows of this rank, E experts, k experts of a row, D width, S messages, R rows that arrived, P pairs of an
        arrived row and a local expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwise.base.packed import message_bytes
from shardwise.kernels.choice import fused
from shardwise.kernels.grouped import stretches
from shardwise.kernels.operation import device_operation

# Messages ----------------------------------------------------------------------------------------------------------


def pack(
    fields: Sequence[Tensor], columns: Sequence[tuple[int, torch.dtype]], has_spare: bool = False
) -> Tensor:
    """Return rows that hold the bytes of the ``fields``, [n, columns] each: uint8 [n, bytes].

    Args:
        fields: tensors of n rows.
        columns: columns of each field, and its dtype in a message.
        has_spare: True adds a last row of zeros.
    """
    n, width = fields[0].shape[0], message_bytes(*(count * dtype.itemsize for count, dtype in columns))
    packed = fields[0].new_empty(n + has_spare, width, dtype=torch.uint8)
    if has_spare:
        packed[n:].zero_()
    for target, source in zip(unpack(packed[:n], columns), fields, strict=True):
        target.copy_(source)
    return packed


def unpack(packed: Tensor, columns: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Return the fields of packed rows as views, given the columns and dtype of each."""
    found: dict[int, Tensor] = {}
    start = 0
    # By falling size of an element each field begins at a multiple of that size.
    for place in sorted(range(len(columns)), key=lambda place: -columns[place][1].itemsize):
        count, dtype = columns[place]
        found[place] = packed[:, start : start + count * dtype.itemsize].view(dtype)
        start += count * dtype.itemsize
    return [found[place] for place in range(len(columns))]


def message_places(
    index: Tensor, first: int, experts: int, ranks: int, messages: int, is_padded: bool
) -> tuple[Tensor, Tensor]:
    """Return which rows the messages to ``ranks`` hold: [S], and the message of each row to each rank: [N, ranks].

    A row goes once to each rank that holds any of its experts. Messages lie by rank, then by row.

    Args:
        index: experts of each row, [N, k]; those outside of the range of experts count as none.
        first: first expert of the range.
        experts: number of experts in the range, spread evenly over the ranks, in order.
        ranks: number of ranks.
        messages: number of messages, S.
        is_padded: True if each rank gets S / ranks messages; those that are left hold row N.
    """
    form = _message_places if fused(index) else plain_message_places
    tokens, places = form(index, first, experts, ranks, messages, is_padded)
    return tokens, places


def plain_message_places(
    index: Tensor, first: int, experts: int, ranks: int, messages: int, is_padded: bool
) -> tuple[Tensor, Tensor]:
    """Return ``message_places`` in plain torch operations: the reference."""
    own = index.long() - first
    own = torch.where((own >= 0) & (own < experts), own, -1)
    goes = reaches(owner_of(own, experts // ranks, ranks), ranks)
    if not is_padded:
        tokens = goes.T.nonzero_static(size=messages)[:, 1]
        before = goes.T.flatten().cumsum(0).view(ranks, len(goes)).T - 1
        return tokens, torch.where(goes, before, -1)
    starts = torch.arange(ranks, device=index.device) * (messages // ranks)
    places = torch.where(goes, starts + goes.cumsum(0) - 1, messages)
    rows = torch.arange(len(goes), device=index.device)[:, None].expand(places.shape)
    tokens = places.new_full((messages + 1,), len(goes)).scatter_(0, places.flatten(), rows.flatten())
    return tokens[:messages], torch.where(goes, places, -1)


@device_operation(
    "message_places(Tensor index, SymInt first, SymInt experts, SymInt ranks, SymInt messages, bool is_padded) -> "
    "(Tensor, Tensor)",
    lambda index, first, experts, ranks, messages, is_padded: (
        index.new_empty(messages, dtype=torch.int64),
        index.new_empty(len(index), ranks, dtype=torch.int64),
    ),
)
def _message_places(
    index: Tensor, first: int, experts: int, ranks: int, messages: int, is_padded: bool
) -> tuple[Tensor, Tensor]:
    if not fused(index):
        return plain_message_places(index, first, experts, ranks, messages, is_padded)
    from shardwise.kernels.fused import expert_rows as kernels

    return kernels.message_places(index.contiguous(), first, experts, ranks, messages, is_padded)


def owner_of(index: Tensor, local: int, places: int) -> Tensor:
    """Return which of ``places``, with ``local`` experts each, holds the experts of ``index``.

    ``places`` for no expert.
    """
    return torch.where(index < 0, places, index.div(local, rounding_mode="floor"))


def reaches(owner: Tensor, places: int) -> Tensor:
    """Return the mask of the ``places`` that each row goes to, from its experts' places: [N, k] -> bool [N, places]."""
    return owner.new_zeros(len(owner), places + 1, dtype=torch.bool).scatter_(1, owner, True)[:, :places]


# The order of the experts ------------------------------------------------------------------------------------------


def pairs_by_expert(
    chosen: Tensor, first: int, experts: int, pairs: int, each: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the pairs of rows and experts, sorted by expert, then by row.

    Args:
        chosen: experts of each row, [R, k]; those outside of the range of experts count as none.
        first: first expert of the range.
        experts: number of experts in the range, G.
        pairs: number of pairs that are returned, P; those behind the last expert's are of no row.
        each: number of pairs that every expert gets, of which the rest are of no row; 0 gives each what it has.

    Returns:
        The slot i·k + j of each pair, R·k for a pair of no row: int64 [P]; its row i, the last row for a pair of no
        row: int64 [P]; the place of each slot among the pairs, -1 for none: int64 [R, k]; where each expert's pairs
        end: int32 [G].
    """
    form = _pairs_by_expert if fused(chosen) else plain_pairs_by_expert
    slots, rows, places, ends = form(chosen, first, experts, pairs, each)
    return slots, rows, places, ends


def plain_pairs_by_expert(
    chosen: Tensor, first: int, experts: int, pairs: int, each: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``pairs_by_expert`` in plain torch operations: the reference."""
    own = chosen.flatten().long() - first
    own = torch.where((own >= 0) & (own < experts), own, experts)
    order = own.argsort(stable=True)
    rising, ranks = own[order], torch.arange(len(order), device=own.device)
    ends = torch.searchsorted(rising, torch.arange(experts, device=own.device), right=True)
    if each:
        behind = ranks - torch.searchsorted(rising, rising)
        ranks = torch.where(rising < experts, rising * each + behind, pairs)
    else:
        ranks = torch.where(rising < experts, ranks, pairs)
    slots = order.new_full((pairs + 1,), len(order)).scatter_(0, ranks, order)[:pairs]
    places = torch.empty_like(own).scatter_(0, order, torch.where(rising < experts, ranks, -1))
    rows = slots.div(chosen.shape[1], rounding_mode="floor").clamp_(max=max(len(chosen) - 1, 0))
    return slots, rows, places.view(chosen.shape), ends.int()


@device_operation(
    "pairs_by_expert(Tensor chosen, SymInt first, SymInt experts, SymInt pairs, SymInt each)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda chosen, first, experts, pairs, each: (
        chosen.new_empty(pairs, dtype=torch.int64),
        chosen.new_empty(pairs, dtype=torch.int64),
        chosen.new_empty(chosen.shape, dtype=torch.int64),
        chosen.new_empty(experts, dtype=torch.int32),
    ),
)
def _pairs_by_expert(
    chosen: Tensor, first: int, experts: int, pairs: int, each: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not fused(chosen):
        return plain_pairs_by_expert(chosen, first, experts, pairs, each)
    from shardwise.kernels.fused import expert_rows as kernels

    return kernels.pairs_by_expert(chosen.contiguous(), first, experts, pairs, each)


# Sums --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowPlaces:
    """Places of rows in another tensor, over which sums are taken."""

    places: Tensor
    """Places of each row, [n, m]; -1 for none."""
    most: int
    """Number of places, or a bound of it."""
    is_bound: bool = False
    """True if there may be fewer than ``most``."""

    def sum(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum over each row's places of ``values`` [P, D], times ``weights`` [n, m] if given: [n, D]."""
        if fused(values):
            sums: Tensor = _sum_rows(values, self.places, weights)
            return sums
        n = self.places.shape[0]
        if not n or not self.most or not values.shape[0]:
            return values.new_zeros(n, values.shape[1])
        marked, rows, starts = self._bags
        each = None if weights is None else weights.flatten()[marked].to(values.dtype)
        return torch.embedding_bag(values.contiguous(), rows, starts, mode=0, per_sample_weights=each)[0][:n]

    @cached_property
    def _bags(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return which elements of ``places`` are places, these places, and where each row's begin among them."""
        marks = self.places >= 0
        marked = marks.flatten().nonzero_static(size=self.most, fill_value=0)[:, 0]
        sizes = marks.sum(1)
        ends = sizes.cumsum(0)
        # If there are fewer places than ``most``, a last sum collects the rest.
        starts = torch.cat([ends.new_zeros(1), ends]) if self.is_bound else ends - sizes
        return marked, self.places.flatten()[marked].clamp_(min=0), starts


def plain_sum_rows(values: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums of ``RowPlaces.sum`` in plain torch operations."""
    found: list[Tensor] = []
    wide = torch.promote_types(values.dtype, torch.float32)
    if not values.shape[0]:
        return values.new_zeros(places.shape[0], values.shape[1])
    for j, place in enumerate(places.unbind(1)):
        addends = values[place.clamp(min=0)].to(wide)
        if weights is not None:
            addends = addends * weights[:, j, None].to(wide)
        found.append(addends.masked_fill((place < 0)[:, None], 0))
    return torch.stack(found).sum(0).to(values.dtype)


@device_operation(
    "sum_rows(Tensor values, Tensor places, Tensor? weights) -> Tensor",
    lambda values, places, weights: values.new_empty(len(places), values.shape[1]),
)
def _sum_rows(values: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    if not fused(values, places):
        return plain_sum_rows(values, places, weights)
    from shardwise.kernels.fused import expert_rows as kernels

    return kernels.sum_rows(values, places, weights)


def pair_gradients(
    grad: Tensor, values: Tensor, weights: Tensor, slots: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``values`` [P, D] and ``weights`` [R, k] of a weighted sum of pairs.

    Args:
        grad: gradients of the sums, [R, D].
        values: values of the pairs, [P, D].
        weights: weights of the slots, [R, k].
        slots: slot of each pair, R·k for none: [P].
        rows: row of each pair, [P].
    """
    form = _pair_gradients if fused(values) else plain_pair_gradients
    d_values, d_weights = form(grad, values, weights, slots, rows)
    return d_values, d_weights


def plain_pair_gradients(
    grad: Tensor, values: Tensor, weights: Tensor, slots: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``pair_gradients`` in plain torch operations: the reference."""
    grad = grad.to(values.dtype)
    flat = torch.cat([weights.flatten(), weights.new_zeros(1)])
    own = flat.index_select(0, slots).to(values.dtype)[:, None]
    d_values, d_pairs = torch.empty_like(values), weights.new_empty(len(slots))
    for place in stretches(values):
        part = torch.index_select(grad, 0, rows[place], out=d_values[place])
        # Gradients of a router are as precise as its weights, which may be wider than the rows.
        d_pairs[place] = torch.linalg.vecdot(part.to(weights.dtype), values[place].to(weights.dtype))
        part.mul_(own[place])
    return d_values, torch.zeros_like(flat).scatter_(0, slots, d_pairs)[:-1].view(weights.shape)


@device_operation(
    "pair_gradients(Tensor grad, Tensor values, Tensor weights, Tensor slots, Tensor rows) -> (Tensor, Tensor)",
    lambda grad, values, weights, slots, rows: (
        values.new_empty(values.shape),
        weights.new_empty(weights.shape),
    ),
)
def _pair_gradients(
    grad: Tensor, values: Tensor, weights: Tensor, slots: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    if not fused(grad, values, weights, slots):
        return plain_pair_gradients(grad, values, weights, slots, rows)
    from shardwise.kernels.fused import expert_rows as kernels

    return kernels.pair_gradients(grad, values, weights, slots, rows)
