"""Keys, rows and scores of an index as they were at one moment, while the index goes on changing.

    index      before_change(rows) ──► rows that have not been kept yet: their key, score and state are copied
    reader     live columns, then what was kept in place of it

The index announces rows before it changes them, and both sides hold the lock while they copy. So a row that the reader
finds live has not been changed when the reader has copied it, and one that was changed is read from the copy. One
thread changes the index, and another may read the snapshot, a few thousand rows at a time.

Cost:   kept_rows.py, with 17 bytes for each row that changes; 4 bytes a row for the order.
Shapes: n rows of one call, M rows of the snapshot.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.kernels.tables.kept_rows import KeptRows
from shardwise.kernels.tables.keys import bucket

_KEY, _SCORE, _STATE = 0, 1, 2
"""Numbers of the columns of an index."""

_CHUNK_ROWS = 1 << 15
"""Number of neighbouring rows that are read while the lock is held."""
_READ_ROWS = 1 << 12
"""Number of rows anywhere that are read while the lock is held."""
_SORTED_ROWS = 1 << 18
"""Number of rows that are sorted at once."""


class IndexSnapshot:
    """The rows of an index at the moment at which the snapshot is made.

    Args:
        index: index that counts keys by bucket, and of which no other snapshot is open.
    """

    def __init__(self, index: HashIndex) -> None:
        assert index.before_change is None, "an index has one snapshot at a time"
        self._index = index
        self._rows = index.rows
        self.counts = index.bucket_counts.clone()
        """Number of keys of each bucket: int64 [buckets]."""
        self._kept = KeptRows(self._rows, [torch.int64, torch.int64, torch.uint8])
        index.before_change = self._keep

    def close(self) -> None:
        """Keep no more rows."""
        self._index.before_change = None

    def _keep(self, rows: np.ndarray) -> None:
        with self._kept.lock.for_step():
            old = torch.from_numpy(rows[rows < self._rows])
            old = old[self._kept.first(old)]
            if old.numel():
                self._kept.keep(old, [column[old] for column in self._index.columns])

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and scores of rows: [n] -> [n], [n]."""
        return self.keys_of(rows), self.scores_of(rows)

    def keys_of(self, rows: Tensor) -> Tensor:
        """Return the keys of rows: [n] -> [n]."""
        return self._column(_KEY, rows)

    def scores_of(self, rows: Tensor) -> Tensor:
        """Return the scores of rows: [n] -> [n]."""
        return self._column(_SCORE, rows)

    def _column(self, number: int, rows: Tensor) -> Tensor:
        found = torch.empty_like(rows)
        for start in range(0, rows.numel(), _READ_ROWS):
            part = slice(start, start + _READ_ROWS)
            found[part] = self._read(rows[part], rows[part], [number])[0]
        return found

    def _read(self, rows: Tensor, at: Tensor | slice, numbers: Sequence[int]) -> list[Tensor]:
        """Return some columns of rows, which ``at`` names too."""
        with self._kept.reading:
            with self._kept.lock.for_reader():
                columns = [self._index.columns[number] for number in numbers]
                live = [each[at].clone() if isinstance(at, slice) else each[at] for each in columns]
                copied = self._kept.take()
            if not self._kept.is_empty:
                self._kept.put(rows, live, copied, numbers)
        return live

    def order(self, wanted: Tensor) -> Tensor:
        """Return the rows of the snapshot in the order of (bucket, key): int32 or int64 [M].

        Args:
            wanted: mask of the buckets whose rows are returned, bool [buckets].
        """
        counts = torch.where(wanted, self.counts, 0)
        ends = counts.cumsum(0)
        small = self._rows < 1 << 31
        order = torch.empty(int(ends[-1]), dtype=torch.int32 if small else torch.int64)
        next_place = ends - counts
        for start in range(0, self._rows, _CHUNK_ROWS):
            rows = torch.arange(start, min(start + _CHUNK_ROWS, self._rows))
            keys, state = self._read(rows, slice(start, int(rows[-1]) + 1), [_KEY, _STATE])
            self._place(rows, keys, state, wanted, order, next_place)
        start = 0
        for stop in _parts(ends):
            rows = order[start:stop].long()
            keys = self.keys_of(rows)
            by_key = keys.argsort()
            by_bucket = bucket(keys[by_key], counts.numel()).argsort(stable=True)
            order[start:stop] = rows[by_key[by_bucket]].to(order.dtype)
            start = stop
        return order

    @staticmethod
    def _place(
        rows: Tensor, keys: Tensor, state: Tensor, wanted: Tensor, order: Tensor, next_place: Tensor
    ) -> None:
        """Write rows of the snapshot behind the rows of their buckets that were written before."""
        buckets = bucket(keys, wanted.numel())
        which = ((state != 0) & wanted[buckets]).nonzero()[:, 0]
        buckets = buckets[which]
        by_bucket = buckets.argsort(stable=True)
        buckets = buckets[by_bucket]
        counts = torch.bincount(buckets, minlength=wanted.numel())
        firsts = counts.cumsum(0) - counts
        places = next_place[buckets] + torch.arange(buckets.numel()) - firsts[buckets]
        order[places] = rows[which[by_bucket]].to(order.dtype)
        next_place += counts


def _parts(ends: Tensor) -> list[int]:
    """Return the ends of stretches of whole buckets with about ``_SORTED_ROWS`` rows each."""
    found: list[int] = []
    start = last = 0
    for end in ends.tolist():
        if last > start and end - start > _SORTED_ROWS:
            found.append(last)
            start = last
        last = end
    return [*found, last] if last > start else found
