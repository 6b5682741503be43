"""Replay of the steps that rows missed before the rows are read: so an Adam on touched rows is Adam on the whole table.

A row of an ``exact`` Adam stores the step up to which it is updated. A step that it missed is the step of
row_optimizers.py with a gradient of 0:

    m -= (1 - beta1) m;  v -= (1 - beta2) v;  w = keep w - lr / (1 - beta1^t) · m / by
    by = sqrt(v) / sqrt(1 - beta2^t) + eps;   m = 0 if |m| <= 2^-60 by

keep is the share of a weight that decay leaves in a step. Each step is rounded to the dtype of the slab, as a step with
a gradient is. So it does not matter when a row is read, by whom and how often: a replay of ten steps has the bits of
one of four steps and one of six. Evaluations and saves change no later step, and copies of a row on several ranks stay
equal, although each rank replays the steps of the rows that its own batches read.

|m| / sqrt(v) falls by beta1 / sqrt(beta2) a step, so a row without gradients has m = 0 after ``Adam.horizon`` steps at
the latest. Without weight decay its weights then stay as they are, and the row rests: it keeps the step in which it
came to rest, and v as it was then, until it has a gradient again. With weight decay no row rests. A row whose columns
lie on several ranks rests only where v is 0 too, because a row is saved with one step.

For a slab on a device the host needs the rows' steps (``stood``), because it launches each replayed step as separate
operations; without them it must copy the steps from the device. For rows that do not rest the steps beyond the horizon
are one closed form there, so that such rows depend in their last bits on when they were read.

Cost:   a look for a row that is up to date or rests, else D times the missed steps, at most the horizon's if it rests.
Shapes: R rows of the slab, U rows to be read, D width.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import ahead, array, loop, prefetch, runs_compiled
from shardwise.kernels.tables.row_optimizers import root_of
from shardwise.kernels.tables.row_rules import Adam, adam_step
from shardwise.kernels.tables.slab import check_rows

_SMALLEST = 2.0**-60
"""Share of its divisor under which the first moment of a missed step is 0: it moves no weight any more."""


_NEVER, _WITHOUT_M, _WITHOUT_M_AND_V = 0, 1, 2
"""When a row rests."""


class StepHistory:
    """Learning rates of past steps, which exact Adam needs to replay them.

    Only ``lrs`` needs to be saved; a history made from it is the same.

    Args:
        optimizer: the optimizer.
        lrs: learning rates of the steps so far.
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
        """Record step ``len + 1`` with this learning rate."""
        if self._count + 1 == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._count += 1
        size, root, keep = adam_step(self._optimizer, lr, self._count)
        kept = self._columns[4, self._count - 1] + math.log(keep)
        self._columns[:, self._count] = lr, size, root, keep, kept

    def frozen(self) -> "StepHistory":
        """Return the steps so far, to which steps that are appended later are not added."""
        return copy.copy(self)  # a step never changes the columns of the steps before it

    @property
    def lrs(self) -> list[float]:
        """Learning rate of each step."""
        return self._columns[0, 1 : self._count + 1].tolist()

    @property
    def sizes(self) -> np.ndarray:
        """Step size lr / (1 - beta1^t) by step t; index 0 is empty."""
        return self._columns[1, : self._count + 1]

    @property
    def roots(self) -> np.ndarray:
        """Root of the second moment's correction, sqrt(1 - beta2^t), by step t."""
        return self._columns[2, : self._count + 1]

    @property
    def keeps(self) -> np.ndarray:
        """Share of a weight that decay leaves, by step t."""
        return self._columns[3, : self._count + 1]

    @property
    def kept(self) -> np.ndarray:
        """Logarithm of the share of a weight that decay has left since step 0, by step t."""
        return self._columns[4, : self._count + 1]


def catch_up(
    history: StepHistory,
    optimizer: Adam,
    slab: Tensor,
    rows: Tensor,
    width: int,
    stood: Tensor | None = None,
    *,
    for_update: bool = False,
    are_whole: bool = True,
) -> None:
    """Replay the steps that rows missed, up to the last of ``history``. Call this function before rows are read.

    Args:
        history: learning rates of the steps.
        optimizer: an exact Adam.
        slab: lines of the table, [R, 3 D + 1].
        rows: rows to update, each named once, int64 [U].
        width: columns of weights, D.
        stood: step up to which each row is updated, on the host, int [U]; needed for speed if the slab is on a device.
        for_update: True if the rows have gradients in the running step, so that no row rests any more.
        are_whole: False if other columns of the rows lie on other ranks, where they may have no m from another step on.

    Raises:
        ValueError: if ``optimizer`` is not exact.
        IndexError: if a row is outside the slab.
    """
    if not optimizer.exact:
        raise ValueError("a lazy Adam has no steps to catch up with; Adam(exact=True) has")
    if len(rows) == 0 or len(history) == 0:
        return
    check_rows(slab, rows)
    rests = _NEVER if optimizer.weight_decay else _WITHOUT_M if are_whole else _WITHOUT_M_AND_V
    if runs_compiled(slab, rows):
        real = np.float32 if slab.dtype == torch.float32 else np.float64
        numbers = [real(x) for x in (1 - optimizer.beta1, 1 - optimizer.beta2, optimizer.eps, _SMALLEST)]
        steps = (history.sizes, history.roots, history.keeps)
        _catch_up(slab.detach().numpy(), array(rows), width, *steps, rests, *numbers)
    else:
        stood = slab[rows, 3 * width].cpu() if stood is None else stood
        if int(stood.min()) < len(history):
            _plain_catch_up(history, optimizer, slab, rows, width, stood, rests)
    if for_update:
        _end_rest(len(history), optimizer, slab, rows, width)


