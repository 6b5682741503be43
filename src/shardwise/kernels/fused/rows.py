"""Rows of tables: pooled by bags, merged by segments, and updated, each in one launch and without an atomic.

``merge`` sorts the places by the row that they name, keeping their order within a row, and one program adds up one
row's places in that order: the order of the loop on a CPU, so its bits, in every run. A row that most of a batch names
is one program's work. Indexes outside a table touch no memory: they pool to NaN, and are left out of merges and steps.
"""

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


def pool(
    source: Tensor, index: Tensor, offsets: Tensor, pooling: str, weights: Tensor | None, width: int
) -> tuple[Tensor, Tensor | None]:
    """Run ``pooling.plain_pool``, with sums of 16-bit rows in fp32, rounded once."""
    bags = len(offsets) - 1
    out = torch.empty(bags, width, dtype=source.dtype, device=source.device)
    found = torch.empty(out.shape, dtype=torch.int64, device=source.device) if pooling == "max" else None
    if out.numel():
        block = min(_WIDEST_BLOCK, triton.next_power_of_2(width))
        _pool[(bags, triton.cdiv(width, block))](
            source,
            index,
            offsets,
            source if weights is None else weights,
            out,
            out if found is None else found,
            len(source),
            len(index),
            width,
            source.stride(0),
            KIND=pooling,
            WEIGHTED=weights is not None,
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
    """Run ``pooling.plain_merge`` and write the result to ``out``."""
    if not out.numel():
        return
    rows, width = out.shape
    ordered, order = torch.sort(index, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(rows + 1, device=index.device))
    bags = order
    if offsets is not None:
        bags = torch.searchsorted(offsets, torch.arange(len(index), device=index.device), right=True) - 1
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(width))
    _merge[(rows, triton.cdiv(width, block))](
        grad,
        order,
        starts,
        bags,
        order if offsets is None else offsets,
        grad if weights is None else weights,
        order if places is None else places,
        out,
        len(grad),
        width,
        BAGS=offsets is not None,
        KIND=pooling,
        WEIGHTED=weights is not None,
        BLOCK=block,
        enable_fp_fusion=False,
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


@triton.jit(do_not_specialize=["rows", "given"])
def _pool(
    source,
    index,
    offsets,
    weights,
    out,
    found,
    rows,
    given,
    width,
    stride,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    begin, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    nowhere = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    place = tl.full([BLOCK], -1, tl.int64)
    for i in range(begin, end):
        is_given = (i >= 0) & (i < given)
        row = tl.load(index + i, is_given, other=-1) + nowhere
        held = tl.load(
            source + row * stride + column, here & (row >= 0) & (row < rows), other=float("nan")
        ).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + i, is_given, other=0.0)
            held = held * weight.to(source.dtype.element_ty).to(tl.float32)
        if KIND == "max":
            better = (held > total) | (i == begin)
            total = tl.where(better, held, total)
            place = tl.where(better, i, place)
        else:
            total = tl.where(i == begin, held, total + held)
    if KIND == "mean":
        total = tl.div_rn(total, tl.zeros([BLOCK], tl.float32) + tl.maximum(end - begin, 1).to(tl.float32))
    tl.store(out + bag * width + column, total.to(out.dtype.element_ty), here)
    if KIND == "max":
        tl.store(found + bag * width + column, place, here)


@triton.jit(do_not_specialize=["count"])
def _merge(
    grad,
    order,
    starts,
    bags,
    offsets,
    weights,
    places,
    out,
    count,
    width,
    BAGS: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    nowhere = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(tl.load(starts + row), tl.load(starts + row + 1)):
        i = tl.load(order + k)
        bag = (tl.load(bags + i) if BAGS else i) + nowhere
        read = here & (bag >= 0) & (bag < count)
        g = tl.load(grad + bag * width + column, read, other=0.0).to(tl.float32)
        if KIND == "mean" and BAGS:
            length = tl.load(offsets + bag + 1, read, other=1) - tl.load(offsets + bag, read, other=0)
            g = tl.div_rn(g, length.to(tl.float32))
        if WEIGHTED:
            g = g * tl.load(weights + i).to(grad.dtype.element_ty).to(tl.float32)
        if KIND == "max":
            g = tl.where(tl.load(places + bag * width + column, read, other=-1) == i, g, 0.0)
        total += g
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), here)


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
