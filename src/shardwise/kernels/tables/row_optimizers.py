"""The optimizer's step for the rows that a batch touched, on gradients merged to one a row.

A row of the slab is (weights [D], state). With g = scale · gradient (+ decay · w where ``weight_decay`` is L2):

    Sgd             w -= lr g
    Momentum        b = momentum b + g;  w -= lr b                        nesterov: w -= lr (g + momentum b)
    Adagrad         s += g²;  w -= lr g / (sqrt(s) + eps)
    RowwiseAdagrad  s += mean over d of g²;  w -= (lr / (sqrt(s) + eps)) g                         one s a row
    Adam            m += (1 - beta1)(g - m);  v += (1 - beta2)(g² - v)
        lazy        w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) · m / (sqrt(v) + eps)
        exact       w -= lr / (1 - beta1^t) · m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    Ftrl            n' = n + g²;  z += g - (sqrt(n') - sqrt(n)) / lr · w;  n = n'
                    w = 0 where |z| <= l1, else (sign(z) l1 - z) / ((beta + sqrt(n)) / lr + l2)

t counts the steps of the whole table. What a step without gradient would do to a row is left out, as torch's sparse
gradients have it; all equal ``torch.optim`` on the touched rows (lazy Adam: SparseAdam). An ``exact`` Adam is Adam on
the dense table: a row remembers the step that it stands at, and ``catch_up`` replays the steps that it missed before
the row is read. In a replayed step m and v only decay, so |m| / sqrt(v) falls by beta1 / sqrt(beta2); when that is
under 2^-60 of its start the rest is closed form. ``weight_decay`` of Adam is decoupled (AdamW).

Papers: Duchi et al. 2011 (Adagrad); Kingma, Ba 2015, arXiv:1412.6980; McMahan et al. 2013 (FTRL-proximal).
Cost:   a row's line is read and written once; figures in benchmarks/embedding.
Shapes: R rows of the slab, U touched rows, D width.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import Loop, ahead, array, loop, prefetch, runs_compiled


class Sgd(NamedTuple):
    """No state."""

    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        return 0

    def start(self, width: int, step: int = 0) -> list[float]:
        return []


class Momentum(NamedTuple):
    """State: b [D]."""

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        return width

    def start(self, width: int, step: int = 0) -> list[float]:
        return [0.0] * width


class Adagrad(NamedTuple):
    """State: s [D]."""

    eps: float = 1e-10
    initial: float = 0.0
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        return width

    def start(self, width: int, step: int = 0) -> list[float]:
        return [self.initial] * width


class RowwiseAdagrad(NamedTuple):
    """State: s [1]."""

    eps: float = 1e-8
    initial: float = 0.0
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        return 1

    def start(self, width: int, step: int = 0) -> list[float]:
        return [self.initial]


class Adam(NamedTuple):
    """State: m [D], v [D]; when exact also the step at which the row stands [1], whole up to 2^24 in fp32."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    exact: bool = False

    def columns(self, width: int) -> int:
        return 2 * width + self.exact

    def start(self, width: int, step: int = 0) -> list[float]:
        return [0.0] * (2 * width) + [float(step)] * self.exact

    @property
    def horizon(self) -> int | None:
        """Missed steps after which a row no longer moves for its moments; None where it never stops."""
        ratio = self.beta1 / math.sqrt(self.beta2) if self.beta2 > 0 else math.inf
        if ratio == 0:
            return 1
        return math.ceil(-60 * math.log(2) / math.log(ratio)) if ratio < 1 else None


class Ftrl(NamedTuple):
    """State: z [D], n [D]."""

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial: float = 0.0

    def columns(self, width: int) -> int:
        return 2 * width

    def start(self, width: int, step: int = 0) -> list[float]:
        return [0.0] * width + [self.initial] * width


RowOptimizer = Sgd | Momentum | Adagrad | RowwiseAdagrad | Adam | Ftrl
"""Each has ``columns(width)``, the columns of state beside the weights, and ``start(width, step)``, their content in
a row that is made after step ``step``."""


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
    """One step of some rows, each named once: changes slab [R, D + columns] by int64 [U] and [U, D].

    ``step`` counts from 1. ``scale`` multiplies the gradients first. Where the columns of a table lie on several
    ranks, ``mean_squares`` [U] are the means of (scale · gradient)² over the whole rows, for row-wise Adagrad.
    """
    _check(optimizer, slab, rows, grads, step)
    if not runs_compiled(slab, rows, grads):
        plain_update(optimizer, slab, rows, grads, lr=lr, step=step, scale=scale, mean_squares=mean_squares)
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
    """The same in torch operations, on any device, with the bits of the loops on the CPU."""
    _check(optimizer, slab, rows, grads, step)
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
        w -= g * lr / (_root(state) + optimizer.eps)
    elif isinstance(optimizer, RowwiseAdagrad):
        state[:, 0] += row_mean_squares(g) if mean_squares is None else mean_squares
        w -= g * (_divided(lr, _root(state) + optimizer.eps))
    elif isinstance(optimizer, Adam):
        size, root, keep, rest1, rest2, eps, _ = numbers
        m, v = state[:, :width], state[:, width : 2 * width]
        m += (g - m) * rest1
        v += (g * g - v) * rest2
        w *= keep
        w -= m * size / (_root(v) / root + eps)
        state[:, 2 * width :] = step
    else:
        z, n = state[:, :width], state[:, width:]
        after = n + g * g
        z += g - (_root(after) - _root(n)) / lr * w
        n.copy_(after)
        shrunk = (z.sign() * optimizer.l1 - z) / ((_root(after) + optimizer.beta) / lr + optimizer.l2)
        w.copy_(torch.where(z.abs() <= optimizer.l1, torch.zeros_like(z), shrunk))
    slab[rows] = held


