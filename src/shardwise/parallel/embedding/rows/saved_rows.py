"""SavedRows: reads rows out of a collection's placed tables and loads rows into them, for checkpoints and copies.

Rows are read with their optimizer state, scores, and the keys that wait for admission. They are loaded from any pieces
that cover a table, after ``load_progress``; a rank takes what its placement gives it.

A save reads the rows when they are written, a part at a time, from a snapshot (kernels/tables/row_snapshot.py). A rank
writes the buckets that it holds, so nothing is copied and exchanged at once, and steps may go on. Rows of tables with
tiers are read from memory and disk (tiered_snapshot.py). Rows that a snapshot cannot give, and those of a save between
a forward pass and its step, are copied.

Cost: saved.py, kernels/tables/row_snapshot.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.exchange import gather
from shardwise.parallel.embedding.layout import TablePlacement, dynamic_bucket, static_bucket, writer_of
from shardwise.parallel.embedding.placed import PlacedGroup, PlacedTables
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.parallel.embedding.rows.row_contents import RowContents
from shardwise.parallel.embedding.saved import (
    KEY,
    PAIR,
    SCORE,
    SavedRowRange,
    StreamedRows,
    static_counts,
    static_keys_at,
    stretch_to_write,
    written_buckets,
)


class SavedRows:
    """Rows of a collection's placed tables in the form that checkpoints use.

    Args:
        placed: the placed tables.
    """

    def __init__(self, placed: PlacedTables):
        self._placed = placed

    def place_of(self, table: str) -> tuple[TablePlacement, Group]:
        """Return the placement of a table and the ranks that hold it."""
        part, place = self._placed.find(table)
        return part.tables.places[place], self._placed.group

    def state_names(self, table: str) -> list[str]:
        """Return the names of the optimizer state that a row of a table has beside its weights."""
        return RowContents(self._placed.find(table)[0].store).state_names()

    def most_rows(self, table: str) -> int | None:
        """Return how many rows a dynamic table may hold; None if nothing limits them, or if the table is static."""
        part, place = self._placed.find(table)
        return RowContents(part.store).most_rows(place)

    def buckets(self, table: str, keys: Tensor) -> Tensor:
        """Return the logical bucket of each key of a table, 0 to ``layout.BUCKETS`` - 1.

        The bucket of a key is the same on any number of ranks.
        """
        part, _ = self._placed.find(table)
        return dynamic_bucket(keys) if part.tables.is_dynamic else static_bucket(keys)

    # Out ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rows_here(self, table: str) -> KeyedRows:
        """Return the rows of a table that this rank holds, ordered by (bucket, key)."""
        part, place = self._placed.find(table)
        return RowContents(part.store).rows_here(place)

    def begin_save(self) -> None:
        """Wait until the save before, if any, has ended. Call this method before ``rows_to_stream``."""
        for part in self._placed.parts:
            RowContents(part.store).wait_for_save()

    @torch.no_grad()
    def rows_to_write(
        self, table: str, since: int | None = None, weights_only: bool = False
    ) -> tuple[SavedRowRange, SavedRowRange | None]:
        """Return what this rank writes of a table into a checkpoint, in the state after the last step. Collective.

        Args:
            table: name of the table.
            since: number of steps after which a row must have changed to be returned; None returns all rows.
            weights_only: True leaves out the optimizer state.

        Returns:
            The rows, and the keys that wait for admission; the second is None if the table does not count waiting keys.
        """
        part, place = self._placed.find(table)
        group, where = self._placed.group, part.tables.places[place]
        is_copy = where.placement == "data_parallel" and group.size > 1
        here = (group.index, group.size) if is_copy else None
        rows = RowContents(part.store).rows_here(
            place, here, of_last_step=True, since=since, weights_only=weights_only
        )
        width, what = part.tables.width, f"table {table}"
        stretch = stretch_to_write(rows, self.buckets(table, rows.keys), where, width, group, what)
        if rows.candidates is None:
            return stretch, None
        keys, scores = rows.candidates.unbind(1)
        buckets = self.buckets(table, keys)
        order = buckets.argsort(stable=True)  # by (bucket, key), since candidates are ordered by key
        if where.placement in ("data_parallel", "column"):  # every rank has all of the keys
            order = order[writer_of(buckets[order], group.size) == group.index]
            where = TablePlacement("data_parallel")
        empty = torch.empty(order.numel(), 0, dtype=self._placed.dtype)
        waiting = KeyedRows(keys[order], empty, scores=scores[order])
        return stretch, stretch_to_write(waiting, buckets[order], where, 0, group, what)

    @torch.no_grad()
    def rows_to_stream(self, table: str) -> tuple[StreamedRows, StreamedRows | None] | None:
        """Return what this rank writes of a table, to be read while steps go on; None if its rows must be copied.

        Collective; the ranks decide alike. Call ``begin_save`` before, and ``close`` when the rows are written.
        """
        part, place = self._placed.find(table)
        counts, waiting = self._counts(part, place)
        return None if counts is None else self._streamed(part, place, counts, waiting)

    def close(self) -> None:
        """Let go of the rows that ``rows_to_stream`` has returned, when they are written."""
        for part in self._placed.parts:
            RowContents(part.store).end_save()

    def _counts(self, part: PlacedGroup, place: int) -> tuple[Tensor | None, Tensor | None]:
        """Return rows, and waiting keys, of each bucket over all ranks if a save streams a table; else (None, None).

        All ranks return the same.
        """
        store, group, table = part.store, self._placed.group, part.tables.tables[place]
        if not RowContents(store).streams:
            return None, None
        if table.dynamic is None:
            return static_counts(table.rows or 0), None
        rows, waiting = store.dynamic[place].bucket_counts
        is_open = any(each.is_open for each in store.dynamic)
        here = torch.cat([rows, waiting, torch.tensor([int(is_open)])])
        found = gather(here[None], [1] * group.size, group, f"buckets of table {table.name}", "control")
        is_copy = part.tables.places[place].placement == "data_parallel"
        rows, waiting = (found[0] if is_copy else found.sum(0))[:-1].view(2, -1)
        if bool(found[:, -1].any()):
            return None, None
        return rows, waiting if table.dynamic.admission.type == "frequency" else None

    def _streamed(
        self, part: PlacedGroup, place: int, counts: Tensor, waiting: Tensor | None
    ) -> tuple[StreamedRows, StreamedRows | None]:
        """Return what this rank reads and writes later of a table with these numbers of rows and of waiting keys."""
        store, group, where = part.store, self._placed.group, part.tables.places[place]
        snapshot, positions = RowContents(store).snapshot(), store.lines.positions
        mine = written_buckets(where.placement, group.index, group.size, where.owner)
        dtypes = [each.dtype for each in store.lines.tensors]
        columns = {kind: (at.stop - at.start, dtypes[at.memory]) for kind, at in positions.items()}

        def numbers(kind: str, rows: Tensor) -> Tensor:
            at = positions[kind]
            return snapshot.read(rows)[at.memory][:, at.start : at.stop]

        def rows_in(ranges: list[tuple[int, int]]) -> Tensor:
            return store.slab_rows(place, static_keys_at(counts, ranges))

        if not store.dynamic:
            return StreamedRows(counts, mine, columns, numbers, rows_in), None
        index, pairs, base = snapshot.indexes[place], snapshot.waiting[place], store.dynamic[place].base

        def read(kind: str, rows: Tensor) -> Tensor:
            if kind == KEY:
                return index.keys_of(rows)[:, None]
            return index.scores_of(rows)[:, None] if kind == SCORE else numbers(kind, rows + base)

        columns |= {KEY: (1, torch.int64), SCORE: (1, torch.int64)}
        found = StreamedRows(counts, mine, columns, read, index)
        if pairs is None or waiting is None:
            return found, None

        def waited(kind: str, rows: Tensor) -> Tensor:
            return torch.stack(pairs.read(rows), 1)

        return found, StreamedRows(waiting, mine, {PAIR: (2, torch.int64)}, waited, pairs)

    def keys_to_write(self, table: str) -> SavedRowRange:
        """Return the keys and scores of a dynamic table that this rank writes, without weights. Collective."""
        part, place = self._placed.find(table)
        group, where = self._placed.group, part.tables.places[place]
        keys = RowContents(part.store).keys_here(place)
        buckets = self.buckets(table, keys.keys)
        if where.placement in ("data_parallel", "column"):  # every rank has all of the keys
            mine = writer_of(buckets, group.size) == group.index
            assert keys.scores is not None, "rows of a dynamic table have scores"
            keys = KeyedRows(keys.keys[mine], keys.weights[mine], scores=keys.scores[mine])
            buckets, where = buckets[mine], TablePlacement("data_parallel")
        return stretch_to_write(keys, buckets, where, 0, group, f"table {table}")

    def rows_counted(self, table: str) -> int:
        """Return the rows of a table that count on this rank; the sum over the ranks is the whole table."""
        part, place = self._placed.find(table)
        return RowContents(part.store).rows_counted(place)

    def gone_here(self, table: str) -> Tensor:
        """Return the keys of a table whose rows went since ``forget_gone``; each key on one rank."""
        part, place = self._placed.find(table)
        return RowContents(part.store).gone(place)

    def forget_gone(self) -> None:
        """Forget the keys whose rows went so far, because an export has written them."""
        for part in self._placed.parts:
            RowContents(part.store).forget_gone()

    def progress(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint needs beside rows: steps done and their factors of the learning rate.

        They are the same on all ranks. Exact Adam replays steps with their learning rates. For other optimizers the
        number of steps is enough, and the factors are left out.
        """
        return {"steps": self._placed.steps, "lr_factors": list(self._placed.lr_factors)}

    # In ----------------------------------------------------------------------------------------------------------

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Continue from the steps that ``progress`` returned. Call this method before rows are loaded."""
        placed = self._placed
        placed.steps = int(progress["steps"])
        placed.lr_factors = [float(factor) for factor in progress["lr_factors"]]
        for part in placed.parts:
            part.store.resume(placed.steps, placed.lr_factors)

    @torch.no_grad()
    def load_rows(self, table: str, rows: KeyedRows) -> None:
        """Load the rows of a table that this rank holds; a dynamic table inserts the keys that it lacks."""
        part, place = self._placed.find(table)
        RowContents(part.store).load_rows(place, rows)

    @torch.no_grad()
    def load_candidates(self, table: str, candidates: Tensor) -> None:
        """Load keys that wait for admission and their scores: int64 [m, 2]."""
        part, place = self._placed.find(table)
        RowContents(part.store).load_candidates(place, candidates)

    @torch.no_grad()
    def restart(self, table: str) -> None:
        """Reset a table to its start rows; a dynamic table becomes empty."""
        part, place = self._placed.find(table)
        RowContents(part.store).restart(place)

    @torch.no_grad()
    def clear(self) -> None:
        """Remove the keys of dynamic tables and discard waiting gradients, before other rows are loaded."""
        self._placed.drop()
        for part in self._placed.parts:
            RowContents(part.store).clear()
