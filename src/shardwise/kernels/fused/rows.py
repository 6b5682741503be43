"""Rows of tables: pooled by bags, merged by segments, and updated, each in one launch and without an atomic.

``merge`` sorts the places by the row that they name, keeping their order within a row, and adds up one row's places in
that order: the order of the loop on a CPU, so the same bits, in every run.

[Note: long segments]
A row that most of a batch names would be the serial loop of one program. The sorted places are therefore cut into
chunks of L places, and the sum of a row with more than L places has two levels:

    places sorted by row       a a b b b b | b b b b b b | b b b c c d | d d d         chunks of L = 6 places
    slots of b, which is long      1         2             4

    partial[2·chunk]           places of the row at the chunk's first place
    partial[2·chunk + 1]       places of the row at the chunk's last place, if that row begins inside the chunk

A row with more than L places crosses the end of a chunk, so a chunk has at most two pieces: the end of one row and the
beginning of another. The grid and the memory of the pieces follow from the number of places, which the host has: no
host waits. The order of the sum follows from the indexes alone, so every run has the same bits; for the rows that
are cut they differ from those of the CPU by rounding.

Narrow rows share a program, because a row of 16 columns would leave 7 of 8 threads without work. Indexes outside a
table touch no memory: they pool to NaN, and are left out of merges and steps.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.tables.row_rules import (
    Adagrad,
    Adam,
    Momentum,
    RowOptimizer,
    RowwiseAdagrad,
    Sgd,
    adam_step,
)

_WIDEST_BLOCK = 1024
_SHORTEST_PIECE = 256
"""Number of places that one program adds up one after another at least; a power of two."""
_MOST_ROWS = 16
_THREADS = 128
"""Number of elements that the rows of one program have together, unless ``_MOST_ROWS`` rows have fewer."""
_LOADS_A_PLACE = 3
"""Length of the chain of dependent loads at one place of ``merge``: the order, the bag, and the bag's gradient."""


