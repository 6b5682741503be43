"""Replay of the steps that rows missed before the rows are read: so an Adam on touched rows is Adam on the whole table.

A row of an ``exact`` Adam stores the step up to which it is updated. In a step without gradient m and v only decay:

    m = beta1 m;  v = beta2 v;  w = keep w - lr / (1 - beta1^t) · m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

so |m| / sqrt(v) falls by beta1 / sqrt(beta2) a step; when that is under 2^-60 of its start (``Adam.horizon``), the rest
is closed form. keep is the share of a weight that decay leaves in a step.

For a slab on a device the host needs the rows' steps (``stood``), because it launches each replayed step as separate
operations; without them it must copy the steps from the device.

Cost:   a look for a row that is up to date, else D times the missed steps, at most the horizon's.
Shapes: R rows of the slab, U rows to be read, D width.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import ahead, array, loop, prefetch, runs_compiled
from shardwise.kernels.tables.row_rules import Adam, adam_step
from shardwise.kernels.tables.slab import check_rows


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
) -> None:
    """Replay the steps that rows missed, up to the last of ``history``. Call this function before rows are read.

    A row that is up to date costs a look. A checkpoint needs no replay: the state and ``lrs`` are enough to replay
    later.

    Args:
        history: learning rates of the steps.
        optimizer: an exact Adam.
        slab: lines of the table, [R, 3 D + 1].
        rows: rows to update, int64 [U].
        width: columns of weights, D.
        stood: step up to which each row is updated, on the host, int [U]; needed for speed if the slab is on a device.

    Raises:
        ValueError: if ``optimizer`` is not exact.
        IndexError: if a row is outside the slab.
    """
    if not optimizer.exact:
        raise ValueError("a lazy Adam has no steps to catch up with; Adam(exact=True) has")
    if len(rows) == 0 or len(history) == 0:
        return
    check_rows(slab, rows)
    horizon = len(history) if optimizer.horizon is None else min(optimizer.horizon, len(history))
    numbers = (optimizer.beta1, optimizer.beta2, optimizer.eps)
    if not runs_compiled(slab, rows):
        stood = slab[rows, 3 * width].cpu() if stood is None else stood
        if int(stood.min()) < len(history):
            _plain_catch_up(history, slab, rows, width, horizon, stood, *numbers)
        return
    steps = (history.sizes, history.roots, history.keeps, history.kept)
    _catch_up(slab.detach().numpy(), array(rows), width, *steps, horizon, *numbers)


def plain_catch_up(history: StepHistory, optimizer: Adam, slab: Tensor, rows: Tensor, width: int) -> None:
    """Run ``catch_up`` in torch operations, every step replayed: the reference."""
    numbers = (optimizer.beta1, optimizer.beta2, optimizer.eps)
    stood = slab[rows, 3 * width].cpu()
    _plain_catch_up(history, slab, rows, width, len(history), stood, *numbers)


def _plain_catch_up(
    history: StepHistory,
    slab: Tensor,
    rows: Tensor,
    width: int,
    horizon: int,
    stood: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    held = slab[rows].double()
    w, m, v, first = held.split([width, width, width, 1], 1)
    last = len(history)
    for step in _missed(stood, last, horizon):
        behind = (first < step) & (step <= first + horizon)
        m.copy_(torch.where(behind, m * beta1, m))
        v.copy_(torch.where(behind, v * beta2, v))
        moved = m * history.sizes[step] / (v.sqrt() / history.roots[step] + eps)
        w.copy_(torch.where(behind, w * history.keeps[step] - moved, w))
    left = (last - stood.double() - horizon).clamp(min=0)
    if bool(left.any()):
        kept = torch.from_numpy(history.kept)
        rest = torch.stack([(kept[last] - kept[(last - left).long()]).exp(), beta1**left, beta2**left])
        if slab.device.type != "cpu":
            rest = rest.pin_memory().to(slab.device, non_blocking=True)
        for part, factor in zip((w, m, v), rest, strict=True):
            part.mul_(factor[:, None])
    first.fill_(last)
    slab[rows] = held.to(slab.dtype)


def _missed(stood: Tensor, last: int, horizon: int) -> list[int]:
    """Return the steps that some row must replay, in their order."""
    found: list[int] = []
    for first in stood.unique().tolist():
        begin = max(int(first), found[-1] if found else 0)
        found += range(begin + 1, min(int(first) + horizon, last) + 1)
    return found


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
