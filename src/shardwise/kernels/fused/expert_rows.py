"""Places of rows in messages and among the experts' pairs, and sums over places, in one launch each.

A program computes the places of one rank or one expert: it first counts what lies before, then numbers its own rows
in order. So nothing is sorted, no program waits for another, and the places are those of a stable sort.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_WIDEST = 1024


def message_places(
    index: Tensor, first: int, experts: int, ranks: int, messages: int, is_padded: bool
) -> tuple[Tensor, Tensor]:
    """Return the row of each message and the places of each row, as ``kernels.expert_rows`` describes them."""
    rows, top_k = index.shape
    tokens = torch.empty(messages, dtype=torch.int64, device=index.device)
    places = torch.empty(rows, ranks, dtype=torch.int64, device=index.device)
    block = messages // ranks if is_padded else 0
    padded = triton.next_power_of_2(ranks)
    _message_places[(ranks,)](
        index,
        tokens,
        places,
        rows,
        first,
        experts,
        experts // ranks,
        messages,
        block,
        TOP_K=top_k,
        RANKS=ranks,
        PADDED=padded,
        IS_PADDED=is_padded,
        TILE=max(_TILE // padded, 16),
        enable_fp_fusion=True,
    )
    return tokens, places


def pairs_by_expert(
    chosen: Tensor, first: int, experts: int, pairs: int, each: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return slots, rows, places and ends of pairs, as ``kernels.expert_rows`` describes them."""
    slots, rows = torch.empty(2, pairs, dtype=torch.int64, device=chosen.device)
    places = torch.empty(chosen.shape, dtype=torch.int64, device=chosen.device)
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    _pairs_by_expert[(experts,)](
        chosen,
        slots,
        rows,
        places,
        ends,
        chosen.numel(),
        max(len(chosen) - 1, 0),
        first,
        pairs,
        each,
        TOP_K=chosen.shape[1],
        EXPERTS=experts,
        TILE=_TILE,
        enable_fp_fusion=True,
    )
    return slots, rows, places, ends


