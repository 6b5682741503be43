"""RowGradients: gradients of rows of one store, until the step that uses them.

Gradients are kept in the order in which they came and merged to one for each row: the same bits in every run. Rows are
on the host, because only the host counts the distinct ones; gradients are on the device of the slab.

Shapes: U rows of one call, w columns.
"""

import torch
from torch import Tensor

from shardwise.kernels.tables.pooling import merge
from shardwise.kernels.tables.unique import UniqueScratch, unique
from shardwise.parallel.embedding.transfer import SlabRows, together


class RowGradients:
    """Gradients of the rows of one store, until the step that uses them.

    Args:
        columns: columns of a row on this rank, w.
        may_lack: True if some rows may be -1: keys that were not admitted, whose gradients are dropped.
        is_distinct: True if the rows of one call are distinct, because no other rank sends keys.
    """

    def __init__(self, columns: int, may_lack: bool, is_distinct: bool):
        self._columns = columns
        self._may_lack = may_lack
        self._is_distinct = is_distinct
        self._scratch = UniqueScratch()
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._merged: tuple[SlabRows, Tensor] | None = None

    def add(self, rows: Tensor, grads: Tensor) -> None:
        """Keep the gradients [U, w] of rows [U]."""
        self._merged = None
        self._waiting.append((rows, grads))

    def clear(self) -> None:
        """Discard all gradients."""
        self._waiting.clear()
        self._merged = None

    def merged(self, like: Tensor) -> tuple[SlabRows, Tensor]:
        """Return one gradient for each row, in the order in which the rows first came, on the device of ``like``."""
        if not self._waiting:
            here, there = (torch.empty(0, dtype=torch.int64, device=at) for at in ("cpu", like.device))
            return SlabRows(here, there), like.new_empty(0, self._columns)
        if self._merged is None:
            rows, grads = self._waiting[0]
            if len(self._waiting) > 1:
                rows = torch.cat([rows for rows, _ in self._waiting])
                grads = torch.cat([grads for _, grads in self._waiting])
            if self._may_lack:
                present = rows >= 0
                if not bool(present.all()):
                    rows, grads = rows[present], grads[present]
            if len(self._waiting) > 1 or not self._is_distinct:
                distinct = unique(rows, self._scratch)
                there, places = together(distinct, like.device)
                grads = merge(grads, places, None, there.numel())
                rows = distinct.keys
            else:
                (there,) = together([rows], like.device)
            self._merged = SlabRows(rows, there), grads
        return self._merged
