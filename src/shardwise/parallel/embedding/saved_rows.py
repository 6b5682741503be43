"""SavedRows: the rows of a collection's placed tables as they leave and come back, for checkpoints and copies.

Rows go out with their optimizer state, scores, and the keys that wait for admission. They are loaded from any pieces
that cover a table, after ``load_progress``; a rank takes what its placement gives it.

Cost: saved.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.parallel.embedding.layout import Place, dynamic_bucket, static_bucket, writer_of
from shardwise.parallel.embedding.placed import PlacedTables
from shardwise.parallel.embedding.rows import Rows
from shardwise.parallel.embedding.saved import Stretch, stretch_to_write


class SavedRows:
    """See the module's docstring."""

    def __init__(self, placed: PlacedTables):
        self._placed = placed

    def place_of(self, table: str) -> tuple[Place, Group]:
        """Where a table lies, and over which ranks."""
        part, place = self._placed.find(table)
        return part.tables.places[place], self._placed.group

    def state_names(self, table: str) -> list[str]:
        """Optimizer state that a row of a table has beside its weights."""
        return self._placed.find(table)[0].store.state_names()

    def most_rows(self, table: str) -> int | None:
        """Return how many rows a dynamic table may hold; None if nothing limits them, or it is not dynamic."""
        part, place = self._placed.find(table)
        return part.store.most_rows(place)

    def buckets(self, table: str, keys: Tensor) -> Tensor:
        """Logical bucket of each key of a table, 0 to ``layout.BUCKETS`` - 1: the same on any number of ranks."""
        part, _ = self._placed.find(table)
        return dynamic_bucket(keys) if part.tables.is_dynamic else static_bucket(keys)

    # Out ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rows_here(self, table: str) -> Rows:
        """What this rank holds of a table: keys, weights, optimizer state, scores; ordered by (bucket, key)."""
        part, place = self._placed.find(table)
        return part.store.rows_here(place)

    @torch.no_grad()
    def rows_to_write(self, table: str) -> tuple[Stretch, Stretch | None]:
        """Return what this rank writes of a table into a checkpoint, and of its keys that wait for admission, as the
        last step left them. Collective."""
        part, place = self._placed.find(table)
        group, where = self._placed.group, part.tables.places[place]
        is_copy = where.placement == "data_parallel" and group.size > 1
        rows = part.store.rows_here(place, (group.index, group.size) if is_copy else None, of_last_step=True)
        width, what = part.tables.width, f"table {table}"
        stretch = stretch_to_write(rows, self.buckets(table, rows.keys), where, width, group, what)
        if rows.candidates is None:
            return stretch, None
        keys, scores = rows.candidates.unbind(1)
        buckets = self.buckets(table, keys)
        order = buckets.argsort(stable=True)  # they come by key
        if where.placement in ("data_parallel", "column"):  # every rank has all of them
            order = order[writer_of(buckets[order], group.size) == group.index]
            where = Place("data_parallel")
        empty = torch.empty(order.numel(), 0, dtype=self._placed.dtype)
        waiting = Rows(keys[order], empty, scores=scores[order])
        return stretch, stretch_to_write(waiting, buckets[order], where, 0, group, what)

    def progress(self) -> dict[str, Any]:
        """What is no row and must be saved: the steps done and their factors of the learning rate; alike on all ranks.

        Exact Adam replays steps by their rates. Of other optimizers the number of steps is enough, and the factors are
        left out.
        """
        return {"steps": self._placed.steps, "lr_factors": list(self._placed.lr_factors)}

    # In ----------------------------------------------------------------------------------------------------------

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on from there: before rows are loaded."""
        placed = self._placed
        placed.steps = int(progress["steps"])
        placed.lr_factors = [float(factor) for factor in progress["lr_factors"]]
        for part in placed.parts:
            part.store.resume(placed.steps, placed.lr_factors)

    @torch.no_grad()
    def load_rows(self, table: str, rows: Rows) -> None:
        """Take from ``rows`` what this rank holds of the table; a dynamic one gets a row for each key it lacks."""
        part, place = self._placed.find(table)
        part.store.load_rows(place, rows)

    @torch.no_grad()
    def load_candidates(self, table: str, candidates: Tensor) -> None:
        """Keys that wait for admission, and their scores: int64 [m, 2]."""
        part, place = self._placed.find(table)
        part.store.load_candidates(place, candidates)

    @torch.no_grad()
    def restart(self, table: str) -> None:
        """Forget what a table has learnt: start rows, and of a dynamic one no keys."""
        part, place = self._placed.find(table)
        part.store.restart(place)

    @torch.no_grad()
    def clear(self) -> None:
        """Forget the keys of dynamic tables, and gradients that wait: before other rows are loaded."""
        self._placed.drop()
        for part in self._placed.parts:
            part.store.clear()
