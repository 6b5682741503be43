"""Vectors that are asked for often, in memory, over vectors in files.

    slot of (table, key) = upper bits of a product         one vector a slot; a key has one slot
    hit                    the slot has this table and key: its vector is returned, and the slot is marked
    miss                   the vector is read from the files; it takes the slot, unless a mark protects the vector
                           there, and then the mark goes

Keys of clicks are Zipf distributed: a few of them make most lookups. Those are found here without a search and without
a page of the file. A vector that is asked for once does not displace one that was asked for since the last collision.
Keys that no table has are held too, as zeros.

A server that goes on by an increment makes a new table of hot rows from the one in use, with the vectors that changed
written anew (``take_over``): requests of the step before go on with theirs.

Cost:   one multiplication and three gathers for all keys of a request; each miss costs a lookup in its table. Taking
        over copies all slots and searches their keys among those that changed.
Memory: at most the bytes that were given: 4·D + 13 for each slot with vectors in fp32.
Shapes: N keys of a request, D width, S slots.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import UsageError

Keys = npt.NDArray[np.int64]
Lookup = Callable[[str, Keys], npt.NDArray[np.floating]]
"""Function of (table, keys [n]) that returns vectors [n, D]."""
WriteChanges = Callable[[str, Keys, npt.NDArray[np.floating]], None]
"""Function of (table, keys [n], vectors [n, D]) that writes the vectors of a later step over those that changed."""

_ODD, _OTHER_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_BITS = 64
_NO_TABLE = -1
_SLOTS_AT_ONCE = 1 << 14
"""Slots that are copied while requests wait."""


class HotRows:
    """The vectors of tables of one width. Several threads may read at the same time.

    Args:
        tables: Names of the tables.
        width: Numbers in a vector.
        dtype: The dtype of the vectors.
        lookup: Function that reads vectors from the files.
        most_bytes: Most bytes of memory to take; 0 holds no vectors.

    Raises:
        UsageError: if ``most_bytes`` is negative.
    """

    def __init__(
        self, tables: Sequence[str], width: int, dtype: npt.DTypeLike, lookup: Lookup, most_bytes: int
    ) -> None:
        if most_bytes < 0:
            raise UsageError(f"hot rows: {most_bytes} bytes of memory; expected 0 or more")
        self._names = tuple(tables)
        self._lookup = lookup
        each = width * np.dtype(dtype).itemsize + 13
        bits = (most_bytes // each).bit_length() - 1
        slots = 1 << bits if bits > 0 else 0
        self._shift = np.uint64(_BITS - max(bits, 1))
        self._keys = np.zeros(slots, np.int64)
        self._tables = np.full(slots, _NO_TABLE, np.int32)
        self._rows = np.zeros((slots, width), dtype)
        self._is_marked = np.zeros(slots, bool)
        self._lock = threading.Lock()
        self.hits = 0
        """Number of keys that were found here."""
        self.misses = 0
        """Number of keys that were read from files."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the vectors and their keys take."""
        parts = (self._keys, self._tables, self._rows, self._is_marked)
        return sum(part.nbytes for part in parts)

    def take_over(self, before: "HotRows", write_changes: WriteChanges) -> None:
        """Hold the vectors that the hot rows of an earlier step hold, as they are at this step.

        Args:
            before: The hot rows of the same tables, in as many bytes; other threads may read them meanwhile.
            write_changes: Function that brings vectors to this step.
        """
        for start in range(0, self._keys.size, _SLOTS_AT_ONCE):
            part = slice(start, start + _SLOTS_AT_ONCE)
            with before._lock:  # for a part at a time, because requests wait for the lock
                self._keys[part] = before._keys[part]
                self._tables[part] = before._tables[part]
                self._rows[part] = before._rows[part]
                self._is_marked[part] = before._is_marked[part]
        self.hits, self.misses = before.hits, before.misses
        for number, name in enumerate(self._names):
            slots = np.flatnonzero(self._tables == number)
            rows = self._rows[slots]
            write_changes(name, self._keys[slots], rows)
            self._rows[slots] = rows

    def read(self, keys: Keys, tables: npt.NDArray[np.int64]) -> npt.NDArray[np.floating]:
        """Return the vectors of keys: int64 [N], index of each key's table int64 [N] -> [N, D]."""
        if not self._keys.size:
            found = np.empty((keys.size, self._rows.shape[1]), self._rows.dtype)
            self._from_files(keys, tables, np.arange(keys.size), found)
            return found
        slots = self._slots(keys, tables)
        with self._lock:
            is_hit = (self._keys[slots] == keys) & (self._tables[slots] == tables)
            found = self._rows[slots]
            self._is_marked[slots[is_hit]] = True
            missing = np.flatnonzero(~is_hit)
            self.hits += keys.size - missing.size
            self.misses += missing.size
        if missing.size:
            self._from_files(keys, tables, missing, found)
            self._hold(slots[missing], keys[missing], tables[missing], found[missing])
        return found

    def _slots(self, keys: Keys, tables: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        mixed = (keys.view(np.uint64) ^ (tables.view(np.uint64) * _OTHER_ODD)) * _ODD
        mixed ^= mixed >> np.uint64(32)
        return ((mixed * _OTHER_ODD) >> self._shift).view(np.int64)

    def _from_files(
        self,
        keys: Keys,
        tables: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        found: npt.NDArray[np.floating],
    ) -> None:
        """Read the vectors of ``keys[places]`` into ``found[places]``."""
        wanted = tables[places]
        order = np.argsort(wanted, kind="stable")
        ends = np.searchsorted(wanted[order], np.arange(len(self._names) + 1))
        for table in np.unique(wanted):
            of_table = places[order[ends[table] : ends[table + 1]]]
            found[of_table] = self._lookup(self._names[table], keys[of_table])

    def _hold(
        self,
        slots: npt.NDArray[np.int64],
        keys: Keys,
        tables: npt.NDArray[np.int64],
        rows: npt.NDArray[np.floating],
    ) -> None:
        """Put vectors into their slots, where no mark protects what is there; the marks that were met go."""
        slots, first = np.unique(slots, return_index=True)  # two keys of a request may share a slot
        with self._lock:
            is_protected = self._is_marked[slots]
            self._is_marked[slots] = False
            free, chosen = slots[~is_protected], first[~is_protected]
            self._keys[free] = keys[chosen]
            self._tables[free] = tables[chosen]
            self._rows[free] = rows[chosen]
