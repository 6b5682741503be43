"""Pooling of rows to one vector a bag, and merging of the gradients of bags to one gradient a row.

Bag b is the places [offsets[b], offsets[b + 1]) of ``index``, which names rows of ``source``:

    sum     y[b] = sum over its places i of w[i] · source[index[i]]          w = 1 without weights
    mean    y[b] = sum / places
    max     y[b, d] = the largest; ``places[b, d]`` is its first place
    merge   g[r] = sum over the places i with index[i] = r of dy[bag of i]   times w[i], or over places, or at the max

An empty bag is zero. Sums run in the order of the places, so a merged gradient does not depend on the compilation of
the loop. A rank that owns rows merges the others' gradients in the order of their ranks by the same call, with bags of
one place (``offsets`` left out).

On a device with Triton ``pool`` is one kernel, and ``merge`` is a sort and one or two kernels. Sums run in the same
order there, in fp32, so fp32 has the same bits. A row of a merge with more than 256 places is the exception: it is
added up in pieces, in an order that is the same in every run (fused/rows.py). Indexes outside a table pool to NaN and
are left out of a merge, and the host does not wait for a check.

Rows of 16 bits are widened as they are read: their vectors are fp32, and equal to those of the same rows in fp32.

The gradient of a batch never exists once per id: ``merge`` reads dy [B, D] and writes [U, D], U <= N distinct rows.

Cost:  N·D adds each way. N = 106,496 ids, one each in 26 · 4,096 bags, on one Zen 4 core: benchmarks/embedding.
Shapes: B bags, N places, R rows, D width.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.choice import fused
from shardwise.kernels.operation import device_operation
from shardwise.kernels.tables.blocks import BLOCK, block, each, plus, put, times, whole
from shardwise.kernels.tables.compiled import ahead, array, loop, prefetch, runs_compiled
from shardwise.kernels.tables.rounding import readable, wide_dtype, widened

Pooling = Literal["sum", "mean", "max"]
_BEGUN_BYTES = 2048
"""Bytes of rows that a merge sets to 0 ahead of the row that it needs."""


class PooledVectors(NamedTuple):
    """One vector for each bag."""

    values: Tensor
    """Vectors of the bags: [B, D]."""
    places: Tensor | None
    """Place of ``index`` that gave each element with ``max``, -1 in an empty bag: int64 [B, D]; else None."""


def pool(
    source: Tensor,
    index: Tensor,
    offsets: Tensor | None,
    pooling: Pooling = "sum",
    weights: Tensor | None = None,
    width: int | None = None,
) -> PooledVectors:
    """Pool the first ``width`` columns of rows of ``source``: [R, >= D], int64 [N], int64 [B + 1] -> [B, D].

    Args:
        source: rows; vectors of rows of 16 bits are fp32.
        index: rows of all bags.
        offsets: start of each bag in ``index``, and the end; None makes bag i of place i.
        pooling: sum, mean or max.
        weights: weight of each place, with sum only; None is 1.
        width: number of columns; None takes all.

    Raises:
        IndexError: if a row or a bag on the CPU is out of range.
        ValueError: if ``weights`` do not fit, or if ``width`` is out of range.
    """
    width = _width(source, width)
    _check(pooling, weights, index)
    if offsets is None:
        if weights is None and pooling != "max":
            return PooledVectors(gather(source, index, width), None)
        offsets = torch.arange(len(index) + 1, device=index.device)
    tensors = [source, index, offsets] + ([] if weights is None else [weights])
    if fused(*tensors):
        values, places_found = _pool_on_device(source.detach(), index, offsets, pooling, weights, width)
        return PooledVectors(values, places_found if pooling == "max" else None)
    if not runs_compiled(readable(source), *tensors[1:]):
        return plain_pool(source, index, offsets, pooling, weights, width)
    out = torch.empty(len(offsets) - 1, width, dtype=wide_dtype(source.dtype))
    rows, places, bags = _lines(source), array(index), array(offsets)
    if pooling == "max":
        found = torch.empty(out.shape, dtype=torch.int64)
        _accept(_pool_max(rows, places, bags, out.numpy(), found.numpy()), source, index, offsets)
        return PooledVectors(out, found)
    if weights is not None:
        held = array(weights.to(out.dtype))
        bad = _pool_weighted(rows, places, bags, held, out.numpy())
    else:
        bad = _pool_sum(rows, places, bags, pooling == "mean", out.numpy())
    _accept(bad, source, index, offsets)
    return PooledVectors(out, None)


def plain_pool(
    source: Tensor,
    index: Tensor,
    offsets: Tensor,
    pooling: Pooling = "sum",
    weights: Tensor | None = None,
    width: int | None = None,
) -> PooledVectors:
    """Run ``pool`` in torch operations, on any device: sums over segments of the gathered rows, in the loops' order.

    The host does not wait: torch reports an index out of range on an accelerator at its next synchronization.
    """
    _check_places(source, index, offsets)
    rows = source[:, : _width(source, width)].index_select(0, index).to(wide_dtype(source.dtype))
    if weights is not None:
        rows = rows * weights.to(rows.dtype)[:, None]
    if pooling == "max":
        return _plain_max(rows, offsets)
    out = _segment_sums(rows, offsets)
    if pooling == "mean":
        out /= offsets.diff().clamp(min=1)[:, None]
    return PooledVectors(out, None)


def _plain_max(rows: Tensor, offsets: Tensor) -> PooledVectors:
    """Return the largest element of each bag, and the first place that has it."""
    count, bags = len(rows), len(offsets) - 1
    out = rows.new_zeros(bags, rows.shape[1])
    found = torch.full(out.shape, -1, dtype=torch.int64, device=rows.device)
    if out.numel() and count:
        is_empty = (offsets.diff() == 0)[:, None]
        largest = torch.segment_reduce(rows, "max", offsets=offsets, axis=0, unsafe=True)
        out = largest.masked_fill_(is_empty, 0)
        places = torch.arange(count, device=rows.device)
        bag = _bags(offsets, places).clamp_(0, bags - 1)
        first = torch.where(rows == out[bag], places[:, None], count).double()  # exact below 2^53
        least = torch.segment_reduce(first, "min", offsets=offsets, axis=0, unsafe=True, initial=count)
        found = least.long()
        found.masked_fill_(is_empty | (found == count), -1)
    return PooledVectors(out, found)


def _segment_sums(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return sums over rows [offsets[i], offsets[i + 1]), in order and without atomics: [N, D], [S + 1] -> [S, D]."""
    if not rows.numel() or len(offsets) < 2:
        return rows.new_zeros(len(offsets) - 1, rows.shape[1])
    return torch.segment_reduce(rows, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)


