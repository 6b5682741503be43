"""StartLines: the lines with which rows of one group of tables begin, start weights and optimizer state.

    weights    uniform in [-bound, bound], functions of (seed, table, key, column) alone    kernels/tables/start_rows.py
    state      that of the optimizer after the steps done when the row is drawn

A static table with tiers stores no start rows: a row that was never changed is drawn when it is needed, with the bits
that it would have had when the table began.

Shapes: n rows of one call, w columns of the table that are on this rank.
"""

import torch
from torch import Tensor

from shardwise.kernels import philox
from shardwise.kernels.initializers import Uniform
from shardwise.kernels.tables.start_rows import start_rows
from shardwise.parallel.embedding.group import TableGroup
from shardwise.parallel.embedding.rows.row_lines import RowLines
from shardwise.parallel.embedding.rules import optimizer_of
from shardwise.tiers.cache_snapshot import LineMemory


class StartLines:
    """The lines with which rows of one group of tables begin.

    Args:
        tables: the group of tables.
        index: index of this rank among those that hold the tables.
        seed: seed of the start rows.
        dtype: dtype of updates.
    """

    def __init__(self, tables: TableGroup, index: int, seed: int, dtype: torch.dtype) -> None:
        self._tables, self._index, self._seed, self._dtype = tables, index, seed, dtype
        self._columns = tables.columns(index)
        self._optimizer = optimizer_of(tables.optimizer)
        self._drawn_at = [0] * len(tables.tables)
        """Number of steps after which each static table was drawn."""

    def key(self, table: str) -> int:
        """Return the key of the random numbers of a table's start rows."""
        return philox.key_of(self._seed, f"table {table}")

    def restart(self, place: int, steps: int) -> None:
        """Draw the rows of a static table as they begin after ``steps`` steps, from now on."""
        self._drawn_at[place] = steps

    def draw(self, memory: LineMemory, places: Tensor, rows: Tensor) -> None:
        """Write the start lines of rows of static tables to places of ``memory``: both int64 [n]."""
        assert isinstance(memory, RowLines), "a cache draws into lines of its store"
        found = self._tables.keys_at(rows, self._index)
        for place in found.places.unique().tolist():
            mine, number = found.places == place, found.tables[place]
            table = self._tables.tables[number]
            lines = self.lines(
                self.key(table.name), found.keys[mine], table.start_bound, self._drawn_at[number]
            )
            memory.write(places[mine], lines)

    def lines(self, key: int, keys: Tensor, bound: float, steps: int) -> Tensor:
        """Return start weights and optimizer state of keys after ``steps`` steps: [n, w + state].

        Args:
            key: key of the random numbers of the table.
            keys: the keys, int64 [n].
            bound: largest start weight; 0 for start weights of 0.
            steps: number of optimizer steps done.
        """
        width = len(self._columns)
        lines = torch.empty(keys.numel(), width + self._optimizer.columns(width), dtype=self._dtype)
        if bound:
            initializer = Uniform(-bound, bound)
            lines[:, :width] = start_rows(
                key, keys, width, initializer, first=self._columns.start, dtype=self._dtype
            )
        else:
            lines[:, :width] = 0
        lines[:, width:] = torch.tensor(self._optimizer.start(width, steps), dtype=self._dtype)
        return lines
