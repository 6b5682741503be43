"""RowMarks: the step in which each row of a store last changed, for increments of checkpoints and of vectors.

    a row changed after step s   if  mark > s
    of an exact Adam             or  0 < mark and mark + horizon > s     steps without a gradient still move the row
                                 or  weights decay                       every step moves every row

Scores of dynamic tables do not say what changed: ``none`` keeps the step of the first use, and ``lfu`` a count. A row
is marked in the step that updates it, so that discarded steps leave no mark. Rows that are loaded between two steps
belong to the next one. Marks are kept by row number, and a new key overwrites the mark of the row that it gets. Keys
whose rows were evicted are in ``EvictedKeys``.

Cost:   4 bytes of host memory for each row, one write for each row of a step, one look at each row of a save.
Shapes: U rows of one call.
"""

import torch
from torch import Tensor

from shardwise.kernels.tables.row_rules import Adam, RowOptimizer
from shardwise.kernels.tables.slab import reserve

MARK_BYTES = torch.int32.itemsize
"""Bytes of the mark of one row."""


class RowMarks:
    """The step in which each row of one store last changed.

    Args:
        rows: number of rows of the store; memory is taken as rows are marked.
        optimizer: the optimizer of the rows.
    """

    def __init__(self, rows: int, optimizer: RowOptimizer) -> None:
        self._steps = reserve(rows, 1, torch.int32)[:, 0]
        self._optimizer = optimizer

    def touch(self, rows: Tensor, step: int) -> None:
        """Mark rows as changed in a step; ``rows`` is on the host."""
        self._steps[rows] = step

    def changed(self, rows: Tensor, since: int) -> Tensor:
        """Return whether each row changed after a step: int64 [U] -> bool [U].

        Args:
            rows: the rows, on the host.
            since: the step after which changes count.
        """
        marks = self._steps[rows]
        optimizer = self._optimizer
        if not isinstance(optimizer, Adam) or not optimizer.exact:
            return marks > since
        if optimizer.weight_decay:
            return torch.ones_like(marks, dtype=torch.bool)
        return marks > 0 if optimizer.horizon is None else (marks > 0) & (marks + optimizer.horizon > since)
