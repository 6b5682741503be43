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

Cost:   one loop over the keys of a request, one over those that are not here, and a search of these in the files.
        Taking over copies all slots and searches their keys among those that changed. Without numba the loops are
        operations of numpy, and of two missing keys with one slot the first takes it instead of the last.
Memory: at most the bytes that were given: 4·D + 13 for each slot with vectors in fp32.
Shapes: N keys of a request, D width, S slots.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import UsageError
from shardwise.kernels.tables.compiled import is_installed, loop

Keys = npt.NDArray[np.int64]
Lookup = Callable[[tuple[str, ...], Keys, Keys], npt.NDArray[np.floating]]
"""Function of (names of tables, keys [n], place of each key's table [n]) that returns vectors [n, D]."""
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

    def read(self, keys: Keys, tables: Keys, places: Keys | None = None) -> npt.NDArray[np.floating]:
        """Return the vectors of keys: [N, D].

        Args:
            keys: the keys, int64 [N].
            tables: place of each key's table, int64 [N].
            places: place of each key's vector in the result, each number below N once, int64 [N]; None is the order of
                the keys.
        """
        places = np.arange(keys.size) if places is None else places
        if not self._keys.size:
            found = np.empty((keys.size, self._rows.shape[1]), self._rows.dtype)
            found[places] = self._lookup(self._names, keys, tables)
            return found
        slots, found = (
            np.empty(keys.size, np.int64),
            np.empty((keys.size, self._rows.shape[1]), self._rows.dtype),
        )
        with self._lock:
            find = _find if is_installed() else _plain_find
            missing = find(keys, tables, places, self._shift, *self._held(), slots, found)
            self.hits += keys.size - missing.size
            self.misses += missing.size
        if missing.size:
            keys, tables, slots = keys[missing], tables[missing], slots[missing]
            rows = self._lookup(self._names, keys, tables).astype(self._rows.dtype, copy=False)
            found[places[missing]] = rows
            with self._lock:
                hold = _hold if is_installed() else _plain_hold
                hold(keys, tables, slots, rows, *self._held())
        return found

    def _held(self) -> tuple[Keys, npt.NDArray[np.int32], npt.NDArray[np.floating], npt.NDArray[np.bool_]]:
        return self._keys, self._tables, self._rows, self._is_marked


@loop
def _slot(key: int, table: int, shift: int) -> np.int64:
    mixed = (np.uint64(key) ^ (np.uint64(table) * _OTHER_ODD)) * _ODD
    mixed ^= mixed >> np.uint64(32)
    return np.int64((mixed * _OTHER_ODD) >> shift)


@loop
def _find(
    keys: np.ndarray,
    tables: np.ndarray,
    places: np.ndarray,
    shift: int,
    held_keys: np.ndarray,
    held_tables: np.ndarray,
    held_rows: np.ndarray,
    is_marked: np.ndarray,
    slots: np.ndarray,
    found: np.ndarray,
) -> np.ndarray:
    """Copy and mark the vectors that are held, and return which keys are missing."""
    missing = np.empty(keys.size, np.int64)
    count = 0
    for i in range(keys.size):
        slot = _slot(keys[i], tables[i], shift)
        slots[i] = slot
        if held_keys[slot] == keys[i] and held_tables[slot] == tables[i]:
            is_marked[slot] = True
            place = places[i]
            for column in range(found.shape[1]):
                found[place, column] = held_rows[slot, column]
        else:
            missing[count] = i
            count += 1
    return missing[:count]


@loop
def _hold(
    keys: np.ndarray,
    tables: np.ndarray,
    slots: np.ndarray,
    rows: np.ndarray,
    held_keys: np.ndarray,
    held_tables: np.ndarray,
    held_rows: np.ndarray,
    is_marked: np.ndarray,
) -> None:
    """Put vectors into their slots, where no mark protects what is there; the marks that are met go."""
    for i in range(keys.size):
        slot = slots[i]
        if is_marked[slot]:
            is_marked[slot] = False
        else:
            held_keys[slot], held_tables[slot] = keys[i], tables[i]
            for column in range(rows.shape[1]):
                held_rows[slot, column] = rows[i, column]


def _plain_find(
    keys: Keys,
    tables: Keys,
    places: Keys,
    shift: np.uint64,
    held_keys: Keys,
    held_tables: npt.NDArray[np.int32],
    held_rows: npt.NDArray[np.floating],
    is_marked: npt.NDArray[np.bool_],
    slots: Keys,
    found: npt.NDArray[np.floating],
) -> Keys:
    """Run ``_find`` in operations of numpy."""
    mixed = (keys.view(np.uint64) ^ (tables.view(np.uint64) * _OTHER_ODD)) * _ODD
    mixed ^= mixed >> np.uint64(32)
    slots[:] = ((mixed * _OTHER_ODD) >> shift).view(np.int64)
    is_hit = (held_keys[slots] == keys) & (held_tables[slots] == tables)
    found[places] = held_rows[slots]
    is_marked[slots[is_hit]] = True
    return np.flatnonzero(~is_hit)


def _plain_hold(
    keys: Keys,
    tables: Keys,
    slots: Keys,
    rows: npt.NDArray[np.floating],
    held_keys: Keys,
    held_tables: npt.NDArray[np.int32],
    held_rows: npt.NDArray[np.floating],
    is_marked: npt.NDArray[np.bool_],
) -> None:
    """Run ``_hold`` in operations of numpy; of several keys with one slot the first takes it."""
    slots, first = np.unique(slots, return_index=True)
    is_protected = is_marked[slots]
    is_marked[slots] = False
    free, chosen = slots[~is_protected], first[~is_protected]
    held_keys[free], held_tables[free] = keys[chosen], tables[chosen]
    held_rows[free] = rows[chosen]
