"""The optimizer's step for the rows that a batch touched, on gradients merged to one a row.

    row_rules.py   the optimizers as data, with their formulas
    this file      one step: compiled loops, the same in torch operations, and on a device with Triton one kernel
    row_replay.py  the steps without a gradient, for an exact Adam

Cost:   a row's line is read and written once; figures in benchmarks/embedding.
Shapes: R rows of the slab, U touched rows, D width.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.choice import fused
from shardwise.kernels.operation import device_operation
from shardwise.kernels.tables.blocks import (
    BLOCK,
    block,
    each,
    lane,
    lanes_of_squares,
    minus,
    no_lanes,
    plus,
    put,
    times,
    whole,
)
from shardwise.kernels.tables.compiled import CompiledLoop, ahead, array, loop, prefetch, runs_compiled
from shardwise.kernels.tables.row_rules import (
    Adagrad,
    Adam,
    Ftrl,
    Momentum,
    RowOptimizer,
    RowwiseAdagrad,
    Sgd,
    adam_step,
)
from shardwise.kernels.tables.slab import check_rows


def update(
    optimizer: RowOptimizer,
    slab: Tensor,
    rows: Tensor,
    grads: Tensor,
    *,
    lr: float,
    step: int,
    scale: float = 1.0,
    mean_squares: Tensor | None = None,
) -> None:
    """Run one step of some rows, each named once: changes slab [R, D + columns] by int64 [U] and [U, D].

    Args:
        optimizer: rule of the step.
        slab: lines of the table.
        rows: rows to update.
        grads: gradient of each row.
        lr: learning rate.
        step: number of this step, from 1.
        scale: factor of the gradients.
        mean_squares: means of (scale · gradient)² over the whole rows, [U], for row-wise Adagrad if the columns of a
            table lie on several ranks; None computes them from ``grads``.

    Raises:
        ValueError: if shapes, dtypes or ``step`` do not fit.
        IndexError: if a row on the CPU is outside the slab.
    """
    _check(optimizer, slab, rows, grads, step)
    if fused(slab, rows, grads) and slab.dtype == torch.float32 and slab.is_contiguous():
        if not _stands_still(optimizer, lr, slab.dtype):
            held = None if mean_squares is None else mean_squares.to(slab.dtype)
            kind, rule = type(optimizer).__name__, list(map(float, optimizer))
            _update_on_device(slab, rows, grads, held, kind, rule, lr, step, scale)
        return
    check_rows(slab, rows)
    if not runs_compiled(slab, rows, grads) or slab.stride(1) != 1:
        plain_update(optimizer, slab, rows, grads, lr=lr, step=step, scale=scale, mean_squares=mean_squares)
        return
    if _stands_still(optimizer, lr, slab.dtype):
        return
    kernel, numbers = _numbers(optimizer, lr, step)
    real = np.float32 if slab.dtype == torch.float32 else np.float64
    arrays = [slab.detach().numpy(), array(rows), array(grads)]
    if isinstance(optimizer, RowwiseAdagrad):
        given = slab.new_empty(0) if mean_squares is None else mean_squares.to(slab.dtype)
        arrays.append(array(given))
        numbers = (*numbers, float(grads.shape[1]))
    kernel(*arrays, real(scale), *[x if isinstance(x, bool) else real(x) for x in numbers])


def plain_update(
    optimizer: RowOptimizer,
    slab: Tensor,
    rows: Tensor,
    grads: Tensor,
    *,
    lr: float,
    step: int,
    scale: float = 1.0,
    mean_squares: Tensor | None = None,
) -> None:
    """Run ``update`` in torch operations, on any device, with the bits of the loops on the CPU."""
    _check(optimizer, slab, rows, grads, step)
    check_rows(slab, rows)
    if _stands_still(optimizer, lr, slab.dtype):
        return
    width = grads.shape[1]
    held = slab[rows]
    w, state = held[:, :width], held[:, width:]
    decay = 0.0 if isinstance(optimizer, Ftrl | Adam) else optimizer.weight_decay
    g = grads * scale + w * decay if decay else grads * scale
    _, numbers = _numbers(optimizer, lr, step)
    if isinstance(optimizer, Sgd):
        w -= g * lr
    elif isinstance(optimizer, Momentum):
        state.mul_(optimizer.momentum).add_(g)
        w -= (g + state * optimizer.momentum if optimizer.nesterov else state) * lr
    elif isinstance(optimizer, Adagrad):
        state += g * g
        w -= g * lr / (root_of(state) + optimizer.eps)
    elif isinstance(optimizer, RowwiseAdagrad):
        state[:, 0] += row_mean_squares(g) if mean_squares is None else mean_squares
        w -= g * (_divided(lr, root_of(state) + optimizer.eps))
    elif isinstance(optimizer, Adam):
        size, root, keep, rest1, rest2, eps, _ = numbers
        m, v = state[:, :width], state[:, width : 2 * width]
        m += (g - m) * rest1
        v += (g * g - v) * rest2
        w *= keep
        w -= m * size / (root_of(v) / root + eps)
        state[:, 2 * width :] = step
    else:
        z, n = state[:, :width], state[:, width:]
        after = n + g * g
        z += g - (root_of(after) - root_of(n)) / lr * w
        n.copy_(after)
        shrunk = (z.sign() * optimizer.l1 - z) / ((root_of(after) + optimizer.beta) / lr + optimizer.l2)
        w.copy_(torch.where(z.abs() <= optimizer.l1, torch.zeros_like(z), shrunk))
    slab[rows] = held


_RULES: dict[str, type[Any]] = {
    rule.__name__: rule for rule in (Sgd, Momentum, Adagrad, RowwiseAdagrad, Adam, Ftrl)
}


@device_operation(
    "update_rows(Tensor(a!) slab, Tensor rows, Tensor grads, Tensor? mean_squares, str kind, float[] numbers, "
    "float lr, int step, float scale) -> ()",
    lambda *arguments: None,
)
def _update_on_device(
    slab: Tensor,
    rows: Tensor,
    grads: Tensor,
    mean_squares: Tensor | None,
    kind: str,
    numbers: list[float],
    lr: float,
    step: int,
    scale: float,
) -> None:
    rule = _RULES[kind]
    given = zip(numbers, rule._field_defaults.values(), strict=True)
    optimizer = rule(*(type(default)(number) for number, default in given))
    if not fused(slab):
        plain_update(optimizer, slab, rows, grads, lr=lr, step=step, scale=scale, mean_squares=mean_squares)
        return
    from shardwise.kernels.fused import rows as kernels

    kernels.update(optimizer, slab, rows.contiguous(), grads.contiguous(), lr, step, scale, mean_squares)


def row_mean_squares(g: Tensor) -> Tensor:
    """Return means of g² over each row: [U, D] -> [U].

    Sums run in the order of the loop: element j in lane j % 4, a rest in lane 0.
    """
    squares = g * g
    width = g.shape[1]
    even = width - width % 4
    lanes = g.new_zeros(len(g), 4)
    for column in range(0, even, 4):
        lanes += squares[:, column : column + 4]
    for column in range(even, width):
        lanes[:, 0] += squares[:, column]
    return ((lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])) / width


def _check(optimizer: RowOptimizer, slab: Tensor, rows: Tensor, grads: Tensor, step: int) -> None:
    width = grads.shape[1]
    if grads.shape[0] != len(rows) or grads.dtype != slab.dtype:
        raise ValueError(
            f"gradients {grads.dtype} {list(grads.shape)} for {len(rows)} rows of a {slab.dtype} slab; expected "
            f"one each, in the slab's dtype"
        )
    columns = width + optimizer.columns(width)
    if slab.shape[1] != columns:
        raise ValueError(
            f"a slab of {slab.shape[1]} columns for {type(optimizer).__name__} at width {width}; expected {columns}"
        )
    if step < 1:
        raise ValueError(f"step {step}; steps count from 1")


def _stands_still(optimizer: RowOptimizer, lr: float, dtype: torch.dtype) -> bool:
    """Return whether FTRL has a rate that is 0 in the slab's dtype.

    z is a sum of parts divided by lr, and one such step would leave NaN for good.
    """
    return isinstance(optimizer, Ftrl) and float(torch.tensor(lr, dtype=dtype)) == 0


def root_of(x: Tensor) -> Tensor:
    """Return square roots rounded correctly; torch's on the CPU, from MKL, differ in the last bit in one of five."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _divided(x: float, by: Tensor) -> Tensor:
    """Return x / by with x in the tensor's dtype; torch would multiply by a reciprocal."""
    return torch.full_like(by, x) / by


