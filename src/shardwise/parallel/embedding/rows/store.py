"""Store: the rows of one group of tables on one rank.

    lines   [rows, width + optimizer state]      one line a row (row_lines.py)
            | table 0 | table 1 | ...            static tables: all rows, drawn at the start
                                                 dynamic: address space for the most rows that a table may have;
                                                 memory is taken as rows come, and no row moves as a table grows
    index   key -> row, one for each dynamic table
    tiers   row -> place of ``lines``, if the tables have tiers; the other rows are on a disk (rows_in_tiers.py).
            Without tiers the place of a row is its number

Gradients wait for the step in row_gradients.py; evict.py selects the rows of dynamic tables that are evicted after it;
row_contents.py reads rows for checkpoints, and loads them.

Shapes: U rows of one call, w columns of the table that are on this rank (all, except for placement column).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.kernels import philox
from shardwise.kernels.tables import hash_index, kept_rows
from shardwise.kernels.tables.rounding import row_ids, word_of
from shardwise.kernels.tables.row_rules import RowwiseAdagrad
from shardwise.kernels.tables.unique import unique
from shardwise.optim.clip import square_sum
from shardwise.parallel.embedding.group import TableGroup
from shardwise.parallel.embedding.layout import (
    BUCKETS,
    dynamic_bucket,
    static_bucket,
    static_keys,
    static_row,
)
from shardwise.parallel.embedding.rows.disk_faults import DiskFaults
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex, capacity_of, limit_of
from shardwise.parallel.embedding.rows.evict import evict
from shardwise.parallel.embedding.rows.keyed_rows import RowTally
from shardwise.parallel.embedding.rows.row_gradients import RowGradients
from shardwise.parallel.embedding.rows.row_lines import Rounding, RowLines
from shardwise.parallel.embedding.rows.row_marks import MARK_BYTES, RowMarks
from shardwise.parallel.embedding.rows.rows_in_tiers import WINDOW_ROWS, RowsInTiers
from shardwise.parallel.embedding.rows.start_lines import StartLines
from shardwise.parallel.embedding.rules import dtypes_of, history_of, optimizer_of, row_bytes
from shardwise.parallel.embedding.transfer import SlabRows
from shardwise.tiers.row_cache import CacheFigures
from shardwise.tiers.row_segments import RowSegments

_CPU = torch.device("cpu")
_START_ROWS = 1 << 16
"""Number of start rows drawn at once."""


class TableRange(NamedTuple):
    """Positions [start, stop) of the keys of one dynamic table among the keys of a group."""

    table: int
    """Index of the table in the group."""
    start: int
    stop: int


class RowStore:
    """Rows of a group of tables on one rank.

    Args:
        tables: the group of tables.
        group: ranks that hold the tables, seen from this rank.
        seed: seed of the start rows.
        dtype: dtype of gradients and updates, and of stored rows unless the tables have another.
        device: device of static tables; dynamic tables are on the CPU.
        unlimited: number of dynamic tables of the model without a capacity, which share the address space.
    """

    def __init__(
        self,
        tables: TableGroup,
        group: Group,
        seed: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
        unlimited: int = 1,
    ):
        self.tables = tables
        self.dtype = dtype
        self.optimizer = optimizer_of(tables.optimizer)
        self.group = group
        self._seed = seed
        self.history = history_of(self.optimizer)
        self._gradients = RowGradients(len(tables.columns(group.index)), tables.is_dynamic, group.size == 1)
        self.faults = DiskFaults()
        """An error of the disk that the other ranks have not been told yet."""
        kept_rows.compile_loops()
        if tables.is_dynamic:
            hash_index.compile_loops()
        self._steps = 0
        self.stood: Tensor | None = None
        """Step up to which missed steps of each row are replayed, for an exact Adam on a device. int32 [rows]."""
        self.dynamic: list[DynamicIndex] = []
        self.starts = StartLines(tables, group.index, seed, dtype)
        """The lines with which rows begin."""
        self.tiers: RowsInTiers | None = None
        rows = self._number_rows(unlimited) if tables.is_dynamic else tables.slab_rows(group.index)
        self.marks: RowMarks | None = None
        if any(table.marks_changes for table in tables.tables):
            self.marks = RowMarks(rows, self.optimizer)
            for each in self.dynamic:
                each.evictions.keys = []
        places = tables.places_in_memory(group.index, row_bytes(tables.tables[0], tables.optimizer, dtype))
        if places == 0:  # no key of the tables comes to this rank
            rows = 0
        if places is not None and rows:
            self.lines = self._lines_of(places, _CPU)
            below = _segments(tables, group, self.lines.line_bytes, rows)
            window = self._lines_of(min(places, WINDOW_ROWS), _CPU)
            draw = None if tables.is_dynamic else self.starts.draw
            self.tiers = RowsInTiers(self.lines, window, below, draw, self.places_in_save, self.faults)
            return
        self.lines = self._lines_of(rows, _CPU if tables.is_dynamic else device)
        if device.type != "cpu" and self.history is not None and not tables.is_dynamic:
            self.stood = torch.zeros(len(self.lines), dtype=torch.int32)
        if not tables.is_dynamic:
            for place in range(len(tables.tables)):
                self.draw(place)

    def _number_rows(self, unlimited: int) -> int:
        """Make the indexes of dynamic tables, and return the number of rows for which there are numbers."""
        base, width, first = 0, len(self.columns), self.tables.tables[0]
        full_bytes = row_bytes(first, self.tables.optimizer, self.dtype)
        line_bytes = dtypes_of(first, self.dtype).line_bytes(width, self.optimizer.columns(width))
        for table in self.tables.tables:
            assert table.dynamic is not None, "tables of a group are dynamic together"
            key = self.starts.key(table.name)
            capacity = capacity_of(table.dynamic, full_bytes)
            limit = limit_of(capacity, line_bytes, unlimited, table.tiers is not None)
            self.dynamic.append(
                DynamicIndex(table.name, table.dynamic, base, limit, capacity, key, self.group.size == 1)
            )
            base += limit
        return base

    def _lines_of(self, places: int, device: torch.device) -> RowLines:
        stored = dtypes_of(self.tables.tables[0], self.dtype)
        return RowLines(places, self.columns, self.tables.width, self.optimizer, self.dtype, stored, device)

    @property
    def columns(self) -> range:
        """Columns of the tables that are on this rank."""
        return self.tables.columns(self.group.index)

    @property
    def device(self) -> torch.device:
        """Device of the rows. Dynamic tables are on the CPU, beside their index."""
        return self.lines.device

    @property
    def steps(self) -> int:
        """Number of optimizer steps done."""
        return self._steps

    @property
    def wire_key(self) -> int:
        """Key of the random numbers by which gradients of these tables are rounded for a message."""
        return philox.key_of(self._seed, f"wire of {self.tables}")

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the rows in use and of the indexes."""
        if self.tiers is not None:
            indexes = self.tiers.index_bytes + sum(each.nbytes for each in self.dynamic)
            indexes += 0 if self.marks is None else MARK_BYTES * self._rows_in_use
            return self.lines.nbytes + indexes
        rows = self._rows_in_use
        mark_bytes = MARK_BYTES if self.marks is not None and self.device.type == "cpu" else 0
        return rows * (self.lines.line_bytes + mark_bytes) + sum(d.nbytes for d in self.dynamic)

    @property
    def _rows_in_use(self) -> int:
        """Number of rows that this rank has used, in whatever tier they are."""
        if self.dynamic:
            return sum(each.index.rows for each in self.dynamic)
        return self.tables.slab_rows(self.group.index)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the rows on disk."""
        return 0 if self.tiers is None else self.tiers.disk_bytes

    @property
    def steady_rows(self) -> list[Tensor]:
        """Memory of the rows if only updates change them.

        Nothing for dynamic tables, for tables with tiers, and for an exact Adam: a rank replays the steps that a row
        missed when its own batches read the row.
        """
        is_steady = not self.dynamic and self.history is None and self.tiers is None
        return self.lines.tensors if is_steady else []

    @property
    def step_bytes(self) -> int:
        """Bytes of host memory beside a slab on a device."""
        marks = 0 if self.marks is None or self.device.type == "cpu" else MARK_BYTES * len(self.lines)
        return marks + (0 if self.stood is None else self.stood.nbytes)

    @property
    def tallies(self) -> dict[str, RowTally]:
        """Rows of each table that count on this rank. In the sum over the ranks each row counts once."""
        if self.dynamic:
            found = {
                each.name: RowTally(len(each.index), each.inserted, each.evicted) for each in self.dynamic
            }
        else:
            found = {
                table.name: RowTally(where.rows_on(table.rows or 0, self.group.index, self.group.size))
                for table, where in zip(self.tables.tables, self.tables.places, strict=True)
            }
        return found if self.is_counted else dict.fromkeys(found, RowTally(0))

    @property
    def _alike(self) -> bool:
        """True if every rank of the group has all rows, or columns of all of them."""
        return self.group.size == 1 or self.tables.place.placement in ("data_parallel", "column")

    @property
    def is_counted(self) -> bool:
        """True if the rows of this rank count; of copies, only those on the first rank count."""
        return self.group.index == 0 or not self._alike

    @property
    def capped(self) -> list[DynamicIndex]:
        """Dynamic tables that may exceed their capacity."""
        return [each for each in self.dynamic if each.is_capped]

    # Reading -----------------------------------------------------------------------------------------------------

    def rows(self, keys: Tensor, stretches: Sequence[TableRange], learns: bool) -> Tensor:
        """Return the slab row of each key, -1 if the key has no row: int64 [U] -> [U].

        Args:
            keys: keys of the group that this rank serves.
            stretches: ranges of ``keys`` by dynamic table; unused for static tables.
            learns: True inserts new keys.
        """
        if self.dynamic:
            rows = torch.empty_like(keys)
            for table, start, stop in stretches:
                rows[start:stop] = self._dynamic_rows(self.dynamic[table], keys[start:stop], learns)
        elif self.tables.place.placement == "row":
            rows = static_row(keys, self.group.size)
        elif self.tables.place.placement == "table":
            first = self.tables.first_base(self.group.index)
            rows = keys - first if first else keys
        else:
            rows = keys
        return rows

    def read(self, rows: SlabRows, learns: bool = False) -> Tensor:
        """Return the weights of rows, zero for keys that have no row: [U] -> [U, w].

        Args:
            rows: the rows.
            learns: True if the running step will update the rows.
        """
        absent = rows.here < 0 if self.dynamic else None
        if absent is None or not bool(absent.any()):
            return self._weights(rows, learns)
        present = rows.here[~absent]  # of a dynamic table, which is on the host
        weights = torch.zeros(absent.numel(), len(self.columns), dtype=self.dtype)
        weights[~absent] = self._weights(SlabRows(present, present), learns)
        return weights

    def read_ahead(self, keys: Tensor, stretches: Sequence[TableRange], steps: int) -> None:
        """Bring rows of keys into memory for a step that is ``steps`` after the running one, as far as there is room.

        Another thread than the one that trains may call this method. Keys without a row are ignored.
        """
        if self.tiers is not None:
            rows = self.rows(keys, stretches, learns=False)
            self.tiers.read_ahead(unique(rows[rows >= 0]).keys, steps)

    def lend(self, rows: SlabRows, learns: bool = False) -> Tensor | None:
        """Bring rows up to date and return their places in ``lines``, for reading until the next call of this store.

        None if some of them do not exist, or if they are more than the rows that may be in memory.
        """
        if self.dynamic and bool((rows.here < 0).any()):
            return None
        if self.tiers is not None and rows.here.numel() > len(self.tiers):
            return None
        with self.faults.kept():
            places = self._places(rows, learns)
            self.catch_up(rows.here, places)
            return places
        return None

    def _weights(self, rows: SlabRows, learns: bool) -> Tensor:
        """Return the weights of rows that exist, up to date."""
        most = rows.here.numel() if self.tiers is None else len(self.tiers)
        found = []
        for start in range(0, max(rows.here.numel(), 1), max(most, 1)):
            found.append(self._weights_at_once(rows.part(start, start + most), learns))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _weights_at_once(self, rows: SlabRows, learns: bool) -> Tensor:
        """Return the weights of rows of which all fit in memory; zeros if the disk fails and the error is kept."""
        with self.faults.kept():
            places = self._places(rows, learns)
            self.catch_up(rows.here, places)
            return self.lines.weights(places)
        return torch.zeros(rows.here.numel(), len(self.columns), dtype=self.dtype)

    def _places(self, rows: SlabRows, learns: bool) -> Tensor:
        """Return the places of rows in ``lines``, which stay there until the next call."""
        if self.tiers is None:
            return rows.there
        return self.tiers.lend(rows.here, changes=self.history is not None, learns=learns)

    @property
    def is_tiered(self) -> bool:
        """True if only some of the rows are in memory."""
        return self.tiers is not None

    @property
    def rows_too_many(self) -> int:
        """Number of rows with gradients in the running step beyond those that may be in memory."""
        rows, _ = self._gradients.merged(self._like)
        return 0 if self.tiers is None else max(rows.here.numel() - len(self.tiers), 0)

    def bring_rows_of_step(self) -> None:
        """Bring the rows with gradients into memory, where they stay until STEP, which then needs no disk.

        An error of the disk is kept in ``faults``, as one of the compaction that followed the last step is.
        """
        self.faults.begin_numbers()
        if self.tiers is not None:
            self.tiers.bring(self._gradients.merged(self._like)[0].here)

    # Learning ----------------------------------------------------------------------------------------------------

    def add(self, rows: Tensor, grads: Tensor) -> None:
        """Keep the gradients [U, w] of rows for the step; ``rows`` is on the host."""
        self._gradients.add(rows, grads)

    def square_sum(self) -> Tensor:
        """Return Σ g² of the delivered gradients that count on this rank, in fp64."""
        if self.tables.place.placement == "data_parallel" and self.group.index:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        _, grads = self._gradients.merged(self._like)
        return square_sum(grads.reshape(-1))

    def step(self, step: int, lr_factor: float, divisor: float) -> None:
        """Update the rows that have gradients, then update scores and evict rows."""
        rows, grads = self._gradients.merged(self._like)
        self._gradients.clear()
        lr = self.tables.optimizer.lr * lr_factor
        places = rows.there if self.tiers is None else self.tiers.places_of_step(rows.here)
        self.catch_up(rows.here, places, for_update=True)
        scale = 1.0 / divisor
        squares = self._mean_squares(places, grads, scale)
        if rows.here.numel():
            self.lines.update(
                places,
                grads,
                lr=lr,
                step=step,
                scale=scale,
                mean_squares=squares,
                rounding=self._rounding(rows.here, step) if self.lines.is_rounded else None,
            )
            if self.stood is not None:
                self.stood[rows.here] = step
            if self.marks is not None:
                self.marks.touch(rows.here, step)
        if self.history is not None:
            self.history.append(lr)
        self._steps = step
        for each in self.dynamic:
            each.score(step)
            each.forget_candidates(step)
        is_spread = not self._alike and self.tables.place.placement != "table"
        with self._rows_that_go():
            evict(self.dynamic, self.group if is_spread else None, step)
        if self.tiers is not None:
            self.tiers.end_step()

    def drop(self) -> None:
        """Discard the gradients since the last step, and the keys that came with them."""
        self._gradients.clear()
        if self.tiers is not None:
            self.tiers.forget_step()
        self.forget_keys_of_step()

    def take_figures(self) -> CacheFigures | None:
        """Return the counts of the cache since the last call; None without tiers."""
        return None if self.tiers is None else self.tiers.take_figures()

    def close(self) -> None:
        """Remove the rows on disk; a store with tiers cannot be read afterwards."""
        if self.tiers is not None:
            self.tiers.close()

    def forget_keys_of_step(self) -> None:
        """Undo the insertion of keys into dynamic tables since the last step."""
        with self._rows_that_go():
            for each in self.dynamic:
                each.forget_step()

    @contextlib.contextmanager
    def _rows_that_go(self) -> Iterator[None]:
        """Remove the rows from all tiers that the dynamic tables give up inside the context."""
        freed = [each.index.freed for each in self.dynamic]
        yield
        if self.tiers is not None:
            for each, before in zip(self.dynamic, freed, strict=True):
                self.tiers.remove(each.index.freed_since(before) + each.base)

    def resume(self, steps: int, lr_factors: Sequence[float]) -> None:
        """Continue after ``steps`` steps, which had these factors of the learning rate."""
        self._steps = steps
        self.history = history_of(
            self.optimizer, [self.tables.optimizer.lr * factor for factor in lr_factors]
        )

    @property
    def _like(self) -> Tensor:
        """An empty tensor with the dtype and the device of gradients."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def _rounding(self, rows: Tensor, step: int) -> Rounding:
        """Return the random numbers by which a step rounds rows: functions of table, key, column and step alone."""
        table_keys = [self.starts.key(table.name) for table in self.tables.tables]
        if self.dynamic:
            ids = torch.empty_like(rows)
            ends = [*(each.base for each in self.dynamic[1:]), 1 << 62]
            for table, end, key in zip(self.dynamic, ends, table_keys, strict=True):
                own = torch.nonzero((rows >= table.base) & (rows < end))[:, 0]
                ids[own] = row_ids(key, table.index.keys_of(rows[own] - table.base))
        else:
            found = self.tables.keys_at(rows, self.group.index)
            ids = row_ids([table_keys[table] for table in found.tables], found.keys, found.places)
        return Rounding(ids.to(self.device), word_of(step))

    def _mean_squares(self, rows: Tensor, grads: Tensor, scale: float) -> Tensor | None:
        """Return means of squares over whole rows, for row-wise Adagrad on columns; None otherwise.

        The all-reduce adds rows by position, so rows must come in the same order on every rank.
        """
        optimizer = self.optimizer
        is_cut = self.tables.place.placement == "column" and self.group.size > 1
        if not isinstance(optimizer, RowwiseAdagrad) or not is_cut:
            return None
        g = grads * scale
        if optimizer.weight_decay:
            g = g + self.lines.weights(rows) * optimizer.weight_decay
        sums = (g * g).sum(1)
        self.group.all_reduce(sums, f"squares of {self.tables}", "gradients").wait()
        return sums / self.tables.width

    def places_in_save(self, rows: Tensor) -> Tensor:
        """Return numbers that rise in the order in which a save writes rows: by table and bucket, static ones by key.

        The keys of rows that were removed are those that they had last.
        """
        if not self.dynamic:
            found = self.tables.keys_at(rows, self.group.index)
            buckets = found.places * BUCKETS + static_bucket(found.keys)
            return (buckets << 40) + torch.div(found.keys, BUCKETS, rounding_mode="floor")
        numbers = torch.empty_like(rows)
        ends = [*(each.base for each in self.dynamic[1:]), 1 << 62]
        for place, (table, end) in enumerate(zip(self.dynamic, ends, strict=True)):
            own = torch.nonzero((rows >= table.base) & (rows < end))[:, 0]
            keys = table.index.keys_of(rows[own] - table.base)
            numbers[own] = dynamic_bucket(keys) + place * BUCKETS
        return numbers

    def catch_up(self, rows: Tensor, places: Tensor, for_update: bool = False) -> None:
        """Replay the steps that rows at places of ``lines`` missed, for an exact Adam; ``rows`` is on the host."""
        if self.history is None:
            return
        stood = None if self.stood is None else self.stood[rows]
        self.lines.catch_up(self.history, places, stood, for_update)
        if self.stood is not None:
            self.stood[rows] = len(self.history)

    # Dynamic tables ----------------------------------------------------------------------------------------------

    def _dynamic_rows(self, table: DynamicIndex, keys: Tensor, learns: bool) -> Tensor:
        """Return the slab row of each key of one dynamic table, -1 if the key has no row."""
        if not learns:
            rows = table.index.find(keys)
            return torch.where(rows < 0, rows, rows + table.base)
        rows, new = table.take(keys, self._steps + 1)
        if new.numel():
            self._begin(table, table.index.keys_of(new), new + table.base)
        return torch.where(rows < 0, rows, rows + table.base)

    def _begin(self, table: DynamicIndex, keys: Tensor, rows: Tensor) -> None:
        """Write start weights and optimizer state of new rows."""
        policy = next(each for each in self.tables.tables if each.name == table.name)
        lines = self.starts.lines(table.start_key, keys, policy.start_bound, self._steps)
        if self.tiers is None:
            self.lines.write(rows, lines)
        else:
            self.tiers.begin(rows, lines)

    # Static tables -----------------------------------------------------------------------------------------------

    def static_keys(self, place: int) -> Tensor:
        """Return the keys of a static table that this rank holds, in the order of its rows."""
        rows, where = self.tables.tables[place].rows or 0, self.tables.places[place]
        if where.placement == "row":
            return static_keys(rows, self.group.index, self.group.size)
        return torch.arange(rows if where.holds(self.group.index) else 0)

    def slab_rows(self, place: int, keys: Tensor) -> Tensor:
        """Return the slab rows of keys of a static table that this rank holds."""
        rows = static_row(keys, self.group.size) if self.tables.place.placement == "row" else keys
        return rows + self.tables.base_on(place, self.group.index)

    def draw(self, place: int) -> None:
        """Reset a static table to its start rows, as they are drawn after the steps so far."""
        table, index = self.tables.tables[place], self.group.index
        self.starts.restart(place, self._steps)
        base = self.tables.base_on(place, index)
        if self.tiers is not None:
            rows = self.tables.places[place].rows_on(table.rows or 0, index, self.group.size)
            for start in range(0, rows, _START_ROWS):
                self.tiers.remove(torch.arange(start, min(start + _START_ROWS, rows)) + base)
            return
        keys, key = self.static_keys(place), self.starts.key(table.name)
        for start in range(0, keys.numel(), _START_ROWS):
            part = keys[start : start + _START_ROWS]
            lines = self.starts.lines(key, part, table.start_bound, self._steps)
            where = slice(base + start, base + start + part.numel())
            self.lines.write(where, lines)
            if self.stood is not None:
                self.stood[where] = lines[:, -1].int()


def _segments(tables: TableGroup, group: Group, line_bytes: int, rows: int) -> RowSegments:
    """Return segments in the folder that the tables name, for at most ``rows`` rows of this rank."""
    tiers = tables.tables[0].tiers
    assert tiers is not None, "tables of a group have tiers together"
    name = f"table {tables.tables[0].name!r}" if len(tables.tables) == 1 else f"tables {tables}"
    return RowSegments(tiers.folder, name, line_bytes, rows, group.ranks[group.index])
