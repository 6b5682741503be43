"""Search of keys in several tables at once, and copies of their rows from memory that is mapped.

    table t       keys K_t [M_t] and their rows R_t [M_t], in the order of the hashes of the keys
    bucket        upper bits of the hash: about 6 keys, which are neighbours; S_t[bucket] is the place of the first one
    (key, t)      row = R_t[p] for the place p in the key's bucket with K_t[p] = key, or -1 if there is none
    column C      C_t[row], or zeros for the row -1

A request of a server asks each of many tables for a few keys. A call of numpy for each table takes longer than the
search itself, so one loop reads all tables by their addresses. A binary search would wait for memory at most of its
steps; here a key waits for the bucket's place, its keys and its rows, and the lines of all keys are requested before
the first one is used. Without numba each table is searched by numpy, with the same result.

Cost:   three lines of memory for each key, and one for each 64 bytes of a row; 17.5 bytes of memory for each key.
Shapes: n keys of one call, M_t rows of table t.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwise.kernels.tables.compiled import copy_bytes, is_installed, loop, number_at, prefetch_at

Int64s = npt.NDArray[np.int64]

_ODD, _OTHER_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_BITS, _TOGETHER = 64, 8


class TableKeys:
    """The keys of a table, in the order of their hashes.

    Args:
        keys: The key of each row, int64 [M], in any order.
    """

    def __init__(self, keys: Int64s) -> None:
        hashes = _hashes(np.ascontiguousarray(keys, np.int64))
        self.rows = np.argsort(hashes).astype(np.int64, copy=False)
        """The row of each key."""
        self.keys = np.asarray(keys)[self.rows]
        """The keys in the order of their hashes."""
        bits = max(int(keys.size // _TOGETHER).bit_length(), 1)
        self.shift = _BITS - bits
        buckets = (hashes[self.rows] >> np.uint64(self.shift)).astype(np.int64)
        self.starts = np.searchsorted(buckets, np.arange((1 << bits) + 1))
        """The place at which each bucket begins in ``keys``, and the end of the last one: int64 [buckets + 1]."""

    @property
    def are_distinct(self) -> bool:
        """True if no key occurs twice."""
        return not bool(
            (self.keys[1:] == self.keys[:-1]).any()
        )  # equal keys have equal hashes: they are neighbours

    @property
    def are_all(self) -> bool:
        """True if the keys are the numbers from 0 to M - 1, each of them once."""
        inside = not self.keys.size or (self.keys.min() == 0 and self.keys.max() == self.keys.size - 1)
        return bool(inside) and self.are_distinct


class KeySearch:
    """The search of keys in several tables.

    Args:
        tables: The keys of each table.
    """

    def __init__(self, tables: Sequence[TableKeys]) -> None:
        self._tables = list(tables)
        self._key_at = _addresses([each.keys for each in tables])
        self._row_at = _addresses([each.rows for each in tables])
        self._start_at = _addresses([each.starts for each in tables])
        self._shifts = np.array([each.shift for each in tables], np.uint64)

    def rows_of(self, keys: Int64s, tables: Int64s) -> Int64s:
        """Return the row of each key, or -1.

        Args:
            keys: int64 [n].
            tables: The number of each key's table, int64 [n].

        Raises:
            ValueError: if a number of a table is out of range: the loop reads memory by it.
        """
        _check_tables(tables, keys.shape, len(self._tables))
        keys, found = np.ascontiguousarray(keys), np.full(keys.size, -1, np.int64)
        if is_installed():
            if not _find(keys, tables, self._key_at, self._row_at, self._start_at, self._shifts, found):
                raise _out_of_range(len(self._tables))
            return found
        for table, places in _by_table(tables):
            found[places] = _plain_find(keys[places], self._tables[table])
        return found


class TableColumn:
    """One array of each of several tables, with one entry for each row.

    Args:
        arrays: [M_t] or [M_t, D] of each table, of one dtype and one D; they are read where they are.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = [np.ascontiguousarray(each) for each in arrays]
        self.dtype, self._shape = self._arrays[0].dtype, self._arrays[0].shape[1:]
        if {(each.dtype, each.shape[1:]) for each in self._arrays} != {(self.dtype, self._shape)}:
            raise ValueError("a column of tables: the tables have different dtypes or widths")
        self._at = _addresses(self._arrays)
        self._sizes = np.array([len(each) for each in self._arrays], np.int64)
        self._row_bytes = self.dtype.itemsize * int(np.prod(self._shape, dtype=np.int64))

    def read(self, rows: Int64s, tables: Int64s) -> np.ndarray:
        """Return the entries of rows of tables, and zeros for the row -1: int64 [n], int64 [n] -> [n] or [n, D].

        Raises:
            ValueError: if a row or a number of a table is out of range: the loop reads memory by them.
        """
        _check_tables(tables, rows.shape, self._sizes.size)
        found = np.zeros((rows.size, *self._shape), self.dtype)
        if is_installed():
            rows = np.ascontiguousarray(rows)
            if not _copy(rows, tables, self._at, self._sizes, self._row_bytes, _address(found)):
                raise ValueError("tables of keys: a row or a number of a table is out of range")
            return found
        if bool((rows >= self._sizes[tables]).any()):
            raise ValueError("tables of keys: a row is out of range")
        for table, places in _by_table(tables):
            places = places[rows[places] >= 0]
            found[places] = self._arrays[table][rows[places]]
        return found


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _addresses(arrays: Sequence[np.ndarray]) -> Int64s:
    return np.array([_address(each) for each in arrays], np.int64)


