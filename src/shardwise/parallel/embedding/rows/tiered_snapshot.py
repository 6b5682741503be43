"""TieredSnapshot: the rows of a store with tiers while a save writes them, read from memory and disk a part at a time.

    save       begin ──► reads rows in the order of (bucket, key), a window at a time ──► close
    training   before a step changes a row, what the row was is kept     tiers/cache_snapshot.py

A save of a table that is larger than memory cannot copy its rows. It reads each row when the row is written: from the
cache, from the disk, or drawn if the row was never changed. No row enters or leaves the cache.

Cost:   tiers/cache_snapshot.py; a read of each row that is on the disk, once for the weights and once for each
        optimizer state; one window of lines, and 4 bytes a row of dynamic tables for their order.
Shapes: n rows of one call.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.kernels.tables.index_snapshot import IndexSnapshot


class TieredSnapshot:
    """Lines and indexes of a store with tiers as they were when the snapshot was made.

    Args:
        read: function that returns the lines of at most ``most`` distinct rows, one tensor [n, columns] for each memory
            of the lines; the tensors are valid until its next call.
        most: number of rows that are read at once.
        indexes: snapshots of the indexes of dynamic tables, by position in the group; empty for static tables.
        waiting: snapshots of the keys that wait for admission, by position in the group.
        end: function that ends the snapshot of the rows.
    """

    def __init__(
        self,
        read: Callable[[Tensor], list[Tensor]],
        most: int,
        indexes: Sequence[IndexSnapshot],
        waiting: Sequence[IndexSnapshot | None],
        end: Callable[[], None],
    ) -> None:
        self._read, self._most, self._end = read, most, end
        self.indexes, self.waiting = indexes, waiting
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def read(self, rows: Tensor) -> list[Tensor]:
        """Return the lines of distinct rows, one tensor [n, columns] for each memory of the lines."""
        with self._lock:  # two threads may write files of one save
            parts = [[each.clone() for each in self._read(part)] for part in rows.split(self._most)]
        return parts[0] if len(parts) == 1 else [torch.cat(each) for each in zip(*parts, strict=True)]

    def close(self) -> None:
        """End the snapshots of the rows and of the indexes."""
        self._end()
        for index in (*self.indexes, *self.waiting):
            if index is not None:
                index.close()
        self._closed.set()

    def wait(self) -> None:
        """Wait until the save that reads this snapshot has ended."""
        self._closed.wait()
