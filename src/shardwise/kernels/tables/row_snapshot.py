"""StoreSnapshot: the rows of one store after a step, which a save reads while later steps change the store.

    save       begin ──► reads rows in the order of (bucket, key), a part at a time ──► close
    training   before a step changes a row, inserts a key or evicts one: what the row was is copied, once

Nothing is copied when a snapshot begins, so a save takes the time of a few numbers from its step. What is read is the
state of the one moment at which it began: a row is either unchanged, or its copy was made before its first change. The
live rows are read under the lock under which copies are made, a few thousand at a time, and then overwritten by the
copies that there were.

A store gives no snapshot of rows on a device and of columns that other ranks complete: their rows are copied at once.
The copies of rows of an exact Adam are brought to the step of the snapshot (row_replay.py); the rows in memory are not
changed.

Cost:   kept_rows.py; 4 bytes a row of dynamic tables for their order. Rows of an exact Adam replay their missed steps
        once for the weights and once for each optimizer state.
Shapes: n rows of one call, w columns of the table that are on this rank.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.kernels.tables.index_snapshot import IndexSnapshot
from shardwise.kernels.tables.kept_rows import KeptRows

_CHUNK_ROWS = 1 << 12
"""Number of lines that are read while the lock is held."""


class StoreSnapshot:
    """Lines and indexes of a store as they were when the snapshot was made.

    Args:
        memory: tensors [rows, columns] that hold the lines.
        parts: ranges of rows that are in use, in rising order. Rows that come later are not copied.
        indexes: snapshots of the indexes of dynamic tables, by position in the group; empty for static tables.
        waiting: snapshots of the keys that wait for admission, by position in the group.
        bring: function that brings copies of lines, one tensor for each of ``memory``, to the step of the snapshot;
            None if they are at it.
    """

    def __init__(
        self,
        memory: Sequence[Tensor],
        parts: Sequence[range],
        indexes: Sequence[IndexSnapshot],
        waiting: Sequence[IndexSnapshot | None],
        bring: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        self._memory, self._bring = memory, bring
        self.indexes, self.waiting = indexes, waiting
        self._starts = torch.tensor([each.start for each in parts], dtype=torch.int64)
        self._sizes = torch.tensor([len(each) for each in parts], dtype=torch.int64)
        self._firsts = self._sizes.cumsum(0) - self._sizes
        self._kept = KeptRows(
            int(self._sizes.sum()), [each.dtype for each in memory], [each.shape[1] for each in memory]
        )
        self._closed = threading.Event()

    def keep(self, rows: Tensor) -> None:
        """Copy the lines of rows that are about to change, unless they have been copied."""
        numbers, was_in_use = self._numbers(rows)
        rows, numbers = rows[was_in_use], numbers[was_in_use]
        with self._kept.lock.for_step():
            first = self._kept.first(numbers)
            if first.numel():
                old = rows[first]
                self._kept.keep(numbers[first], [each.index_select(0, old) for each in self._memory])

    def _numbers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers of rows among those that were in use, and a mask of the rows that were: [n], [n]."""
        if self._starts.numel() == 1:
            offsets = rows - self._starts
            return offsets, offsets < self._sizes
        part = torch.searchsorted(self._starts, rows, right=True) - 1
        offsets = rows - self._starts[part]
        return offsets + self._firsts[part], offsets < self._sizes[part]

    def read(self, rows: Tensor) -> list[Tensor]:
        """Return the lines of rows as they were, one tensor [n, columns] for each of the memory."""
        found = [each.new_empty(rows.numel(), each.shape[1]) for each in self._memory]
        for start in range(0, rows.numel(), _CHUNK_ROWS):
            part = rows[start : start + _CHUNK_ROWS]
            with self._kept.reading:
                with self._kept.lock.for_reader():
                    lines = [each.index_select(0, part) for each in self._memory]
                    copied = self._kept.take()
                if not self._kept.is_empty:
                    self._kept.put(self._numbers(part)[0], lines, copied)
            for whole, each in zip(found, lines, strict=True):
                whole[start : start + part.numel()] = each
        if self._bring is not None:
            self._bring(found)
        return found

    def close(self) -> None:
        """End the copying of rows."""
        for index in (*self.indexes, *self.waiting):
            if index is not None:
                index.close()
        self._closed.set()

    def wait(self) -> None:
        """Wait until the save that reads this snapshot has ended."""
        self._closed.wait()