def _numbers(optimizer: RowOptimizer, lr: float, step: int) -> tuple[CompiledLoop, tuple[Any, ...]]:
    """Return the loop of an optimizer and its numbers for one step."""
    if isinstance(optimizer, Sgd):
        return _sgd, (lr, optimizer.weight_decay)
    if isinstance(optimizer, Momentum):
        return _momentum, (lr, optimizer.momentum, optimizer.nesterov, optimizer.weight_decay)
    if isinstance(optimizer, Adagrad):
        return _adagrad, (lr, optimizer.eps, optimizer.weight_decay)
    if isinstance(optimizer, RowwiseAdagrad):
        return _rowwise_adagrad, (lr, optimizer.eps, optimizer.weight_decay)
    if isinstance(optimizer, Adam):
        rests = (1 - optimizer.beta1, 1 - optimizer.beta2, optimizer.eps)
        return _adam, (*adam_step(optimizer, lr, step), *rests, float(step))
    return _ftrl, (lr, optimizer.l1, optimizer.l2, optimizer.beta)


# Numbers come in the slab's dtype: a literal of Python would promote fp32 arithmetic to fp64. The parts of a line are
# separate views, and each pass writes to one of them: so the compiler sees that they do not overlap and takes 8 or 16
# columns at a time. One pass over everything went column by column, four times slower at width 64.


