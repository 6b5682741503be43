"""Tables in mapped files, and the vectors of keys of several of them.

    key -> row of the file -> codes of the row -> vector             (mapped_rows.py, vector_codes.py)
    key -> row of the changes -> vector, over the one of the file    (increments.py)

Cost:   the first reader of a table sorts the hashes of its keys, 17.5 M bytes beside the map, and a reader those of its
        changes. Then mapped_rows.py, once for the files and once for the changes.
Shapes: M rows of a table, D width, n keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.kernels.tables.mapped_rows import KeySearch, TableColumn, TableKeys
from shardwise.models.increments import RowChanges
from shardwise.models.vector_codes import decoded

Keys = npt.NDArray[np.int64]


class MappedTable(NamedTuple):
    """A table in a file."""

    keys: Keys
    """The key of each row, int64 [M], in any order."""
    codes: np.ndarray
    """The numbers of the vectors as they are stored, [M, D] (vector_codes.py)."""
    scales: np.ndarray | None
    """The factor of each row of int8, [M]; None for other dtypes."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the vectors that are read."""
        scales = None if self.scales is None else self.scales[:0]
        return decoded(self.codes[:0], scales).dtype

    def vectors(self) -> np.ndarray:
        """Return the vectors of all rows, [M, D]."""
        return decoded(self.codes[:], self.scales)


class TableReader:
    """A reader of several tables of one width at one step.

    Args:
        tables: The tables in their files, of one dtype.
        keys: The keys of each table.
        changes: What increments changed in each table; None for a table without changes.
    """

    def __init__(
        self,
        tables: Sequence[MappedTable],
        keys: Sequence[TableKeys],
        changes: Sequence[RowChanges | None],
    ) -> None:
        self._keys = KeySearch(keys)
        self._codes = TableColumn([each.codes for each in tables])
        scales = [each.scales for each in tables if each.scales is not None]
        self._scales = TableColumn(scales) if scales else None
        self._changes = _ChangedRows(changes, tables) if any(each is not None for each in changes) else None

    def read(self, keys: Keys, tables: Keys) -> tuple[np.ndarray, npt.NDArray[np.bool_]]:
        """Return the vectors of keys, zeros for a key without a row, and which keys have a row.

        Args:
            keys: int64 [n].
            tables: The number of each key's table, int64 [n].

        Returns:
            Vectors [n, D] and a mask, bool [n].
        """
        rows = self._keys.rows_of(keys, tables)
        scales = None if self._scales is None else self._scales.read(rows, tables)
        vectors, found = decoded(self._codes.read(rows, tables), scales), rows >= 0
        if self._changes is not None:
            self._changes.write_over(keys, tables, vectors, found)
        return vectors, found


class _ChangedRows:
    """The rows of several tables that increments changed."""

    def __init__(self, changes: Sequence[RowChanges | None], tables: Sequence[MappedTable]) -> None:
        keys = [np.empty(0, np.int64) if each is None else each.keys for each in changes]
        self._keys = KeySearch([TableKeys(each) for each in keys])
        vectors = [
            np.empty((0, held.codes.shape[1]), held.dtype) if each is None else each.vectors
            for each, held in zip(changes, tables, strict=True)
        ]
        self._vectors = TableColumn(vectors)
        self._is_here = TableColumn([np.empty(0, bool) if each is None else each.is_here for each in changes])

    def write_over(self, keys: Keys, tables: Keys, vectors: np.ndarray, found: npt.NDArray[np.bool_]) -> None:
        """Write the changed vectors over those of the files, and mark which keys have a row."""
        rows = self._keys.rows_of(keys, tables)
        changed = np.flatnonzero(rows >= 0)
        if changed.size:
            rows, tables = rows[changed], tables[changed]
            vectors[changed] = self._vectors.read(rows, tables)
            found[changed] = self._is_here.read(rows, tables)