def _check_tables(tables: Int64s, shape: tuple[int, ...], count: int) -> None:
    if tables.shape != shape or tables.dtype != np.int64 or not tables.flags.c_contiguous:
        raise ValueError(f"tables of keys: {tables.dtype} {tables.shape}; expected int64 {shape}")
    if is_installed():
        return  # the loops look at the numbers of the tables themselves
    if tables.size and not 0 <= int(tables.min()) <= int(tables.max()) < count:
        raise _out_of_range(count)


def _out_of_range(count: int) -> ValueError:
    return ValueError(f"tables of keys: a number is out of range; expected 0 to {count - 1}")


def _by_table(tables: Int64s) -> list[tuple[int, Int64s]]:
    """Return the places of each table that occurs."""
    return [(table, np.flatnonzero(tables == table)) for table in np.unique(tables).tolist()]


def _plain_find(keys: Int64s, table: TableKeys) -> Int64s:
    """Search the keys of one table in operations of numpy."""
    buckets = (_hashes(np.ascontiguousarray(keys)) >> np.uint64(table.shift)).astype(np.int64)
    places, stops = table.starts[buckets], table.starts[buckets + 1]
    found = np.full(keys.size, -1, np.int64)
    left = np.flatnonzero(places < stops)
    while left.size:
        is_there = table.keys[places[left]] == keys[left]
        found[left[is_there]] = table.rows[places[left[is_there]]]
        left = left[~is_there]
        places[left] += 1
        left = left[places[left] < stops[left]]
    return found


def _hashes(keys: Int64s) -> npt.NDArray[np.uint64]:
    """Return the hash of each key; different keys have different hashes."""
    mixed = keys.view(np.uint64) * _ODD
    mixed ^= mixed >> np.uint64(32)
    return mixed * _OTHER_ODD


@loop
def _find(
    keys: np.ndarray,
    tables: np.ndarray,
    key_at: np.ndarray,
    row_at: np.ndarray,
    start_at: np.ndarray,
    shifts: np.ndarray,
    found: np.ndarray,
) -> bool:
    """Return False, and search nothing more, if a number of a table is out of range."""
    starts, stops = np.empty(keys.size, np.int64), np.empty(keys.size, np.int64)
    for i in range(keys.size):
        table = tables[i]
        if table < 0 or table >= shifts.size:
            return False
        mixed = np.uint64(keys[i]) * _ODD
        mixed ^= mixed >> np.uint64(32)
        bucket = np.int64((mixed * _OTHER_ODD) >> shifts[table])
        starts[i], stops[i] = number_at(start_at[table], bucket), number_at(start_at[table], bucket + 1)
        prefetch_at(key_at[table] + 8 * starts[i])
        prefetch_at(row_at[table] + 8 * starts[i])
    for i in range(keys.size):
        held = key_at[tables[i]]
        for place in range(starts[i], stops[i]):
            if number_at(held, place) == keys[i]:
                found[i] = number_at(row_at[tables[i]], place)
                break
    return True


@loop
def _copy(
    rows: np.ndarray,
    tables: np.ndarray,
    column_at: np.ndarray,
    sizes: np.ndarray,
    row_bytes: int,
    target: int,
) -> bool:
    """Return False, and copy nothing, if a row or a number of a table is out of range."""
    for i in range(rows.size):
        if tables[i] < 0 or tables[i] >= sizes.size or rows[i] >= sizes[tables[i]]:
            return False
        if rows[i] >= 0:
            prefetch_at(column_at[tables[i]] + rows[i] * row_bytes)
    for i in range(rows.size):
        if rows[i] >= 0:
            copy_bytes(target + i * row_bytes, column_at[tables[i]] + rows[i] * row_bytes, row_bytes)
    return True
