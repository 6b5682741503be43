"""Search of keys in several tables at once, and copies of their rows from memory that is mapped.

    table t       keys K_t [M_t], rising, and the row of each key, R_t [M_t]
    (key, t)      p = first place with K_t[p] >= key;    row = R_t[p] if K_t[p] = key, else -1
    column C      C_t[row], or zeros for the row -1

A request of a server asks each of many tables for a few keys. A call of numpy for each table takes longer than the
search itself, so one loop reads all tables by their addresses. Without numba each table is searched by numpy, with the
same result.

Cost:   a binary search for each key, and a copy for each row.
Shapes: n keys of one call, M_t rows of table t.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwise.kernels.tables.compiled import copy_bytes, is_installed, loop, number_at

Int64s = npt.NDArray[np.int64]


class SortedKeys:
    """The keys of several tables.

    Args:
        keys: int64 [M_t] of each table, rising.
        rows: The row of each key, int64 [M_t] of each table.
    """

    def __init__(self, keys: Sequence[Int64s], rows: Sequence[Int64s]) -> None:
        self._keys = [np.ascontiguousarray(each, np.int64) for each in keys]
        self._rows = [np.ascontiguousarray(each, np.int64) for each in rows]
        if [each.shape for each in self._keys] != [each.shape for each in self._rows]:
            raise ValueError("sorted keys: a table has another number of rows than keys")
        self._key_at, self._row_at = _addresses(self._keys), _addresses(self._rows)
        self._sizes = np.array([each.size for each in self._keys], np.int64)

    def rows_of(self, keys: Int64s, tables: Int64s) -> Int64s:
        """Return the row of each key, or -1.

        Args:
            keys: int64 [n].
            tables: The number of each key's table, int64 [n].

        Raises:
            ValueError: if a number of a table is out of range: the loop reads memory by it.
        """
        _check_tables(tables, keys.shape, self._sizes.size)
        found = np.full(keys.size, -1, np.int64)
        if is_installed():
            _find(np.ascontiguousarray(keys), tables, self._key_at, self._row_at, self._sizes, found)
            return found
        for table, places in _by_table(tables):
            held = self._keys[table]
            if held.size:
                at = np.minimum(np.searchsorted(held, keys[places]), held.size - 1)
                found[places] = np.where(held[at] == keys[places], self._rows[table][at], -1)
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
        if bool((rows >= self._sizes[tables]).any()):
            raise ValueError("a column of tables: a row is out of range")
        found = np.zeros((rows.size, *self._shape), self.dtype)
        if is_installed():
            _copy(np.ascontiguousarray(rows), tables, self._at, self._row_bytes, _address(found))
            return found
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
    if tables.size and not 0 <= int(tables.min()) <= int(tables.max()) < count:
        raise ValueError(f"tables of keys: a number is out of range; expected 0 to {count - 1}")


def _by_table(tables: Int64s) -> list[tuple[int, Int64s]]:
    """Return the places of each table that occurs."""
    return [(table, np.flatnonzero(tables == table)) for table in np.unique(tables).tolist()]


@loop
def _find(
    keys: np.ndarray,
    tables: np.ndarray,
    key_at: np.ndarray,
    row_at: np.ndarray,
    sizes: np.ndarray,
    found: np.ndarray,
) -> None:
    for i in range(keys.size):
        key, table = keys[i], tables[i]
        held = key_at[table]
        first, left = 0, sizes[table]
        while left > 1:  # K[first] <= key, if any key is
            half = left // 2
            if number_at(held, first + half) <= key:
                first += half
            left -= half
        if left == 1 and number_at(held, first) == key:
            found[i] = number_at(row_at[table], first)


@loop
def _copy(rows: np.ndarray, tables: np.ndarray, column_at: np.ndarray, row_bytes: int, target: int) -> None:
    for i in range(rows.size):
        if rows[i] >= 0:
            copy_bytes(target + i * row_bytes, column_at[tables[i]] + rows[i] * row_bytes, row_bytes)