def _end_rest(last: int, optimizer: Adam, slab: Tensor, rows: Tensor, width: int) -> None:
    """Let v of rows that rest decay until step ``last``, in one multiplication; their m is 0."""
    steps = slab[rows, 3 * width]
    if slab.device.type == "cpu":  # elsewhere a look would wait for the device
        behind = steps < last
        if not bool(behind.any()):
            return
        rows, steps = rows[behind], steps[behind]
    left = optimizer.beta2 ** (last - steps.double())
    slab[rows, 2 * width : 3 * width] *= left.to(slab.dtype)[:, None]
    slab[rows, 3 * width] = float(last)


def _plain_catch_up(
    history: StepHistory,
    optimizer: Adam,
    slab: Tensor,
    rows: Tensor,
    width: int,
    stood: Tensor,
    rests: int,
) -> None:
    """Replay steps in torch operations, on any device, with the bits of the loop on the CPU."""
    last, horizon = len(history), optimizer.horizon
    is_closed = rests != _WITHOUT_M and slab.device.type != "cpu" and horizon is not None
    most = last if horizon is None or not (rests == _WITHOUT_M or is_closed) else horizon
    held = slab[rows]
    w, m, v, first = held.split([width, width, width, 1], 1)
    if slab.device.type == "cpu" and rests != _NEVER:  # elsewhere a look would wait for the device
        stood = stood[_has_moments(m, v, rests)[:, 0]]
    for step in _missed(stood, last, most):
        moves = first == step - 1  # another row may be steps ahead of this one
        if rests != _NEVER:
            moves &= _has_moments(m, v, rests)
        size, root, keep = (float(each[step]) for each in (history.sizes, history.roots, history.keeps))
        m_after, v_after = m - m * (1 - optimizer.beta1), v - v * (1 - optimizer.beta2)
        by = root_of(v_after) / root + optimizer.eps
        m_after.masked_fill_(m_after.abs() <= by * _SMALLEST, 0)
        for part, after in ((w, w * keep - m_after * size / by), (m, m_after), (v, v_after)):
            part.copy_(torch.where(moves, after, part))
        first.copy_(torch.where(moves, step, first))
    if is_closed:
        kept = torch.from_numpy(history.kept).to(slab.device)
        left = last - first.double()
        moves = torch.ones_like(first, dtype=torch.bool) if rests == _NEVER else _has_moments(m, v, rests)
        w.mul_((kept[last] - kept[first.long()]).exp())
        v.mul_(optimizer.beta2**left)
        first.masked_fill_(moves, last)
    slab[rows] = held


def _has_moments(m: Tensor, v: Tensor, rests: int) -> Tensor:
    """Return whether rows do not rest: [U, D] -> bool [U, 1]."""
    return ((m != 0) if rests == _WITHOUT_M else (m != 0) | (v != 0)).any(1, keepdim=True)


def _missed(stood: Tensor, last: int, most: int) -> list[int]:
    """Return the steps that some row must replay, at most ``most`` for each row, in their order."""
    found: list[int] = []
    for first in stood.unique().tolist():
        begin = max(int(first), found[-1] if found else 0)
        found += range(begin + 1, min(int(first) + most, last) + 1)
    return found


@loop
def _catch_up(
    slab: np.ndarray,
    rows: np.ndarray,
    width: int,
    sizes: np.ndarray,
    roots: np.ndarray,
    keeps: np.ndarray,
    rests: int,
    rest1: Any,
    rest2: Any,
    eps: Any,
    smallest: Any,
) -> None:
    last = sizes.size - 1
    number, by = np.zeros(4, slab.dtype), np.empty(width, slab.dtype)
    zero = number[3]
    far = ahead(slab.shape[1] * slab.itemsize)
    for i in range(rows.size):
        if i + far < rows.size:
            prefetch(slab, rows[i + far], slab.shape[1])
        row = rows[i]
        step = int(slab[row, 3 * width])
        if step >= last:
            continue
        w, m, v = slab[row, :width], slab[row, width : 2 * width], slab[row, 2 * width : 3 * width]
        while step < last:
            still = 0
            while still < width and m[still] == 0:
                still += 1
            if still == width:
                if rests == _NEVER or (rests == _WITHOUT_M_AND_V and np.any(v != 0)):
                    _decay(w, v, step, keeps, rest2, number)
                    step = last
                break
            step += 1
            number[0], number[1], number[2] = (
                sizes[step],
                roots[step],
                keeps[step],
            )  # in the dtype of the slab
            size, root, keep = number[0], number[1], number[2]
            for j in range(width):
                v[j] -= v[j] * rest2
            for j in range(width):
                by[j] = math.sqrt(v[j]) / root + eps
            for j in range(width):
                decayed = m[j] - m[j] * rest1
                m[j] = zero if abs(decayed) <= smallest * by[j] else decayed
            for j in range(width):
                w[j] = w[j] * keep - m[j] * size / by[j]
        slab[row, 3 * width] = step


@loop
def _decay(
    w: np.ndarray, v: np.ndarray, first: int, keeps: np.ndarray, rest2: Any, number: np.ndarray
) -> None:
    """Replay the steps after ``first`` of a row whose first moments are 0."""
    for step in range(first + 1, keeps.size):
        number[0] = keeps[step]
        keep = number[0]
        for j in range(w.size):
            w[j] *= keep
        for j in range(v.size):
            v[j] -= v[j] * rest2