def piece_length(places: int) -> int:
    """Return the number of places L of a piece, so that both levels of the sum are short for one row of all places."""
    return max(
        _SHORTEST_PIECE, 1 << (math.isqrt(places // _LOADS_A_PLACE).bit_length() - 1 if places > 2 else 0)
    )


def longest_chain(places: int) -> int:
    """Return a bound of the dependent loads that one program of ``merge`` issues one after another.

    The bound holds for every distribution of the places over rows, also if all of them name one row.

    Args:
        places: number of places of the batch.
    """
    length = piece_length(places)
    ends = 3  # the rows at the ends of a chunk, and the start of such a row, before the loop
    pieces = 0 if places <= length else -(-places // length)
    return ends + max(_LOADS_A_PLACE * min(places, length), pieces)


def _rows_a_program(block: int) -> int:
    """Return how many rows of ``block`` columns one program takes: a power of two."""
    return max(1, min(_MOST_ROWS, _THREADS // block))


def pool(
    source: Tensor, index: Tensor, offsets: Tensor, pooling: str, weights: Tensor | None, width: int
) -> tuple[Tensor, Tensor | None]:
    """Run ``pooling.plain_pool``; vectors of rows of 16 bits are fp32."""
    bags = len(offsets) - 1
    wide = torch.promote_types(source.dtype, torch.float32)
    out = torch.empty(bags, width, dtype=wide, device=source.device)
    found = torch.empty(out.shape, dtype=torch.int64, device=source.device) if pooling == "max" else None
    if out.numel():
        block = min(_WIDEST_BLOCK, triton.next_power_of_2(width))
        together = _rows_a_program(block)
        _pool[(triton.cdiv(bags, together), triton.cdiv(width, block))](
            source,
            index,
            offsets,
            source if weights is None else weights,
            out,
            out if found is None else found,
            len(source),
            len(index),
            bags,
            width,
            source.stride(0),
            KIND=pooling,
            WEIGHTED=weights is not None,
            ROWS=together,
            BLOCK=block,
            enable_fp_fusion=False,
        )
    return out, found


def merge(
    grad: Tensor,
    index: Tensor,
    offsets: Tensor | None,
    pooling: str,
    weights: Tensor | None,
    places: Tensor | None,
    out: Tensor,
) -> None:
    """Run ``pooling.plain_merge`` and write the result to ``out``. See [Note: long segments]."""
    if not out.numel():
        return
    rows, width = out.shape
    ordered, order = torch.sort(index, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(rows + 1, device=index.device))
    bags = order
    if offsets is not None:
        bags = torch.searchsorted(offsets, torch.arange(len(index), device=index.device), right=True) - 1
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(width))
    together, length = _rows_a_program(block), piece_length(len(index))
    given = (
        grad,
        order,
        starts,
        bags,
        order if offsets is None else offsets,
        grad if weights is None else weights,
        order if places is None else places,
    )
    words = {
        "BAGS": offsets is not None,
        "KIND": pooling,
        "WEIGHTED": weights is not None,
        "ROWS": together,
        "BLOCK": block,
        "enable_fp_fusion": False,
    }
    pieces = 2 * triton.cdiv(len(index), length) if len(index) > length else 0
    partial = torch.empty(pieces, width, dtype=torch.float32, device=out.device)
    if pieces:
        _merge_pieces[(triton.cdiv(pieces, together), triton.cdiv(width, block))](
            *given, ordered, partial, rows, len(grad), len(index), length, width, **words
        )
    _merge[(triton.cdiv(rows, together), triton.cdiv(width, block))](
        *given, partial, out, rows, len(grad), length, width, PIECES=pieces > 0, **words
    )


def update(
    optimizer: RowOptimizer,
    slab: Tensor,
    rows: Tensor,
    grads: Tensor,
    lr: float,
    step: int,
    scale: float,
    mean_squares: Tensor | None,
) -> None:
    """Run ``row_optimizers.plain_update`` on an fp32 slab, with row-wise Adagrad's mean summed in another order."""
    if not grads.numel():
        return
    kind, numbers = _numbers(optimizer, lr, step)
    _update[(len(rows),)](
        slab,
        rows,
        grads,
        grads if mean_squares is None else mean_squares,
        scale,
        *numbers,
        *[0.0] * (7 - len(numbers)),
        len(slab),
        grads.shape[1],
        slab.stride(0),
        KIND=kind,
        GIVEN=mean_squares is not None,
        BLOCK=triton.next_power_of_2(grads.shape[1]),
        enable_fp_fusion=False,
    )


def _numbers(optimizer: RowOptimizer, lr: float, step: int) -> tuple[str, tuple[float, ...]]:
    if isinstance(optimizer, Sgd):
        return "sgd", (lr, optimizer.weight_decay)
    if isinstance(optimizer, Momentum):
        kind = "nesterov" if optimizer.nesterov else "momentum"
        return kind, (lr, optimizer.weight_decay, optimizer.momentum)
    if isinstance(optimizer, Adagrad):
        return "adagrad", (lr, optimizer.weight_decay, optimizer.eps)
    if isinstance(optimizer, RowwiseAdagrad):
        return "rowwise", (lr, optimizer.weight_decay, optimizer.eps)
    if isinstance(optimizer, Adam):
        size, root, keep = adam_step(optimizer, lr, step)
        rests = (1 - optimizer.beta1, 1 - optimizer.beta2)
        return "exact" if optimizer.exact else "adam", (size, root, keep, *rests, optimizer.eps, float(step))
    return "ftrl", (lr, 0.0, optimizer.l1, optimizer.l2, optimizer.beta)


@triton.jit(do_not_specialize=["rows", "given", "count"])
def _pool(
    source,
    index,
    offsets,
    weights,
    out,
    found,
    rows,
    given,
    count,
    width,
    stride,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    bag = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_bag = bag < count
    begin, end = tl.load(offsets + bag, is_bag, other=0), tl.load(offsets + bag + 1, is_bag, other=0)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    place = tl.full([ROWS, BLOCK], -1, tl.int64)
    for k in range(tl.max(end - begin, 0)):
        i = begin + k
        is_place = i < end
        is_given = is_place & (i >= 0) & (i < given)
        row = tl.load(index + i, is_given, other=-1)
        is_inside = (row >= 0) & (row < rows)
        held = tl.load(
            source + row[:, None] * stride + column, is_inside[:, None] & (column < width), other=float("nan")
        ).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + i, is_given, other=0.0)
            held = held * weight.to(out.dtype.element_ty).to(tl.float32)[:, None]
        if KIND == "max":
            better = is_place[:, None] & ((held > total) | (k == 0))
            total = tl.where(better, held, total)
            place = tl.where(better, i[:, None], place)
        else:
            total = tl.where(is_place[:, None], tl.where(k == 0, held, total + held), total)
    if KIND == "mean":
        total = tl.div_rn(
            total, tl.zeros([ROWS, BLOCK], tl.float32) + tl.maximum(end - begin, 1).to(tl.float32)[:, None]
        )
    here = is_bag[:, None] & (column < width)
    tl.store(out + bag[:, None] * width + column, total.to(out.dtype.element_ty), here)
    if KIND == "max":
        tl.store(found + bag[:, None] * width + column, place, here)


@triton.jit
def _sum_of_places(
    grad,
    order,
    bags,
    offsets,
    weights,
    origins,
    begin,
    end,
    column,
    bag_count,
    width,
    BAGS: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in range(tl.max(end - begin, 0)):
        is_place = begin + k < end
        i = tl.load(order + begin + k, is_place, other=0)
        bag = tl.load(bags + i, is_place, other=-1) if BAGS else i
        is_bag = is_place & (bag >= 0) & (bag < bag_count)
        read = is_bag[:, None] & (column < width)
        g = tl.load(grad + bag[:, None] * width + column, read, other=0.0).to(tl.float32)
        if KIND == "mean" and BAGS:
            bag_length = tl.load(offsets + bag + 1, is_bag, other=1) - tl.load(offsets + bag, is_bag, other=0)
            g = tl.div_rn(g, tl.zeros([ROWS, BLOCK], tl.float32) + bag_length.to(tl.float32)[:, None])
        if WEIGHTED:
            weight = tl.load(weights + i, is_place, other=0.0)
            g = g * weight.to(grad.dtype.element_ty).to(tl.float32)[:, None]
        if KIND == "max":
            g = tl.where(
                tl.load(origins + bag[:, None] * width + column, read, other=-1) == i[:, None], g, 0.0
            )
        total += tl.where(is_place[:, None], g, 0.0)
    return total


@triton.jit(do_not_specialize=["rows", "count", "given", "length"])
def _merge_pieces(
    grad,
    order,
    starts,
    bags,
    offsets,
    weights,
    origins,
    ordered,
    partial,
    rows,
    count,
    given,
    length,
    width,
    BAGS: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    first = piece // 2 * length
    last = tl.minimum(first + length, given)
    is_chunk = first < given
    row_of_first = tl.load(ordered + first, is_chunk, other=-1)
    row_of_last = tl.load(ordered + last - 1, is_chunk, other=-1)
    is_beginning = piece % 2 == 1
    row = tl.where(is_beginning, row_of_last, row_of_first)
    is_row = is_chunk & (row >= 0) & (row < rows) & ((row_of_first != row_of_last) | (piece % 2 == 0))
    start, stop = tl.load(starts + row, is_row, other=0), tl.load(starts + row + 1, is_row, other=0)
    is_long = stop - start > length
    begin = tl.maximum(start, first)
    end = tl.where(is_long, tl.minimum(stop, last), begin)
    total = _sum_of_places(
        grad, order, bags, offsets, weights, origins, begin, end, column, count, width,
        BAGS, KIND, WEIGHTED, ROWS, BLOCK
    )  # fmt: skip
    tl.store(partial + piece[:, None] * width + column, total, is_long[:, None] & (column < width))


@triton.jit(do_not_specialize=["rows", "count", "length"])
def _merge(
    grad,
    order,
    starts,
    bags,
    offsets,
    weights,
    origins,
    partial,
    out,
    rows,
    count,
    length,
    width,
    PIECES: tl.constexpr,
    BAGS: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_row = row < rows
    here = is_row[:, None] & (column < width)
    start, stop = tl.load(starts + row, is_row, other=0), tl.load(starts + row + 1, is_row, other=0)
    is_long = stop - start > length
    end = tl.where(is_long, start, stop)
    total = _sum_of_places(
        grad, order, bags, offsets, weights, origins, start, end, column, count, width,
        BAGS, KIND, WEIGHTED, ROWS, BLOCK
    )  # fmt: skip
    if PIECES:
        chunk = start // length
        pieces = tl.where(is_long, (stop - 1) // length - chunk + 1, 0)
        is_inside = start % length != 0  # the row begins inside its first chunk
        for k in range(tl.max(pieces, 0)):
            slot = 2 * (chunk + k) + tl.where(is_inside & (k == 0), 1, 0)
            read = here & (k < pieces)[:, None]
            total += tl.load(partial + slot[:, None] * width + column, read, other=0.0)
    tl.store(out + row[:, None] * width + column, total.to(out.dtype.element_ty), here)


@triton.jit
def _adam(at, width, here, w, g, none, size, root2, keep, rest1, rest2, eps):
    first = tl.load(at + width, here, other=0.0)
    second = tl.load(at + 2 * width, here, other=0.0)
    first += (g - first) * rest1
    second += (g * g - second) * rest2
    root = tl.div_rn(tl.sqrt_rn(second), none + root2) + eps
    tl.store(at, w * keep - tl.div_rn(first * size, root), here)
    tl.store(at + width, first, here)
    tl.store(at + 2 * width, second, here)


@triton.jit
def _ftrl(at, width, here, w, g, none, lr, l1, l2, beta):
    z = tl.load(at + width, here, other=0.0)
    n = tl.load(at + 2 * width, here, other=0.0)
    after = n + g * g
    root = tl.sqrt_rn(after)
    z += g - tl.div_rn(root - tl.sqrt_rn(n), none + lr) * w
    shrunk = tl.where(z > 0, l1, -l1) - z
    shrunk = tl.div_rn(shrunk, tl.div_rn(root + beta, none + lr) + l2)
    tl.store(at, tl.where(tl.abs(z) <= l1, 0.0, shrunk), here)
    tl.store(at + width, z, here)
    tl.store(at + 2 * width, after, here)


@triton.jit(
    do_not_specialize=[
        *("scale", "number0", "number1", "number2", "number3", "number4", "number5", "number6"),
        "count",
    ]
)
def _update(
    slab,
    rows,
    grads,
    mean_squares,
    scale,
    number0,
    number1,
    number2,
    number3,
    number4,
    number5,
    number6,
    count,
    width,
    stride,
    KIND: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    inside = (row >= 0) & (row < count)
    column = tl.arange(0, BLOCK)
    named = row + tl.zeros([BLOCK], tl.int64)
    here = (column < width) & (named >= 0) & (named < count)
    at = slab + row * stride + column
    none = tl.zeros([BLOCK], tl.float32)
    w = tl.load(at, here, other=0.0)
    g = tl.load(grads + place * width + column, here, other=0.0) * scale
    if KIND == "adam" or KIND == "exact":
        _adam(at, width, here, w, g, none, number0, number1, number2, number3, number4, number5)
        if KIND == "exact":
            tl.store(slab + row * stride + 3 * width, number6, inside)
    elif KIND == "ftrl":
        _ftrl(at, width, here, w, g, none, number0, number2, number3, number4)
    else:
        g += w * number1
        if KIND == "sgd":
            tl.store(at, w - g * number0, here)
        elif KIND == "adagrad":
            squares = tl.load(at + width, here, other=0.0) + g * g
            tl.store(at + width, squares, here)
            tl.store(at, w - tl.div_rn(g * number0, tl.sqrt_rn(squares) + number2), here)
        elif KIND == "rowwise":
            mean = tl.load(mean_squares + place) if GIVEN else tl.sum(g * g, 0) / width
            squares = tl.load(slab + row * stride + width, inside, other=0.0) + mean
            tl.store(slab + row * stride + width, squares, inside)
            size = tl.div_rn(none + number0, tl.sqrt_rn(none + squares) + number2)
            tl.store(at, w - g * size, here)
        else:
            before = tl.load(at + width, here, other=0.0) * number2 + g
            tl.store(at + width, before, here)
            if KIND == "nesterov":
                tl.store(at, w - (g + before * number2) * number0, here)
            else:
                tl.store(at, w - before * number0, here)