def sum_rows(values: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums over each row's ``places`` [n, m] of ``values`` [P, D], times ``weights``: [n, D]."""
    out = torch.empty(len(places), values.shape[1], dtype=values.dtype, device=values.device)
    values = values if values.stride(1) == 1 else values.contiguous()
    if out.numel():
        block = min(triton.next_power_of_2(values.shape[1]), _WIDEST)
        held = values if weights is None else weights.contiguous()
        _sum_rows[(len(places), triton.cdiv(values.shape[1], block))](
            values,
            places.contiguous(),
            held,
            out,
            values.shape[1],
            values.stride(0),
            PLACES=places.shape[1],
            HAS_WEIGHTS=weights is not None,
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return out


def pair_gradients(
    grad: Tensor, values: Tensor, weights: Tensor, slots: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``values`` [P, D] and ``weights`` [R, k]."""
    d_values = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=weights.device)
    if values.numel():
        _pair_gradients[(len(values),)](
            grad.contiguous(),
            values.contiguous(),
            weights.contiguous(),
            slots,
            rows,
            d_values,
            d_weights,
            weights.numel(),
            values.shape[1],
            BLOCK=min(triton.next_power_of_2(values.shape[1]), _WIDEST),
            enable_fp_fusion=True,
        )
    return d_values, d_weights


@triton.jit(do_not_specialize=["rows", "first", "messages", "block"])
def _message_places(
    index,
    tokens,
    row_places,
    rows,
    first,
    experts,
    local,
    messages,
    block,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,
    PADDED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    own = tl.program_id(0)
    rank = tl.arange(0, PADDED)
    start = (own * block).to(tl.int64)
    if not IS_PADDED:
        before = tl.zeros([PADDED], tl.int64)
        for tile in range(tl.cdiv(rows, TILE)):
            row = tile * TILE + tl.arange(0, TILE).to(tl.int64)
            hit = tl.zeros([TILE, PADDED], tl.int32)
            for j in range(TOP_K):
                expert = tl.load(index + row * TOP_K + j, row < rows, other=-1) - first
                owner = tl.where((expert >= 0) & (expert < experts), expert // local, -1)
                hit = tl.where(owner[:, None] == rank[None, :], 1, hit)
            before += tl.sum(hit, 0).to(tl.int64)
        start = tl.sum(tl.where(rank < own, before, 0), 0)
    number = tl.zeros([1], tl.int64)
    for tile in range(tl.cdiv(rows, TILE)):
        row = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        goes = tl.zeros([TILE], tl.int32)
        for j in range(TOP_K):
            expert = tl.load(index + row * TOP_K + j, row < rows, other=-1) - first
            owner = tl.where((expert >= 0) & (expert < experts), expert // local, -1)
            goes = tl.where(owner == own, 1, goes)
        at = start + number + tl.cumsum(goes, 0) - 1
        tl.store(tokens + at, row, (goes == 1) & (at < messages))
        tl.store(row_places + row * RANKS + own, tl.where(goes == 1, at, -1), row < rows)
        number += tl.sum(goes, 0)
    if IS_PADDED:
        for tile in range(tl.cdiv(block, TILE)):
            at = tile * TILE + tl.arange(0, TILE)
            tl.store(tokens + start + at, tl.zeros([TILE], tl.int64) + rows, (at >= number) & (at < block))


@triton.jit(do_not_specialize=["slots_in", "last", "first", "pairs", "each"])
def _pairs_by_expert(
    chosen,
    slots,
    pair_rows,
    slot_places,
    ends,
    slots_in,
    last,
    first,
    pairs,
    each,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    own = tl.program_id(0)
    below = tl.zeros([1], tl.int64)
    for tile in range(tl.cdiv(slots_in, TILE)):
        slot = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        expert = tl.load(chosen + slot, slot < slots_in, other=-1) - first
        below += tl.sum(((slot < slots_in) & (expert >= 0) & (expert < own)).to(tl.int64), 0)
    start = below + 0
    if each > 0:
        start = tl.zeros([1], tl.int64) + own * each
    number = tl.zeros([1], tl.int64)
    for tile in range(tl.cdiv(slots_in, TILE)):
        slot = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        expert = tl.load(chosen + slot, slot < slots_in, other=-1) - first
        mine = ((slot < slots_in) & (expert == own)).to(tl.int32)
        at = start + number + tl.cumsum(mine, 0) - 1
        tl.store(slots + at, slot, (mine == 1) & (at < pairs))
        tl.store(pair_rows + at, slot // TOP_K, (mine == 1) & (at < pairs))
        nobody = tl.where(own == 0, ((expert < 0) | (expert >= EXPERTS)).to(tl.int32), 0)
        tl.store(slot_places + slot, tl.where(mine == 1, at, -1), (slot < slots_in) & (mine + nobody > 0))
        number += tl.sum(mine, 0)
    tl.store(ends + own + tl.arange(0, 1), (below + number).to(tl.int32))
    # What is left of this expert's block, or behind the last expert, is of no row.
    stop = start + number
    until = start + each
    if each == 0:
        until = stop + 0
        if own == EXPERTS - 1:
            until = tl.zeros([1], tl.int64) + pairs
    for tile in range(tl.cdiv(pairs, TILE)):
        at = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        here = (at >= stop) & (at < until) & (at < pairs)
        tl.store(slots + at, tl.zeros([TILE], tl.int64) + slots_in, here)
        tl.store(pair_rows + at, tl.zeros([TILE], tl.int64) + last, here)


@triton.jit
def _sum_rows(
    values,
    row_places,
    weights,
    out,
    width,
    stride,
    PLACES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(PLACES):
        place = tl.load(row_places + row * PLACES + j)
        # A row that has no place reads nothing: a weight or a value there may be NaN.
        here = column < tl.where(place >= 0, width, 0)
        held = tl.load(values + place * stride + column, here, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            held *= tl.load(weights + row * PLACES + j, place >= 0, other=0.0).to(tl.float32)
        total += held
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), column < width)


@triton.jit(do_not_specialize=["slots_in"])
def _pair_gradients(
    grad, values, weights, slots, pair_rows, d_values, d_weights, slots_in, width, BLOCK: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + pair)
    row = tl.load(pair_rows + pair)
    lives = slot < slots_in
    own = tl.load(weights + slot, lives, other=0.0).to(tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < tl.where(lives, width, 0)
        g = tl.load(grad + row * width + column, here, other=0.0).to(tl.float32)
        held = tl.load(values + pair * width + column, here, other=0.0).to(tl.float32)
        dot += g * held
        tl.store(d_values + pair * width + column, (g * own).to(d_values.dtype.element_ty), column < width)
    tl.store(d_weights + slot, tl.sum(dot, 0).to(d_weights.dtype.element_ty), lives)
