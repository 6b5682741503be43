"""Index of rows on disk: the position of each row's newest record, in an array by row.

Row numbers are dense from the first row of each table on, so an array of 4 bytes a row takes less than a hash table
would, needs no rebuilding, and a look-up is one read. Address space for all rows is reserved at once and memory comes
with the first row of each 2 MiB (``kernels/tables/slab.py``), so the index grows without a pause.

Cost:  4 bytes a row, counted in pieces of 2 MiB.
Shapes: n rows of one call.
"""

import numpy as np
import numpy.typing as npt
import torch

from shardwise.kernels.tables.records import Numbers
from shardwise.kernels.tables.slab import reserve

__all__ = ["RowPositions"]

_PIECE_BYTES = 2**21
_PIECE_ROWS = _PIECE_BYTES // 4


class RowPositions:
    """Positions of rows.

    Args:
        rows: Number of rows that there may be, from 0 on.
    """

    def __init__(self, rows: int) -> None:
        """Begin without positions."""
        self.rows = rows
        # 0 says that a row has no record, and a position is held as one more.
        self._held = reserve(rows, 1, torch.int32).view(-1).numpy().view(np.uint32)
        self._pieces = np.zeros(-(-rows // _PIECE_ROWS), np.bool_)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows have touched."""
        return int(self._pieces.sum()) * min(_PIECE_BYTES, self._held.nbytes) + self._pieces.nbytes

    @staticmethod
    def bytes_for(rows: int, is_part: bool = False) -> int:
        """Return the bytes of memory of the positions of rows from 0 on, of which all have been written.

        Args:
            rows: Number of rows.
            is_part: True if there are addresses for more rows behind them.
        """
        whole = 4 * rows
        return -(-whole // _PIECE_BYTES) * _PIECE_BYTES if is_part else whole

    def find(self, rows: Numbers) -> Numbers:
        """Return the position of each row, -1 for rows without a record: int64 [n] -> [n]."""
        return self._held[rows].astype(np.int64) - 1

    def refers(self, rows: Numbers, positions: Numbers) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that have these positions; rows may be any numbers: [n], [n] -> [n]."""
        known = (rows >= 0) & (rows < self.rows)
        known[known] = self.find(rows[known]) == positions[known]
        return known

    def put(self, rows: Numbers, positions: Numbers) -> Numbers:
        """Give rows, each named once, new positions.

        Args:
            rows: Rows: [n].
            positions: Positions, -1 for no record: [n].

        Returns:
            The positions that the rows had, -1 for none: [n].
        """
        before = self.find(rows)
        self._held[rows] = positions + 1
        self._count += int((positions >= 0).sum()) - int((before >= 0).sum())
        self._pieces[rows // _PIECE_ROWS] = True
        return before

    def all_rows(self) -> Numbers:
        """Return all rows that have a record, by row, from the touched memory."""
        found = [np.empty(0, np.int64)]
        for piece in np.flatnonzero(self._pieces):
            begin = int(piece) * _PIECE_ROWS
            found.append(np.flatnonzero(self._held[begin : begin + _PIECE_ROWS]) + begin)
        return np.concatenate(found)
