"""Copies of rows that were made before the rows changed, by row: a step makes them, and a reader looks them up.

    step      a bit a row says whether it was copied ──► copies are appended, and the rows that they belong to
    reader    number of each row's copy, entered when it next reads ──► what was read live is overwritten

The step touches as little memory as it can, because a page of memory that is new costs it some microseconds, and a row
is anywhere in a table: one bit a row, and the copies one after another. The larger array, from rows to copies, is the
reader's. Both sides hold ``lock`` for what they share: ``first``, ``keep`` and ``take`` run under it, ``put`` need not.
A reader holds ``reading`` from ``take`` to the end of ``put``: what one has taken, another finds only afterwards.

Memory for all copies is reserved (slab.py) and taken as rows are copied, so that more of them move none.

Cost:   1 bit a row, 4 bytes for each row in a page of rows of which one was copied, and the copies.
Shapes: n rows of one call.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import has_numba, loop
from shardwise.kernels.tables.slab import reserve

Copied = list[tuple[int, Tensor]]
"""Number of the first copy of rows that were copied together, and the rows."""

_GIVE_WAY_S = 5e-5


class KeptRows:
    """Copies of rows.

    Args:
        rows: number of rows of which copies may be made.
        dtypes: dtypes of the columns of a row.
        widths: numbers of each column; left out, each column has one number and no dimension of its own.
    """

    def __init__(self, rows: int, dtypes: Sequence[torch.dtype], widths: Sequence[int] | None = None) -> None:
        shapes = [(rows,) if widths is None else (rows, width) for width in widths or [1] * len(dtypes)]
        self._bits = np.zeros(-(-rows // 8), np.uint8)
        self._copies = [
            reserve(rows, 1 if widths is None else shape[-1], dtype, small_first=True).view(shape)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        self._count = 0
        self._new: Copied = []
        self._where = reserve(rows, 1, torch.int32, small_first=True).view(-1)
        """Place of a row's copy plus 1, and 0 for a row without one; the reader's."""
        self.lock = StepFirstLock()
        """Lock for what the step and the readers share."""
        self.reading = threading.Lock()
        """Lock that a reader holds from ``take`` to the end of ``put``."""

    @property
    def is_empty(self) -> bool:
        """True if no row was copied, so that rows that were read need no ``put``."""
        return self._count == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self._bits.nbytes + self._count * (4 + sum(copies[:1].nbytes for copies in self._copies))

    def first(self, rows: Tensor) -> Tensor:
        """Return the indexes of rows that were not copied, each row once, and count them as copied: [n] -> [m]."""
        given, chosen = rows.numpy(), np.empty(rows.numel(), np.int64)
        count = (_mark if has_numba() else _mark_plainly)(self._bits, given, chosen)
        return torch.from_numpy(chosen[:count])

    def keep(self, rows: Tensor, columns: Sequence[Tensor]) -> None:
        """Add copies of the rows that ``first`` has chosen, one tensor a column."""
        first, stop = self._count, self._count + rows.numel()
        for copies, column in zip(self._copies, columns, strict=True):
            copies[first:stop] = column
        self._new.append((first, rows))
        self._count = stop

    def take(self) -> Copied:
        """Return the rows that were copied since the last call, for ``put``."""
        copied, self._new = self._new, []
        return copied

    def put(
        self, rows: Tensor, columns: Sequence[Tensor], copied: Copied, numbers: Sequence[int] | None = None
    ) -> None:
        """Overwrite what was read of ``rows`` by the copies, where there are any.

        Args:
            rows: the rows: [n].
            columns: what was read of them, one tensor a column.
            copied: what ``take`` has returned under the lock under which they were read.
            numbers: numbers of the columns that were read; None if all were.
        """
        held = self._copies if numbers is None else [self._copies[number] for number in numbers]
        for first, those in copied:
            self._where[those] = torch.arange(first + 1, first + 1 + those.numel(), dtype=torch.int32)
        places = self._where[rows]
        kept = places.nonzero()[:, 0]
        if kept.numel():
            source = places[kept].long() - 1
            for copies, column in zip(held, columns, strict=True):
                column[kept] = copies[source]


class StepFirstLock:
    """Lock between a step and a reader, who takes it again and again: a step that waits for it goes first.

    A reader who took the lock again at once would have it before the thread of the step is awake.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_awaited = False
        """True while a step waits for the lock."""

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Hold the lock for a step."""
        self._is_awaited = True
        with self._lock:
            self._is_awaited = False
            yield

    @contextmanager
    def for_reader(self) -> Iterator[None]:
        """Hold the lock for a reader, and let a step have it afterwards if one waits."""
        with self._lock:
            yield
        if self._is_awaited:
            time.sleep(_GIVE_WAY_S)


def compile_loops() -> None:
    """Compile the loop of this module, so that the first step beside a save does not wait for it."""
    if has_numba():
        _mark(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))


@loop
def _mark(bits: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> int:
    """Set the bits of rows, write the indexes of those whose bit was not set, and return their number."""
    count = 0
    for i in range(rows.size):
        place, bit = rows[i] >> 3, np.uint8(1 << (rows[i] & 7))
        if bits[place] & bit == 0:
            bits[place] |= bit
            chosen[count] = i
            count += 1
    return count


def _mark_plainly(bits: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> int:
    """Do the same without numba."""
    distinct, index = np.unique(rows, return_index=True)
    bit = np.left_shift(1, distinct & 7).astype(np.uint8)
    is_first = bits[distinct >> 3] & bit == 0
    np.bitwise_or.at(bits, distinct[is_first] >> 3, bit[is_first])
    found = np.sort(index[is_first])
    chosen[: found.size] = found
    return int(found.size)
