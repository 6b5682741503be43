"""Store: the rows of one group of tables on one rank.

    slab    [rows, width + optimizer state]      one line a row, so that an update touches one stretch of memory
              | table 0 | table 1 | ...            static tables: all rows, drawn at the start
                                                   dynamic: address space for the most a table may have; memory comes
                                                   with the rows, and none moves as it grows
    index   key -> row, one for each dynamic table

Gradients wait for the step in row_gradients.py; evict.py says which rows of dynamic tables go after it.

Shapes: U rows of one call, w columns of the table that are here (all, but for placement column).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.kernels import philox
from shardwise.kernels.initializers import Uniform
from shardwise.kernels.tables.pooling import gather
from shardwise.kernels.tables.row_optimizers import update
from shardwise.kernels.tables.row_replay import catch_up
from shardwise.kernels.tables.row_rules import Adam, RowwiseAdagrad
from shardwise.kernels.tables.slab import reserve
from shardwise.kernels.tables.start_rows import start_rows
from shardwise.optim.clip import square_sum
from shardwise.parallel.embedding.dynamic import Dynamic, capacity_of, limit_of
from shardwise.parallel.embedding.evict import evict
from shardwise.parallel.embedding.group import TableGroup
from shardwise.parallel.embedding.layout import (
    dynamic_bucket,
    static_bucket,
    static_keys,
    static_row,
    writer_of,
)
from shardwise.parallel.embedding.row_gradients import RowGradients
from shardwise.parallel.embedding.rows import Rows, Tally
from shardwise.parallel.embedding.rules import ONE_A_ROW, history_of, optimizer_of, state_columns
from shardwise.parallel.embedding.transfer import SlabRows
from shardwise.plan.errors import MismatchError

_CPU = torch.device("cpu")
_START_ROWS = 1 << 16
"""Start rows drawn at once."""


class TableRange(NamedTuple):
    """Places [start, stop) of some keys: those of one dynamic table."""

    table: int
    start: int
    stop: int


class Store:
    """Rows of ``tables`` on the rank that ``group`` is seen from."""

    def __init__(
        self,
        tables: TableGroup,
        group: Group,
        seed: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
        unlimited: int = 1,
    ):
        """``unlimited``: dynamic tables of the model without a capacity."""
        self.tables = tables
        self.dtype = dtype
        self.columns = tables.columns(group.index)
        self.optimizer = optimizer_of(tables.optimizer)
        self._group = group
        self._alike = group.size == 1 or tables.place.placement in ("data_parallel", "column")
        self._seed = seed
        self._history = history_of(self.optimizer)
        self._gradients = RowGradients(len(self.columns), tables.is_dynamic, group.size == 1)
        self._steps = 0
        self._stood: Tensor | None = None
        """Of an exact Adam on a device: the step at which each row stands, which the host must know. int32 [rows]."""
        width = len(self.columns)
        line = width + self.optimizer.columns(width)
        self._dynamic: list[Dynamic] = []
        if tables.is_dynamic:
            full_bytes = (tables.width + self.optimizer.columns(tables.width)) * dtype.itemsize
            base = 0
            for table in tables.tables:
                assert table.dynamic is not None, "tables of a group are dynamic together"
                key = philox.key_of(seed, _start_name(table.name))
                capacity = capacity_of(table.dynamic, full_bytes)
                limit = limit_of(capacity, line * dtype.itemsize, unlimited)
                self._dynamic.append(
                    Dynamic(table.name, table.dynamic, base, limit, capacity, key, group.size == 1)
                )
                base += limit
            self.slab = reserve(base, line, dtype)
        else:
            if device.type == "cpu":
                self.slab = reserve(tables.slab_rows(group.index), line, dtype)
            else:
                self.slab = torch.zeros(tables.slab_rows(group.index), line, dtype=dtype, device=device)
                if self._history is not None:
                    self._stood = torch.zeros(len(self.slab), dtype=torch.int32)
            for place in range(len(tables.tables)):
                self._draw(place, self._static_keys(place))

    @property
    def device(self) -> torch.device:
        """Where the rows are. Dynamic tables are on the CPU, where their index is."""
        return self.slab.device

    @property
    def nbytes(self) -> int:
        """Memory of the rows in use."""
        rows = sum(each.index.rows for each in self._dynamic) if self._dynamic else len(self.slab)
        return rows * self.slab.shape[1] * self.slab.itemsize + sum(d.nbytes for d in self._dynamic)

    @property
    def step_bytes(self) -> int:
        """Host memory beside a slab on a device."""
        return 0 if self._stood is None else self._stood.nbytes

    @property
    def tallies(self) -> dict[str, Tally]:
        """Of each table, what this rank counts: summed over the ranks, each row counts once."""
        if self._dynamic:
            found = {each.name: Tally(len(each.index), each.inserted, each.evicted) for each in self._dynamic}
        else:
            found = {
                table.name: Tally(where.rows_on(table.rows or 0, self._group.index, self._group.size))
                for table, where in zip(self.tables.tables, self.tables.places, strict=True)
            }
        return found if self.is_counted else dict.fromkeys(found, Tally(0))

    @property
    def is_counted(self) -> bool:
        """True where the rows here count: copies do on the first rank alone."""
        return self._group.index == 0 or not self._alike

    @property
    def capped(self) -> list[Dynamic]:
        """Tables that may be too full."""
        return [each for each in self._dynamic if each.is_capped]

    def most_rows(self, place: int) -> int | None:
        """Return how many rows a table may hold over all ranks; None if nothing limits them, or they are fixed."""
        return self._dynamic[place].most_rows if self._dynamic else None

    # Reading -----------------------------------------------------------------------------------------------------

    def rows(self, keys: Tensor, stretches: Sequence[TableRange], learns: bool) -> Tensor:
        """Slab row of each key, -1 where it has none: int64 [U] -> [U]. Where ``learns``, new keys get rows."""
        if self._dynamic:
            rows = torch.empty_like(keys)
            for table, start, stop in stretches:
                rows[start:stop] = self._dynamic_rows(self._dynamic[table], keys[start:stop], learns)
        elif self.tables.place.placement == "row":
            rows = static_row(keys, self._group.size)
        elif self.tables.place.placement == "table":
            first = self.tables.first_base(self._group.index)
            rows = keys - first if first else keys
        else:
            rows = keys
        return rows

    def read(self, rows: SlabRows) -> Tensor:
        """Weights of rows, zero where a key has none: [U] -> [U, w]."""
        absent = rows.here < 0 if self._dynamic else None
        if absent is None or not bool(absent.any()):
            self._catch_up(rows)
            return gather(self.slab, rows.there, len(self.columns))
        present = rows.here[~absent]  # of a dynamic table, which is on the host
        self._catch_up(SlabRows(present, present))
        weights = self.slab.new_zeros(absent.numel(), len(self.columns))
        weights[~absent] = gather(self.slab, present, len(self.columns))
        return weights

    def can_lend(self, rows: SlabRows) -> bool:
        """Bring rows up to date in the slab; true where each of them exists, so that they may be read there."""
        if self._dynamic and bool((rows.here < 0).any()):
            return False
        self._catch_up(rows)
        return True

    # Learning ----------------------------------------------------------------------------------------------------

    def add(self, rows: Tensor, grads: Tensor) -> None:
        """Gradients [U, w] of rows, which are on the host, wait for the step."""
        self._gradients.add(rows, grads)

    def square_sum(self) -> Tensor:
        """Σ g² of the delivered gradients that count on this rank, fp64."""
        if self.tables.place.placement == "data_parallel" and self._group.index:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        _, grads = self._gradients.merged(self.slab)
        return square_sum(grads.reshape(-1))

    def step(self, step: int, lr_factor: float, divisor: float) -> None:
        """Update the rows with gradients; move scores, evict."""
        rows, grads = self._gradients.merged(self.slab)
        self._gradients.clear()
        lr = self.tables.optimizer.lr * lr_factor
        self._catch_up(rows)
        scale = 1.0 / divisor
        squares = self._mean_squares(rows.there, grads, scale)
        if rows.here.numel():
            update(
                self.optimizer,
                self.slab,
                rows.there,
                grads,
                lr=lr,
                step=step,
                scale=scale,
                mean_squares=squares,
            )
            if self._stood is not None:
                self._stood[rows.here] = step
        if self._history is not None:
            self._history.append(lr)
        self._steps = step
        for each in self._dynamic:
            each.score(step)
            each.forget_candidates(step)
        is_spread = not self._alike and self.tables.place.placement != "table"
        evict(self._dynamic, self._group if is_spread else None, step)

    def drop(self) -> None:
        """Forget gradients that wait, and the keys that came with them: this step does not count."""
        self._gradients.clear()
        self.forget_keys_of_step()

    def forget_keys_of_step(self) -> None:
        """Leave dynamic tables as if the keys since the last step had not come."""
        for each in self._dynamic:
            each.forget_step()

    def resume(self, steps: int, lr_factors: Sequence[float]) -> None:
        """Go on after ``steps`` steps with these factors of the learning rate."""
        self._steps = steps
        self._history = history_of(
            self.optimizer, [self.tables.optimizer.lr * factor for factor in lr_factors]
        )

    def _mean_squares(self, rows: Tensor, grads: Tensor, scale: float) -> Tensor | None:
        """For row-wise Adagrad on columns: means over whole rows. Rows come in the same order on every rank."""
        optimizer = self.optimizer
        is_cut = self.tables.place.placement == "column" and self._group.size > 1
        if not isinstance(optimizer, RowwiseAdagrad) or not is_cut:
            return None
        g = grads * scale
        if optimizer.weight_decay:
            g = g + gather(self.slab, rows, len(self.columns)) * optimizer.weight_decay
        sums = (g * g).sum(1)
        self._group.all_reduce(sums, f"squares of {self.tables}", "gradients").wait()
        return sums / self.tables.width

    def _catch_up(self, rows: SlabRows) -> None:
        if self._history is None:
            return
        assert isinstance(self.optimizer, Adam), "Adam alone replays"
        stood = None if self._stood is None else self._stood[rows.here]
        catch_up(self._history, self.optimizer, self.slab, rows.there, len(self.columns), stood)
        if self._stood is not None:
            self._stood[rows.here] = len(self._history)

    # Dynamic tables ----------------------------------------------------------------------------------------------

    def _dynamic_rows(self, table: Dynamic, keys: Tensor, learns: bool) -> Tensor:
        """Rows of one table's keys in the group's slab."""
        if not learns:
            rows = table.index.find(keys)
            return torch.where(rows < 0, rows, rows + table.base)
        rows, new = table.take(keys, self._steps + 1)
        if new.numel():
            self._begin(table, table.index.keys_of(new), new + table.base)
        return torch.where(rows < 0, rows, rows + table.base)

    def _begin(self, table: Dynamic, keys: Tensor, rows: Tensor) -> None:
        """Start weights and state of new rows."""
        policy = next(each for each in self.tables.tables if each.name == table.name)
        self.slab[rows] = self._start_lines(table.start_key, keys, policy.start_bound)

    # Rows in and out ---------------------------------------------------------------------------------------------

    def rows_here(self, place: int, part: tuple[int, int] | None = None, of_last_step: bool = False) -> Rows:
        """Return what this rank holds of a table by (bucket, key); with ``part`` (i, n) of the i-th n-th of the
        buckets; ``of_last_step``: without the keys that have come since."""
        scores = candidates = None
        if self._dynamic:
            table = self._dynamic[place]
            keys, rows, scores = table.rows_of_last_step() if of_last_step else table.rows_now()
            candidates = table.candidates_of_last_step() if of_last_step else table.candidates
            rows = rows + table.base
            buckets = dynamic_bucket(keys)
        else:
            keys = self._static_keys(place)
            rows = self._slab_rows(place, keys)
            buckets = static_bucket(keys)
        order = keys.argsort()
        order = order[buckets[order].argsort(stable=True)]
        if part is not None:
            order = order[writer_of(buckets[order], part[1]) == part[0]]
        keys, here = keys[order], rows[order]
        rows = here.to(self.device)
        self._catch_up(SlabRows(here, rows))
        width = len(self.columns)
        state, start = {}, width
        for name, columns in state_columns(self.optimizer, width):
            state[name] = self.slab[:, start : start + columns].index_select(0, rows)
            start += columns
        return Rows(
            keys,
            self.slab[:, :width].index_select(0, rows),
            state,
            None if scores is None else scores[order],
            self.columns.start,
            candidates,
        )

    def state_names(self) -> list[str]:
        """Optimizer state that a row has beside its weights."""
        return [name for name, _ in state_columns(self.optimizer, len(self.columns))]

    def restart(self, place: int) -> None:
        """A table as it began; a dynamic one without a key."""
        if self._dynamic:
            self._dynamic[place].clear()
        else:
            self._draw(place, self._static_keys(place))

    def clear(self) -> None:
        """Dynamic tables begin anew without a key."""
        for each in self._dynamic:
            each.clear()

    def load_candidates(self, place: int, candidates: Tensor) -> None:
        """Of keys that wait for admission and their scores, int64 [m, 2], take those that belong here."""
        self._dynamic[place].wait(candidates[self._belongs(place, candidates[:, 0])])

    def load_rows(self, place: int, rows: Rows) -> None:
        """Take the rows that belong here, of whole rows or of columns that cover those that are here."""
        name = self.tables.tables[place].name
        first = self.columns.start - rows.first_column
        width = len(self.columns)
        if first < 0 or rows.weights.shape[1] < first + width:
            raise MismatchError(
                f"table {name!r}: rows with columns {rows.first_column} to "
                f"{rows.first_column + rows.weights.shape[1] - 1}; here are columns {self.columns.start} to "
                f"{self.columns.stop - 1} of {self.tables.width}"
            )
        mine = self._belongs(place, rows.keys)
        keys = rows.keys[mine]
        if self._dynamic:
            table = self._dynamic[place]
            found = table.load(keys, None if rows.scores is None else rows.scores[mine], self._steps)
            if rows.candidates is not None:
                table.wait(rows.candidates[self._belongs(place, rows.candidates[:, 0])])
            places = found + table.base
            start_key = table.start_key
        else:
            limit = self.tables.tables[place].rows or 0
            if keys.numel() and (int(keys.min()) < 0 or int(keys.max()) >= limit):
                raise MismatchError(
                    f"table {name!r}: rows for keys {int(keys.min())} to {int(keys.max())}; it has 0 to {limit - 1}"
                )
            places = self._slab_rows(place, keys)
            start_key = philox.key_of(self._seed, _start_name(name))
        lines = self._start_lines(start_key, keys, 0.0)
        lines[:, :width] = rows.weights[mine, first : first + width]
        start = width
        for state, columns in state_columns(self.optimizer, width):
            if state in rows.state:
                given = rows.state[state][mine]
                held = slice(0, 1) if state in ONE_A_ROW else slice(first, first + width)
                lines[:, start : start + columns] = given[:, held]
            elif rows.state:
                raise MismatchError(
                    f"table {name!r}: rows without optimizer state {state!r}, but with "
                    f"{', '.join(rows.state)}; another optimizer wrote them"
                )
            start += columns
        self.slab[places.to(self.device)] = lines.to(self.device)
        if self._stood is not None:
            self._stood[places] = lines[:, -1].int()

    def _belongs(self, place: int, keys: Tensor) -> Tensor:
        """Which keys of a table this rank holds."""
        where = self.tables.places[place]
        if where.placement == "table":
            return torch.full_like(keys, self._group.index == where.owner, dtype=torch.bool)
        if where.placement != "row":
            return torch.ones_like(keys, dtype=torch.bool)
        buckets = dynamic_bucket(keys) if self._dynamic else static_bucket(keys)
        return buckets % self._group.size == self._group.index

    def _static_keys(self, place: int) -> Tensor:
        """Keys of a static table that this rank holds, in the order of its rows."""
        rows, where = self.tables.tables[place].rows or 0, self.tables.places[place]
        if where.placement == "row":
            return static_keys(rows, self._group.index, self._group.size)
        return torch.arange(rows if where.holds(self._group.index) else 0)

    def _slab_rows(self, place: int, keys: Tensor) -> Tensor:
        """Slab rows of keys of a static table that are here."""
        rows = static_row(keys, self._group.size) if self.tables.place.placement == "row" else keys
        return rows + self.tables.base_on(place, self._group.index)

    def _draw(self, place: int, keys: Tensor) -> None:
        """Start lines of a static table."""
        table = self.tables.tables[place]
        key = philox.key_of(self._seed, _start_name(table.name))
        base = self.tables.base_on(place, self._group.index)
        for start in range(0, keys.numel(), _START_ROWS):
            part = keys[start : start + _START_ROWS]
            lines = self._start_lines(key, part, table.start_bound)
            self.slab[base + start : base + start + part.numel()].copy_(lines)
            if self._stood is not None:
                self._stood[base + start : base + start + part.numel()] = lines[:, -1].int()

    def _start_lines(self, key: int, keys: Tensor, bound: float) -> Tensor:
        """Start weights and state: [n, w + state]."""
        width = len(self.columns)
        lines = torch.empty(keys.numel(), self.slab.shape[1], dtype=self.dtype)
        if bound:
            initializer = Uniform(-bound, bound)
            lines[:, :width] = start_rows(
                key, keys, width, initializer, first=self.columns.start, dtype=self.dtype
            )
        else:
            lines[:, :width] = 0
        lines[:, width:] = torch.tensor(self.optimizer.start(width, self._steps), dtype=self.dtype)
        return lines


def _start_name(table: str) -> str:
    """What keys the start rows of a table."""
    return f"table {table}"