def row_mean_squares(g: Tensor) -> Tensor:
    """Means of g² over each row, in the order of the loop: element j in lane j % 4, a rest in lane 0: [U, D] -> [U]."""
    squares = g * g
    width = g.shape[1]
    even = width - width % 4
    lanes = g.new_zeros(len(g), 4)
    for column in range(0, even, 4):
        lanes += squares[:, column : column + 4]
    for column in range(even, width):
        lanes[:, 0] += squares[:, column]
    return ((lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])) / width


class StepHistory:
    """What exact Adam must know of past steps to replay them: their learning rates.

    Only ``lrs`` needs to be saved; a history made from them is the same.
    """

    def __init__(self, optimizer: Adam, lrs: Sequence[float] = ()) -> None:
        self._optimizer = optimizer
        self._count = 0
        self._columns = np.zeros((5, max(64, len(lrs) + 1)))
        for lr in lrs:
            self.append(lr)

    def __len__(self) -> int:
        return self._count

    def append(self, lr: float) -> None:
        """Step ``len + 1`` was taken with this rate."""
        if self._count + 1 == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._count += 1
        size, root, keep = _adam_step(self._optimizer, lr, self._count)
        kept = self._columns[4, self._count - 1] + math.log(keep)
        self._columns[:, self._count] = lr, size, root, keep, kept

    @property
    def lrs(self) -> list[float]:
        return self._columns[0, 1 : self._count + 1].tolist()

    @property
    def sizes(self) -> np.ndarray:
        """lr / (1 - beta1^t) by step t; place 0 is empty."""
        return self._columns[1, : self._count + 1]

    @property
    def roots(self) -> np.ndarray:
        """sqrt(1 - beta2^t) by step t."""
        return self._columns[2, : self._count + 1]

    @property
    def keeps(self) -> np.ndarray:
        """Share of a weight that decay leaves, by step t."""
        return self._columns[3, : self._count + 1]

    @property
    def kept(self) -> np.ndarray:
        """log of the share of a weight that decay has left since step 0, by step t."""
        return self._columns[4, : self._count + 1]


def catch_up(history: StepHistory, optimizer: Adam, slab: Tensor, rows: Tensor, width: int) -> None:
    """Replays the steps that rows missed, up to the last of ``history``: before they are read.

    slab [R, 3 D + 1], int64 [U]. Rows that stand at the last step cost a look. A checkpoint needs no replay: the state
    and ``lrs`` say where each row stands.
    """
    if not optimizer.exact:
        raise ValueError("a lazy Adam has no steps to catch up with; Adam(exact=True) has")
    if len(rows) == 0 or len(history) == 0:
        return
    _check_rows(slab, rows)
    horizon = len(history) if optimizer.horizon is None else min(optimizer.horizon, len(history))
    numbers = (optimizer.beta1, optimizer.beta2, optimizer.eps)
    if not runs_compiled(slab, rows):
        _plain_catch_up(history, slab, rows, width, horizon, *numbers)
        return
    steps = (history.sizes, history.roots, history.keeps, history.kept)
    _catch_up(slab.detach().numpy(), array(rows), width, *steps, horizon, *numbers)


def plain_catch_up(history: StepHistory, optimizer: Adam, slab: Tensor, rows: Tensor, width: int) -> None:
    """The same in torch operations, every step replayed: the reference."""
    numbers = (optimizer.beta1, optimizer.beta2, optimizer.eps)
    _plain_catch_up(history, slab, rows, width, len(history), *numbers)