def _bags(offsets: Tensor, places: Tensor) -> Tensor:
    """Return the bag of each place; -1 or the number of bags if the place lies in none."""
    return torch.searchsorted(offsets, places, right=True) - 1


def merge(
    grad: Tensor,
    index: Tensor,
    offsets: Tensor | None,
    rows: int,
    pooling: Pooling = "sum",
    weights: Tensor | None = None,
    places: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return one gradient for each of ``rows`` rows: [B, D], int64 [N], int64 [B + 1] -> [rows, D].

    Args:
        grad: gradients of the bags.
        index: rows of all bags.
        offsets: start of each bag in ``index``, and the end; None makes bag i of place i.
        rows: number of rows.
        pooling: sum, mean or max.
        weights: weight of each place, with sum only; None is 1.
        places: the places that ``pool`` returned, for max only.
        out: memory for the result, with any content; None allocates memory.

    Raises:
        IndexError: if a row or a bag on the CPU is out of range.
        ValueError: if shapes or arguments do not fit.
    """
    _check(pooling, weights, index)
    if out is None:
        out = torch.empty(rows, grad.shape[1], dtype=grad.dtype, device=grad.device)
    elif out.shape != (rows, grad.shape[1]) or out.dtype != grad.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}; expected {grad.dtype} {[rows, grad.shape[1]]}"
        )
    bags = len(grad) if offsets is None else len(offsets) - 1
    if bags != len(grad) or (offsets is None and len(index) != bags):
        raise ValueError(f"gradients of {len(grad)} bags for {bags} bags and {len(index)} places")
    if (pooling == "max") != (places is not None):
        raise ValueError('the places that pool(..., "max") found belong to "max", and to nothing else')
    tensors = [t for t in (grad, index, offsets, weights, places) if t is not None]
    if fused(*tensors):
        _merge_on_device(grad, index, offsets, pooling, weights, places, out)
        return out
    if not runs_compiled(*tensors):
        return _plain_merge(grad, index, offsets, pooling, weights, places, out.zero_())
    held, ids, into = array(grad), array(index), out.numpy()
    if places is not None:
        out.zero_()
        bad = _merge_max(held, ids, array(places), into)
    elif offsets is None and weights is None:
        bad = _merge_rows(held, ids, into)
    else:
        ends = torch.arange(bags + 1) if offsets is None else offsets
        if weights is not None:
            bad = _merge_weighted(held, ids, array(ends), array(weights.to(grad.dtype)), into)
        else:
            bad = _merge_sum(held, ids, array(ends), pooling == "mean", into)
    _accept(bad, out, index, offsets)
    return out


def plain_merge(
    grad: Tensor,
    index: Tensor,
    offsets: Tensor | None,
    rows: int,
    pooling: Pooling = "sum",
    weights: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Run ``merge`` in torch operations, on any device: places sorted by their rows, then sums over segments."""
    out = grad.new_zeros(rows, grad.shape[1])
    return _plain_merge(grad, index, offsets, pooling, weights, places, out)


def _plain_merge(
    grad: Tensor,
    index: Tensor,
    offsets: Tensor | None,
    pooling: Pooling,
    weights: Tensor | None,
    places: Tensor | None,
    out: Tensor,
) -> Tensor:
    _check_places(out, index, offsets)
    rows, ids = len(out), index
    if offsets is not None:
        bag = _bags(offsets, torch.arange(len(index), device=index.device))
        ids = torch.where(
            (bag >= 0) & (bag < len(grad)), index, rows
        )  # places in no bag sort behind all others
    ordered, order = torch.sort(ids, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(rows + 1, device=index.device))
    if offsets is None:
        each = grad[order]
    else:
        into = bag[order].clamp_(0, len(grad) - 1)
        each = (grad / offsets.diff().clamp(min=1)[:, None] if pooling == "mean" else grad)[into]
        if places is not None:
            each = each.where(places[into] == order[:, None], 0)
    if weights is not None:
        each = each * weights[order].to(grad.dtype)[:, None]
    return out.copy_(_segment_sums(each, ends))


@device_operation(
    "pool(Tensor source, Tensor index, Tensor offsets, str pooling, Tensor? weights, int width) -> (Tensor, Tensor)",
    lambda source, index, offsets, pooling, weights, width: (
        source.new_empty(len(offsets) - 1, width, dtype=wide_dtype(source.dtype)),
        index.new_empty(len(offsets) - 1 if pooling == "max" else 0, width),
    ),
)
def _pool_on_device(
    source: Tensor, index: Tensor, offsets: Tensor, pooling: Pooling, weights: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    if fused(source):
        from shardwise.kernels.fused import rows as kernels

        rows = source if source.stride(1) == 1 else source.contiguous()
        held = None if weights is None else weights.contiguous()
        values, found = kernels.pool(rows, index.contiguous(), offsets.contiguous(), pooling, held, width)
    else:
        values, found = plain_pool(source, index, offsets, pooling, weights, width)
    return values, index.new_empty(0, width) if found is None else found


@device_operation(
    "merge(Tensor grad, Tensor index, Tensor? offsets, str pooling, Tensor? weights, Tensor? places, Tensor(a!) out) "
    "-> ()",
    lambda *arguments: None,
)
def _merge_on_device(
    grad: Tensor,
    index: Tensor,
    offsets: Tensor | None,
    pooling: Pooling,
    weights: Tensor | None,
    places: Tensor | None,
    out: Tensor,
) -> None:
    if not fused(grad):
        _plain_merge(grad, index, offsets, pooling, weights, places, out.zero_())
        return
    from shardwise.kernels.fused import rows as kernels

    held = [None if each is None else each.contiguous() for each in (offsets, weights, places)]
    kernels.merge(grad.contiguous(), index.contiguous(), held[0], pooling, held[1], held[2], out)


def gather(source: Tensor, rows: Tensor, width: int | None = None) -> Tensor:
    """Return the first ``width`` columns of rows, in fp32 if they have 16 bits: [R, >= D], int64 [N] -> [N, D].

    Raises:
        IndexError: if a row on the CPU is out of range.
    """
    width = _width(source, width)
    wide = wide_dtype(source.dtype)
    if not runs_compiled(readable(source), rows):
        return source[:, :width].index_select(0, rows).to(wide)
    out = torch.empty(len(rows), width, dtype=wide)
    bad = _gather(_lines(source), array(rows), out.numpy())
    if bad >= 0:
        raise IndexError(f"row {int(rows[bad])} at {bad}; expected 0 to {len(source) - 1}")
    return out


def _lines(source: Tensor) -> np.ndarray:
    """Return the memory of ``source``, readable and with the columns of a row side by side, as blocks need them."""
    held = readable(source)
    return (held if held.stride(1) == 1 else held.contiguous()).numpy()


def _width(source: Tensor, width: int | None) -> int:
    if width is not None and not 0 < width <= source.shape[1]:
        raise ValueError(f"the first {width} of {source.shape[1]} columns; expected 1 to {source.shape[1]}")
    return source.shape[1] if width is None else width


def _check(pooling: Pooling, weights: Tensor | None, index: Tensor) -> None:
    if pooling not in ("sum", "mean", "max"):
        raise ValueError(f"pooling {pooling!r}; expected sum, mean or max")
    if weights is not None and pooling != "sum":
        raise ValueError(f"weights with pooling {pooling!r}; they go with sum")
    if weights is not None and weights.shape != index.shape:
        raise ValueError(f"{len(weights)} weights for {len(index)} places")


def _check_places(source: Tensor, index: Tensor, offsets: Tensor | None) -> None:
    """Raise IndexError if a bag or a row on the CPU is out of range; those on an accelerator were checked before."""
    if index.device.type != "cpu":
        return
    if offsets is None:
        offsets = torch.tensor([0, len(index)])
    if (offsets.diff() < 0).any() or int(offsets[0]) < 0 or int(offsets[-1]) > len(index):
        raise IndexError(
            f"offsets run from {int(offsets[0])} to {int(offsets[-1])} over {len(index)} places; expected them to "
            f"ascend from 0 or more to {len(index)} or less"
        )
    used = index[int(offsets[0]) : int(offsets[-1])]
    outside = (used < 0) | (used >= len(source))
    if outside.any():
        raise IndexError(f"row {int(used[outside][0])}; expected 0 to {len(source) - 1}")


def _accept(bad: int, source: Tensor, index: Tensor, offsets: Tensor | None) -> None:
    if bad >= 0:
        _check_places(source, index, offsets)
        raise IndexError(f"places of bag {bad} lie outside the {len(index)} given")


@loop
def _gather(source: np.ndarray, rows: np.ndarray, out: np.ndarray) -> int:
    far = ahead(out.shape[1] * out.itemsize)
    width = out.shape[1]
    even = whole(width)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(source, rows[i + far], width)
        row = rows[i]
        if row < 0 or row >= source.shape[0]:
            return i
        for c in range(0, even, BLOCK):
            put(out, i, c, block(source, row, c))
        for j in range(even, width):
            out[i, j] = widened(source[row, j])
    return -1


@loop
def _pool_sum(source: np.ndarray, index: np.ndarray, offsets: np.ndarray, mean: bool, out: np.ndarray) -> int:
    far = ahead(out.shape[1] * out.itemsize)
    width = out.shape[1]
    even = whole(width)
    for bag in range(out.shape[0]):
        begin, end = offsets[bag], offsets[bag + 1]
        if begin < 0 or end < begin or end > index.size:
            return bag
        if begin == end:
            out[bag, :] = 0
        for i in range(begin, end):
            if i + far < index.size:
                prefetch(source, index[i + far], width)
            row = index[i]
            if row < 0 or row >= source.shape[0]:
                return bag
            if i == begin:
                for c in range(0, even, BLOCK):
                    put(out, bag, c, block(source, row, c))
                for j in range(even, width):
                    out[bag, j] = widened(source[row, j])
            else:
                for c in range(0, even, BLOCK):
                    put(out, bag, c, plus(block(out, bag, c), block(source, row, c)))
                for j in range(even, width):
                    out[bag, j] += widened(source[row, j])
        if mean and end - begin > 1:
            for j in range(width):
                out[bag, j] /= end - begin
    return -1


@loop
def _pool_weighted(
    source: np.ndarray, index: np.ndarray, offsets: np.ndarray, weights: np.ndarray, out: np.ndarray
) -> int:
    far = ahead(out.shape[1] * out.itemsize)
    width = out.shape[1]
    even = whole(width)
    for bag in range(out.shape[0]):
        begin, end = offsets[bag], offsets[bag + 1]
        if begin < 0 or end < begin or end > index.size:
            return bag
        if begin == end:
            out[bag, :] = 0
        for i in range(begin, end):
            if i + far < index.size:
                prefetch(source, index[i + far], width)
            row, weight = index[i], weights[i]
            if row < 0 or row >= source.shape[0]:
                return bag
            if i == begin:
                for c in range(0, even, BLOCK):
                    put(out, bag, c, times(each(weight), block(source, row, c)))
                for j in range(even, width):
                    out[bag, j] = weight * widened(source[row, j])
            else:
                for c in range(0, even, BLOCK):
                    product = times(each(weight), block(source, row, c))
                    put(out, bag, c, plus(block(out, bag, c), product))
                for j in range(even, width):
                    out[bag, j] += weight * widened(source[row, j])
    return -1


@loop
def _pool_max(
    source: np.ndarray, index: np.ndarray, offsets: np.ndarray, out: np.ndarray, found: np.ndarray
) -> int:
    far = ahead(out.shape[1] * out.itemsize)
    width = out.shape[1]
    for bag in range(out.shape[0]):
        begin, end = offsets[bag], offsets[bag + 1]
        if begin < 0 or end < begin or end > index.size:
            return bag
        if begin == end:
            out[bag, :] = 0
            found[bag, :] = -1
        for i in range(begin, end):
            if i + far < index.size:
                prefetch(source, index[i + far], width)
            row = index[i]
            if row < 0 or row >= source.shape[0]:
                return bag
            for j in range(width):
                number = widened(source[row, j])
                if i == begin or number > out[bag, j]:
                    out[bag, j] = number
                    found[bag, j] = i
    return -1


@loop
def _begin(out: np.ndarray, begun: int, row: int) -> int:
    """Set rows from ``begun`` up to ``row``, and some more, to 0; return the end of the rows that are set.

    Rows are set shortly before their first gradient is added, while they are in the cache, and several at a time, so
    that the branch of the caller is predicted well.
    """
    end = min(out.shape[0], row + 1 + _BEGUN_BYTES // (out.shape[1] * out.itemsize))
    for k in range(begun, end):
        for j in range(out.shape[1]):
            out[k, j] = 0
    return max(begun, end)


@loop
def _merge_rows(grad: np.ndarray, index: np.ndarray, out: np.ndarray) -> int:
    far = ahead(out.shape[1] * out.itemsize)
    width = out.shape[1]
    even, begun = whole(width), 0
    for i in range(index.size):
        if i + far < index.size:
            prefetch(out, index[i + far], width)
        row = index[i]
        if row < 0 or row >= out.shape[0]:
            return i
        if row >= begun:
            begun = _begin(out, begun, row)
        for c in range(0, even, BLOCK):
            put(out, row, c, plus(block(out, row, c), block(grad, i, c)))
        for j in range(even, width):
            out[row, j] += grad[i, j]
    _begin(out, begun, out.shape[0] - 1)
    return -1


@loop
def _merge_sum(grad: np.ndarray, index: np.ndarray, offsets: np.ndarray, mean: bool, out: np.ndarray) -> int:
    far = ahead(out.shape[1] * out.itemsize)
    width = out.shape[1]
    share = np.empty(width, grad.dtype)
    even, begun = whole(width), 0
    for bag in range(grad.shape[0]):
        begin, end = offsets[bag], offsets[bag + 1]
        if begin < 0 or end < begin or end > index.size:
            return bag
        several = mean and end - begin > 1
        if several:
            for j in range(width):
                share[j] = grad[bag, j] / (end - begin)
        for i in range(begin, end):
            if i + far < index.size:
                prefetch(out, index[i + far], width)
            row = index[i]
            if row < 0 or row >= out.shape[0]:
                return bag
            if row >= begun:
                begun = _begin(out, begun, row)
            if several:
                for j in range(width):
                    out[row, j] += share[j]
            else:
                for c in range(0, even, BLOCK):
                    put(out, row, c, plus(block(out, row, c), block(grad, bag, c)))
                for j in range(even, width):
                    out[row, j] += grad[bag, j]
    _begin(out, begun, out.shape[0] - 1)
    return -1


@loop
def _merge_weighted(
    grad: np.ndarray, index: np.ndarray, offsets: np.ndarray, weights: np.ndarray, out: np.ndarray
) -> int:
    far = ahead(out.shape[1] * out.itemsize)
    width = out.shape[1]
    even, begun = whole(width), 0
    for bag in range(grad.shape[0]):
        begin, end = offsets[bag], offsets[bag + 1]
        if begin < 0 or end < begin or end > index.size:
            return bag
        for i in range(begin, end):
            if i + far < index.size:
                prefetch(out, index[i + far], width)
            row, weight = index[i], weights[i]
            if row < 0 or row >= out.shape[0]:
                return bag
            if row >= begun:
                begun = _begin(out, begun, row)
            for c in range(0, even, BLOCK):
                put(out, row, c, plus(block(out, row, c), times(block(grad, bag, c), each(weight))))
            for j in range(even, width):
                out[row, j] += grad[bag, j] * weight
    _begin(out, begun, out.shape[0] - 1)
    return -1


@loop
def _merge_max(grad: np.ndarray, index: np.ndarray, places: np.ndarray, out: np.ndarray) -> int:
    for bag in range(grad.shape[0]):
        for j in range(out.shape[1]):
            i = places[bag, j]
            if i >= index.size or i < -1:
                return bag
            if i >= 0:
                row = index[i]
                if row < 0 or row >= out.shape[0]:
                    return bag
                out[row, j] += grad[bag, j]
    return -1
