"""Memory of a table that grows without moving: address space is reserved at once, pages when rows are first written.

A table that doubles by copying holds three times its size for a moment and stops the step for as long as the copy
takes. Here the whole table is mapped with all the rows that it may ever have; the system provides zeroed pages on the
first write, and an untouched row costs nothing. Large pages are requested: with 4 KiB pages nearly every row of a large
table misses the address cache of the processor too.

Shapes: [rows, columns], columns = width + those of the row optimizer.
"""

import mmap

import torch
from torch import Tensor

_NEVER_COUNTED = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag for address space that is not charged as memory before the first write."""


_LARGE_PAGE_BYTES = 1 << 21


def reserve(rows: int, columns: int, dtype: torch.dtype = torch.float32, small_first: bool = False) -> Tensor:
    """Return zeros [rows, columns] that take memory when they are written.

    Args:
        rows: number of rows for which addresses are reserved.
        columns: numbers of a row.
        dtype: dtype of the numbers.
        small_first: True requests no large page for the first 2 MiB, so that few rows take little memory.

    Raises:
        ValueError: if a size is out of range.
        MemoryError: if there is no address space.
    """
    if rows < 0 or columns < 1:
        raise ValueError(f"a slab of {rows} rows by {columns} columns; expected at least 0 by 1")
    elements = rows * columns
    if elements == 0:
        return torch.zeros(rows, columns, dtype=dtype)
    anonymous = getattr(mmap, "MAP_ANONYMOUS", None)
    if anonymous is None:
        return torch.zeros(rows, columns, dtype=dtype)
    size_bytes = elements * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | anonymous | _NEVER_COUNTED)
    except OSError as error:
        raise MemoryError(
            f"no address space for a table of {rows} rows by {columns} columns, {size_bytes / 2**30:.1f} GiB "
            f"({error}); give tables that grow a limit (dynamic.capacity or budget_bytes), or raise the process's "
            "(ulimit -v)"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        first = _LARGE_PAGE_BYTES if small_first else 0
        if size_bytes > first:
            pages.madvise(mmap.MADV_HUGEPAGE, first, size_bytes - first)
    return torch.frombuffer(pages, dtype=dtype, count=elements).view(rows, columns)


def check_rows(slab: Tensor, rows: Tensor) -> None:
    """Check that int64 rows [U] on the CPU exist in the slab [R, columns].

    Rows on an accelerator are not checked: reading them would make the host wait, and they come from keys that were
    checked before.

    Raises:
        IndexError: if a row is outside the slab.
    """
    if len(rows) and rows.device.type == "cpu":
        low, high = rows.aminmax()
        if low < 0 or high >= len(slab):
            raise IndexError(f"rows {int(low)} to {int(high)} of a slab with {len(slab)}")