@loop
def _sgd(slab: np.ndarray, rows: np.ndarray, grads: np.ndarray, scale: Any, lr: Any, decay: Any) -> None:
    width = grads.shape[1]
    even = whole(width)
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        row = rows[i]
        for c in range(0, even, BLOCK):
            w = block(slab, row, c)
            g8 = plus(times(block(grads, i, c), each(scale)), times(w, each(decay)))
            put(slab, row, c, minus(w, times(g8, each(lr))))
        for j in range(even, width):
            g = grads[i, j] * scale + slab[row, j] * decay
            slab[row, j] -= g * lr


@loop
def _momentum(
    slab: np.ndarray,
    rows: np.ndarray,
    grads: np.ndarray,
    scale: Any,
    lr: Any,
    momentum: Any,
    nesterov: bool,
    decay: Any,
) -> None:
    width = grads.shape[1]
    g = np.empty(width, grads.dtype)
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        w, b = slab[rows[i], :width], slab[rows[i], width:]
        for j in range(width):
            g[j] = grads[i, j] * scale + w[j] * decay
        for j in range(width):
            b[j] = b[j] * momentum + g[j]
        if nesterov:
            for j in range(width):
                w[j] -= (g[j] + b[j] * momentum) * lr
        else:
            for j in range(width):
                w[j] -= b[j] * lr


@loop
def _adagrad(
    slab: np.ndarray, rows: np.ndarray, grads: np.ndarray, scale: Any, lr: Any, eps: Any, decay: Any
) -> None:
    width = grads.shape[1]
    g = np.empty(width, grads.dtype)
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        w, s = slab[rows[i], :width], slab[rows[i], width:]
        for j in range(width):
            g[j] = grads[i, j] * scale + w[j] * decay
        for j in range(width):
            s[j] += g[j] * g[j]
        for j in range(width):
            w[j] -= g[j] * lr / (math.sqrt(s[j]) + eps)