def _plain_catch_up(
    history: StepHistory,
    slab: Tensor,
    rows: Tensor,
    width: int,
    horizon: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    held = slab[rows].double()
    w, m, v, stood = held.split([width, width, width, 1], 1)
    first = stood.clone()
    last = len(history)
    for step in range(int(first.min()) + 1, last + 1):
        behind = (first < step) & (step <= first + horizon)
        m.copy_(torch.where(behind, m * beta1, m))
        v.copy_(torch.where(behind, v * beta2, v))
        moved = m * history.sizes[step] / (v.sqrt() / history.roots[step] + eps)
        w.copy_(torch.where(behind, w * history.keeps[step] - moved, w))
    left = (last - first - horizon).clamp(min=0)
    m.mul_(beta1**left)
    v.mul_(beta2**left)
    kept = torch.from_numpy(history.kept).to(slab.device)
    w.mul_((kept[last] - kept[(last - left).long()]).exp())
    stood.fill_(last)
    slab[rows] = held.to(slab.dtype)


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
    _check_rows(slab, rows)


def _check_rows(slab: Tensor, rows: Tensor) -> None:
    if len(rows):
        low, high = rows.aminmax()
        if low < 0 or high >= len(slab):
            raise IndexError(f"rows {int(low)} to {int(high)} of a slab with {len(slab)}")


def _root(x: Tensor) -> Tensor:
    """Square roots rounded correctly; torch's on the CPU, from MKL, are off by a bit in one of five."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _divided(x: float, by: Tensor) -> Tensor:
    """x / by with x in the tensor's dtype; torch would multiply by a reciprocal."""
    return torch.full_like(by, x) / by


def _adam_step(optimizer: Adam, lr: float, step: int) -> tuple[float, float, float]:
    """Step size, root of the second moment's correction, share that decay leaves."""
    corrected1, root2 = 1 - optimizer.beta1**step, math.sqrt(1 - optimizer.beta2**step)
    keep = 1 - lr * optimizer.weight_decay
    if optimizer.exact:
        return lr / corrected1, root2, keep
    return lr * root2 / corrected1, 1.0, keep


def _numbers(optimizer: RowOptimizer, lr: float, step: int) -> tuple[Loop, tuple[Any, ...]]:
    """The loop of an optimizer and its numbers for one step."""
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
        return _adam, (*_adam_step(optimizer, lr, step), *rests, float(step))
    return _ftrl, (lr, optimizer.l1, optimizer.l2, optimizer.beta)


# Numbers come in the slab's dtype: a literal of Python would lift fp32 arithmetic to fp64. The parts of a line are
# views of their own, and one pass writes to one of them: so the compiler sees that they do not overlap and takes 8 or
# 16 columns at a time, where one pass over everything went column by column, four times slower at width 64.


@loop
def _sgd(slab: np.ndarray, rows: np.ndarray, grads: np.ndarray, scale: Any, lr: Any, decay: Any) -> None:
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        row = rows[i]
        for j in range(grads.shape[1]):
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
    even = width - width % 4
    g = np.empty(width, grads.dtype)
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        row = rows[i]
        for j in range(width):
            g[j] = grads[i, j] * scale + slab[row, j] * decay
        if mean_squares.size:
            mean = mean_squares[i]
        else:
            a = b = c = d = scale - scale
            for j in range(0, even, 4):
                a += g[j] * g[j]
                b += g[j + 1] * g[j + 1]
                c += g[j + 2] * g[j + 2]
                d += g[j + 3] * g[j + 3]
            for j in range(even, width):
                a += g[j] * g[j]
            mean = ((a + c) + (b + d)) / elements
        slab[row, width] += mean
        size = lr / (math.sqrt(slab[row, width]) + eps)
        for j in range(width):
            slab[row, j] -= g[j] * size


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


@loop
def _catch_up(
    slab: np.ndarray,
    rows: np.ndarray,
    width: int,
    sizes: np.ndarray,
    roots: np.ndarray,
    keeps: np.ndarray,
    kept: np.ndarray,
    horizon: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    last = sizes.size - 1
    held = np.empty((3, width))
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        row = rows[i]
        first = int(slab[row, 3 * width])
        if first >= last:
            continue
        for j in range(width):
            held[0, j] = slab[row, j]
            held[1, j] = slab[row, width + j]
            held[2, j] = slab[row, 2 * width + j]
        replayed = min(last, first + horizon)
        for step in range(first + 1, replayed + 1):
            for j in range(width):
                held[1, j] *= beta1
                held[2, j] *= beta2
                moved = held[1, j] * sizes[step] / (math.sqrt(held[2, j]) / roots[step] + eps)
                held[0, j] = held[0, j] * keeps[step] - moved
        fade1, fade2 = beta1 ** (last - replayed), beta2 ** (last - replayed)
        keep = math.exp(kept[last] - kept[replayed])
        for j in range(width):
            slab[row, j] = held[0, j] * keep
            slab[row, width + j] = held[1, j] * fade1
            slab[row, 2 * width + j] = held[2, j] * fade2
        slab[row, 3 * width] = last
