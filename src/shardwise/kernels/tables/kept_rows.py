"""Copies of rows that were made before the rows changed, by row.

``_where`` has the place of a row's copy plus 1, and 0 for a row that was not copied. Its memory is reserved (slab.py),
so a table of any size costs nothing until rows are copied. So is the memory of the copies, and more of them move none.

Cost:   4 bytes for each row in a page of rows of which one was copied, and the copies.
Shapes: n rows of one call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels.tables.slab import reserve


class KeptRows:
    """Copies of rows.

    Args:
        rows: number of rows of which copies may be made.
        dtypes: dtypes of the columns of a row.
        widths: numbers of each column; left out, each column has one number and no dimension of its own.
    """

    def __init__(self, rows: int, dtypes: Sequence[torch.dtype], widths: Sequence[int] | None = None) -> None:
        shapes = [(rows,) if widths is None else (rows, width) for width in widths or [1] * len(dtypes)]
        self._where = reserve(rows, 1, torch.int32, small_first=True).view(-1)
        self._copies = [
            reserve(rows, 1 if widths is None else shape[-1], dtype, small_first=True).view(shape)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self._count * (4 + sum(copies[:1].nbytes for copies in self._copies))

    def lacks(self, rows: Tensor) -> Tensor:
        """Return a mask of the rows that were not copied: int64 [n] -> bool [n]."""
        return self._where[rows] == 0

    def keep(self, rows: Tensor, columns: Sequence[Tensor]) -> None:
        """Add copies of distinct rows that it lacks, one tensor a column."""
        stop = self._count + rows.numel()
        for copies, column in zip(self._copies, columns, strict=True):
            copies[self._count : stop] = column
        self._where[rows] = torch.arange(self._count + 1, stop + 1, dtype=torch.int32)
        self._count = stop

    def put(self, rows: Tensor, columns: Sequence[Tensor]) -> None:
        """Overwrite what was read of ``rows`` by the copies, where there are any."""
        places = self._where[rows]
        kept = places.nonzero()[:, 0]
        if kept.numel():
            source = places[kept].long() - 1
            for copies, column in zip(self._copies, columns, strict=True):
                column[kept] = copies[source]
