"""RowContents: the rows of one store as checkpoints, exports and copies read them, and as loads write them.

    rows_here      keys, weights, optimizer state and scores of a table, ordered by (bucket, key)
    snapshot       the same, read a part at a time while a save writes them     kernels/tables/row_snapshot.py
    load_rows      any rows of a table, of which this rank takes its own

The store (store.py) holds the rows and updates them; nothing here is called in a step.

Cost:   saved.py, kernels/tables/row_snapshot.py, tiered_snapshot.py.
Shapes: n rows of one call, w columns of the table that are on this rank.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.base.errors import MismatchError
from shardwise.kernels.tables.row_replay import StepHistory, catch_up
from shardwise.kernels.tables.row_rules import Adam
from shardwise.kernels.tables.row_snapshot import StoreSnapshot
from shardwise.kernels.tables.unique import unique
from shardwise.parallel.embedding.layout import dynamic_bucket, static_bucket, writer_of
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.parallel.embedding.rows.row_lines import RowLines
from shardwise.parallel.embedding.rows.store import RowStore
from shardwise.parallel.embedding.rows.tiered_snapshot import TieredSnapshot
from shardwise.parallel.embedding.rules import ONE_A_ROW, state_columns

LOADED_ROWS = 1 << 14
"""Number of rows whose lines are made at once by a load."""


class RowContents:
    """The rows of one store, to be read as a whole and loaded.

    Args:
        store: the store.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def most_rows(self, place: int) -> int | None:
        """Return how many rows a table may hold over all ranks; None if that is unlimited or fixed."""
        return self._store.dynamic[place].most_rows if self._store.dynamic else None

    def state_names(self) -> list[str]:
        """Return the names of the optimizer state that a row has beside its weights."""
        return [name for name, _ in state_columns(self._store.optimizer, len(self._store.columns))]

    def rows_here(
        self,
        place: int,
        part: tuple[int, int] | None = None,
        of_last_step: bool = False,
        since: int | None = None,
        weights_only: bool = False,
    ) -> KeyedRows:
        """Return the rows of a table that this rank holds, ordered by (bucket, key).

        Args:
            place: index of the table in the group.
            part: (i, n) returns only rows in the i-th of n parts of the buckets; None returns all rows.
            of_last_step: True leaves out the keys that have come since the last step.
            since: a step after which a row must have changed to be returned; None returns all rows.
            weights_only: True leaves out the optimizer state.
        """
        scores = candidates = None
        if self._store.dynamic:
            table = self._store.dynamic[place]
            keys, rows, scores = table.rows_of_last_step() if of_last_step else table.rows_now()
            candidates = table.candidates_of_last_step() if of_last_step else table.candidates
            rows = rows + table.base
            buckets = dynamic_bucket(keys)
        else:
            keys = self._store.static_keys(place)
            rows = self._store.slab_rows(place, keys)
            buckets = static_bucket(keys)
        order = keys.argsort()
        order = order[buckets[order].argsort(stable=True)]
        if part is not None:
            order = order[writer_of(buckets[order], part[1]) == part[0]]
        if since is not None:
            order = order[self._changed(rows[order], since)]
        keys, rows = keys[order], rows[order]
        weights, state = self._stored(rows, weights_only)
        return KeyedRows(
            keys,
            weights,
            state,
            None if scores is None else scores[order],
            self._store.columns.start,
            candidates,
        )

    def keys_here(self, place: int) -> KeyedRows:
        """Return the keys and scores of a dynamic table as they were after the last step, ordered by (bucket, key)."""
        keys, _, scores = self._store.dynamic[place].rows_of_last_step()
        buckets = dynamic_bucket(keys)
        order = keys.argsort()
        order = order[buckets[order].argsort(stable=True)]
        empty = torch.empty(len(order), 0, dtype=self._store.dtype)
        return KeyedRows(keys[order], empty, scores=scores[order])

    def _stored(self, rows: Tensor, weights_only: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights and optimizer state of distinct rows, up to date, in whatever tier they are."""
        if self._store.tiers is not None:
            return self._store.tiers.stored(rows, self._store.history, weights_only)
        places = rows.to(self._store.device)
        self._store.catch_up(rows, places)
        return self._store.lines.stored(places, weights_only)

    def _changed(self, rows: Tensor, since: int) -> Tensor:
        """Return whether each row changed after step ``since``; ``rows`` is on the host."""
        assert self._store.marks is not None, "increments are refused for tables without marks"
        return self._store.marks.changed(rows, since)

    def rows_counted(self, place: int) -> int:
        """Return the rows of a table after the last step that count on this rank; the ranks' sum is the whole table."""
        if not self._store.is_counted:
            return 0
        if self._store.dynamic:
            return len(self._store.dynamic[place].rows_of_last_step()[0])
        where, rows = self._store.tables.places[place], self._store.tables.tables[place].rows or 0
        return where.rows_on(rows, self._store.group.index, self._store.group.size)

    def gone(self, place: int) -> Tensor:
        """Return the keys of a dynamic table whose rows went since ``forget_gone``, and that have no row now."""
        if not self._store.dynamic:
            return torch.empty(0, dtype=torch.int64)
        table = self._store.dynamic[place]
        assert table.evictions.keys is not None, "increments are refused for tables without marks"
        keys = unique(torch.cat([torch.empty(0, dtype=torch.int64), *table.evictions.keys])).keys
        keys = keys[~torch.isin(keys, table.rows_of_last_step()[0])]
        return keys if self._store.is_counted else keys[:0]

    def forget_gone(self) -> None:
        """Forget the keys whose rows went so far."""
        for each in self._store.dynamic:
            if each.evictions.keys is not None:
                each.evictions.keys.clear()

    # Saves that read rows when they write them -------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        """True if a save may read rows when it writes them: on the host, whole rows."""
        is_cut = self._store.tables.place.placement == "column" and self._store.group.size > 1
        return self._store.device.type == "cpu" and not is_cut

    def snapshot(self) -> StoreSnapshot | TieredSnapshot:
        """Return the rows as they are, to be read when they are written; the open snapshot until ``end_save``.

        Steps may change rows meanwhile. Rows of an exact Adam are read as they are after the steps so far.
        """
        if (found := self._open_snapshot) is not None:
            return found
        snapshots = [each.snapshots() for each in self._store.dynamic]
        indexes, waiting = [rows for rows, _ in snapshots], [keys for _, keys in snapshots]
        if self._store.tiers is not None:
            return self._store.tiers.begin_save(self._store.history, indexes, waiting)
        parts = [range(each.base, each.base + each.index.rows) for each in self._store.dynamic]
        parts = parts or [range(len(self._store.lines))]
        lines, history = self._store.lines, self._store.history
        bring = None if history is None else partial(_bring, lines, history.frozen())
        lines.snapshot = StoreSnapshot(lines.tensors, parts, indexes, waiting, bring)
        return lines.snapshot

    @property
    def _open_snapshot(self) -> StoreSnapshot | TieredSnapshot | None:
        """The rows that a save is reading, if there is one."""
        return self._store.lines.snapshot if self._store.tiers is None else self._store.tiers.snapshot

    def end_save(self) -> None:
        """Keep no more rows for a save. The thread that writes may call this method."""
        found = self._open_snapshot
        if self._store.tiers is None:
            self._store.lines.snapshot = None
        else:
            self._store.tiers.snapshot = None
        if found is not None:
            found.close()

    def wait_for_save(self) -> None:
        """Wait until the save that reads the rows of this store has ended."""
        found = self._open_snapshot
        if found is not None:
            found.wait()

    # Rows in -----------------------------------------------------------------------------------------------------

    def restart(self, place: int) -> None:
        """Reset a table to its start rows; a dynamic table becomes empty."""
        self.wait_for_save()
        if self._store.dynamic:
            self._clear(self._store.dynamic[place])
        else:
            self._store.draw(place)
            if self._store.marks is not None:
                self._store.marks.touch(
                    self._store.slab_rows(place, self._store.static_keys(place)), self._store.steps + 1
                )

    def clear(self) -> None:
        """Remove all keys from the dynamic tables."""
        self.wait_for_save()
        for each in self._store.dynamic:
            self._clear(each)

    def _clear(self, table: DynamicIndex) -> None:
        if self._store.tiers is not None:
            self._store.tiers.remove(table.index.items()[1] + table.base)
        table.clear()

    def load_candidates(self, place: int, candidates: Tensor) -> None:
        """Load waiting keys and their scores, int64 [m, 2], as far as they belong to this rank."""
        self.wait_for_save()
        self._store.dynamic[place].wait(candidates[self._belongs(place, candidates[:, 0])])

    def _check_form(self, name: str, rows: KeyedRows) -> None:
        """Raise MismatchError unless rows have this rank's columns, none that the table lacks, and a key each."""
        here, whole = self._store.columns, self._store.tables.width
        first, stop = rows.first_column, rows.first_column + rows.weights.shape[1]
        if first > here.start or stop < here.stop or stop > whole:
            raise MismatchError(
                f"table {name!r}: rows with columns {first} to {stop - 1}; here are columns {here.start} to "
                f"{here.stop - 1} of {whole}"
            )
        if rows.keys.numel() != len(rows.weights):
            raise MismatchError(
                f"table {name!r}: {rows.keys.numel()} keys for {len(rows.weights)} rows of weights; expected a key for "
                "each row"
            )

    def load_rows(self, place: int, rows: KeyedRows) -> None:
        """Load the rows of a table that belong to this rank.

        Args:
            place: index of the table in the group.
            rows: whole rows, or columns that cover this rank's columns.

        Raises:
            MismatchError: if columns, keys or optimizer state do not fit the table.
        """
        self.wait_for_save()
        name = self._store.tables.tables[place].name
        self._check_form(name, rows)
        mine = self._belongs(place, rows.keys)
        keys = rows.keys[mine]
        if self._store.dynamic:
            table = self._store.dynamic[place]
            found = table.load(keys, None if rows.scores is None else rows.scores[mine], self._store.steps)
            if rows.candidates is not None:
                table.wait(rows.candidates[self._belongs(place, rows.candidates[:, 0])])
            places = found + table.base
            start_key = table.start_key
        else:
            limit = self._store.tables.tables[place].rows or 0
            if keys.numel() and (int(keys.min()) < 0 or int(keys.max()) >= limit):
                raise MismatchError(
                    f"table {name!r}: rows for keys {int(keys.min())} to {int(keys.max())}; it has 0 to {limit - 1}"
                )
            places = self._store.slab_rows(place, keys)
            start_key = self._store.starts.key(name)
        of_mine = mine.nonzero()[:, 0].split(LOADED_ROWS)
        for part, of_part in zip(of_mine, places.split(LOADED_ROWS), strict=True):
            self._put(of_part, self._lines_of(name, start_key, rows, part))
        if self._store.marks is not None:
            self._store.marks.touch(places, self._store.steps + 1)

    def _lines_of(self, name: str, start_key: int, rows: KeyedRows, which: Tensor) -> Tensor:
        """Return the lines [n, w + state] of the loaded rows that ``which`` names; absent state is that of the start.

        Raises:
            MismatchError: if the rows have the state of another optimizer.
        """
        store = self._store
        first, width = store.columns.start - rows.first_column, len(store.columns)
        lines = store.starts.lines(start_key, rows.keys[which], 0.0, store.steps)
        lines[:, :width] = rows.weights[which, first : first + width]
        start = width
        for state, columns in state_columns(store.optimizer, width):
            if state in rows.state:
                held = slice(0, 1) if state in ONE_A_ROW else slice(first, first + width)
                lines[:, start : start + columns] = rows.state[state][which][:, held]
            elif rows.state:
                raise MismatchError(
                    f"table {name!r}: rows without optimizer state {state!r}, but with "
                    f"{', '.join(rows.state)}; another optimizer wrote them"
                )
            start += columns
        return lines

    def _put(self, rows: Tensor, lines: Tensor) -> None:
        """Replace the lines of distinct rows: int64 [n], [n, w + state]."""
        if self._store.tiers is not None:
            self._store.tiers.put(rows, lines)
            return
        self._store.lines.write(rows, lines)
        if self._store.stood is not None:
            self._store.stood[rows] = lines[:, -1].int()

    def _belongs(self, place: int, keys: Tensor) -> Tensor:
        """Return a mask of the keys of a table that this rank holds."""
        where = self._store.tables.places[place]
        if where.placement == "table":
            return torch.full_like(keys, self._store.group.index == where.owner, dtype=torch.bool)
        if where.placement != "row":
            return torch.ones_like(keys, dtype=torch.bool)
        buckets = dynamic_bucket(keys) if self._store.dynamic else static_bucket(keys)
        return buckets % self._store.group.size == self._store.group.index


def _bring(lines: RowLines, history: StepHistory, memory: Sequence[Tensor]) -> None:
    """Replay the steps that copied lines [n, w + state] missed, for an exact Adam."""
    assert isinstance(lines.optimizer, Adam), "Adam alone replays"
    catch_up(history, lines.optimizer, memory[0], torch.arange(len(memory[0])), lines.width)