@loop
def _rowwise_adagrad(
    slab: np.ndarray,
    rows: np.ndarray,
    grads: np.ndarray,
    mean_squares: np.ndarray,
    scale: Any,
    lr: Any,
    eps: Any,
    decay: Any,
    elements: Any,
) -> None:
    width = grads.shape[1]
    even, fours = whole(width), width - width % 4
    g = np.empty((1, width), grads.dtype)
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        row = rows[i]
        sums = no_lanes(scale - scale)
        for k in range(0, even, BLOCK):
            g8 = plus(times(block(grads, i, k), each(scale)), times(block(slab, row, k), each(decay)))
            put(g, 0, k, g8)
            sums = lanes_of_squares(sums, g8)
        for j in range(even, width):
            g[0, j] = grads[i, j] * scale + slab[row, j] * decay
        if mean_squares.size:
            mean = mean_squares[i]
        else:
            a, b, c, d = lane(sums, 0), lane(sums, 1), lane(sums, 2), lane(sums, 3)
            for j in range(even, fours, 4):
                a += g[0, j] * g[0, j]
                b += g[0, j + 1] * g[0, j + 1]
                c += g[0, j + 2] * g[0, j + 2]
                d += g[0, j + 3] * g[0, j + 3]
            for j in range(fours, width):
                a += g[0, j] * g[0, j]
            mean = ((a + c) + (b + d)) / elements
        slab[row, width] += mean
        size = lr / (math.sqrt(slab[row, width]) + eps)
        for k in range(0, even, BLOCK):
            put(slab, row, k, minus(block(slab, row, k), times(block(g, 0, k), each(size))))
        for j in range(even, width):
            slab[row, j] -= g[0, j] * size


@loop
def _adam(
    slab: np.ndarray,
    rows: np.ndarray,
    grads: np.ndarray,
    scale: Any,
    size: Any,
    root: Any,
    keep: Any,
    rest1: Any,
    rest2: Any,
    eps: Any,
    step: Any,
) -> None:
    width = grads.shape[1]
    g = np.empty(width, grads.dtype)
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        w, m, v = (
            slab[rows[i], :width],
            slab[rows[i], width : 2 * width],
            slab[rows[i], 2 * width : 3 * width],
        )
        for j in range(width):
            g[j] = grads[i, j] * scale
        for j in range(width):
            m[j] += (g[j] - m[j]) * rest1
        for j in range(width):
            v[j] += (g[j] * g[j] - v[j]) * rest2
        for j in range(width):
            w[j] = w[j] * keep - m[j] * size / (math.sqrt(v[j]) / root + eps)
        if slab.shape[1] > 3 * width:
            slab[rows[i], 3 * width] = step


@loop
def _ftrl(
    slab: np.ndarray, rows: np.ndarray, grads: np.ndarray, scale: Any, lr: Any, l1: Any, l2: Any, beta: Any
) -> None:
    width = grads.shape[1]
    g, root = np.empty(width, grads.dtype), np.empty(width, grads.dtype)
    zero = scale - scale
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        w, z, n = slab[rows[i], :width], slab[rows[i], width : 2 * width], slab[rows[i], 2 * width :]
        for j in range(width):
            g[j] = grads[i, j] * scale
        for j in range(width):
            root[j] = math.sqrt(n[j] + g[j] * g[j])
        for j in range(width):
            z[j] += g[j] - (root[j] - math.sqrt(n[j])) / lr * w[j]
        for j in range(width):
            n[j] += g[j] * g[j]
        for j in range(width):
            shrunk = ((l1 if z[j] > 0 else -l1) - z[j]) / ((root[j] + beta) / lr + l2)
            w[j] = zero if abs(z[j]) <= l1 else shrunk
