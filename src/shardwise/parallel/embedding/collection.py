"""EmbeddingCollection: the module. Features of a batch in, one vector a sample and feature out.

    tables = EmbeddingCollection([TablePolicy(name="user", rows=1_000_000, width=16), ...])
    vectors = tables({"user": Ragged(values, offsets), ...})          # {"user": [B, 16], ...}
    loss(vectors).backward()
    tables.step()                                                     # under an engine its own step does it

One batch, and how often each line runs for it:

    prepare      keys: distinct, counted, exchanged       once for a batch, also ahead of it, in another thread
    forward      vectors                                  once
    backward     gradients, merged to distinct rows       once, by autograd
    deliver      gradients to the owners of the rows      once a step, those of every forward pass in it
    step         merged over ranks and microbatches, and the rows updated

prepare, forward, deliver and step are collective: every rank calls them in the same order, a rank that has run out
of data with empty features (``Ragged.of_lists([])``).

The weights are no parameters: a gradient of a whole table never exists, and no other optimizer may touch them. They are
plain tensors of the stores, each rank holding what its placement gives it. ``state_dict`` carries them where one rank
has all, rows with their optimizer state; else it says that it does not, and an engine saves them.

Shapes: B samples, D width, F features.
"""

import contextlib
import copy
import logging
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Clock, Group
from shardwise.comm.duals import uncompiled
from shardwise.comm.exchange import share
from shardwise.comm.trace import Traffic
from shardwise.kernels.tables.unique import Scratch
from shardwise.optim.clip import clip_factor
from shardwise.parallel.embedding.ahead import PreparedFeatures
from shardwise.parallel.embedding.batch import Part, Prepared, Sequences, Vectors, by_feature, on_device
from shardwise.parallel.embedding.dynamic import is_unlimited
from shardwise.parallel.embedding.fuse import batch_size, fuse
from shardwise.parallel.embedding.group import group_tables
from shardwise.parallel.embedding.layout import Place, dynamic_bucket, static_bucket, writer_of
from shardwise.parallel.embedding.planner import Choice, plan_tables
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows import Rows, Tally
from shardwise.parallel.embedding.saved import Stretch, of_first_rank, stretch_to_write
from shardwise.parallel.embedding.store import Store
from shardwise.parallel.embedding.ways import Asked, Lane, way_of
from shardwise.plan.errors import (
    CommError,
    DataError,
    MismatchError,
    PlanError,
    TableFullError,
    UsageError,
)
from shardwise.plan.policy import nearest
from shardwise.plan.ragged import Ragged
from shardwise.plan.words import counted, named_ranks

_log = logging.getLogger(__name__)

_REFUSED = -1
"""Number of keys of a rank that cannot say it."""
_MANY_PASSES, _MOST_PASSES = 64, 4096
"""Training forward passes without a step: from which on a loop of the user's own is warned, and refused."""
_ROUNDING = {torch.bfloat16: 256, torch.float16: 2048}
"""Half a unit in the last place of 1."""
_STATE_FORMAT = 1


class EmbeddingCollection(nn.Module):
    """Tables and the features that read them.

    tables      each with its features; a feature belongs to one table
    optimizer   of the tables that have none of their own
    seed        start rows are functions of (seed, table, key)
    dtype       of weights, gradients and optimizer state
    """

    def __init__(
        self,
        tables: Sequence[TablePolicy],
        optimizer: RowOptimizerPolicy | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.tables = tuple(tables)
        self.optimizer = optimizer or RowOptimizerPolicy()
        self.seed = seed
        self.dtype = dtype
        self.choices: list[Choice] = []
        """Where each table lies, and why."""
        self.steps = 0
        """Optimizer steps done."""
        self._lr_factors: list[float] = []
        self._parts: list[Part] = []
        self._group: Group | None = None
        self._here: Lane | None = None
        self._ahead: Lane | None = None
        self._to_load: list[tuple[str, Rows]] = []
        """Rows that were given before the tables had a place."""
        self._open: list[Prepared] = []
        """Forward passes whose gradients have not been delivered."""
        self._is_led = False
        self._progress_to_load: Mapping[str, Any] | None = None
        self._copy_of: weakref.ref[EmbeddingCollection] | None = None
        """Of a copy that was made before there were rows."""
        self._check_names()

    # Where the tables are ----------------------------------------------------------------------------------------

    def place(
        self,
        group: Group | None = None,
        keys_group: Group | None = None,
        *,
        batch: int = 1024,
        memory_bytes: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        is_led: bool = False,
    ) -> None:
        """Spread the tables over the ranks of ``group`` and draw their start rows; once, on all ranks alike.

        ``keys_group`` carries keys where ``prepare`` runs in a thread of its own; it then needs its own transport
        (``World.group_among(..., lane="keys")``) and ``Traffic``. ``batch``: samples of a rank's microbatch, and
        ``memory_bytes``: memory of a rank for tables (one rank alone: of the host; else left out, without limit), for
        the choice of placements. ``device``: of the vectors, and of the rows of static tables; dynamic tables stay on
        the CPU. ``dtype``: of the rows, instead of the constructor's; ``compute_dtype``: of the vectors, where it is
        another. ``is_led``: an engine calls ``step``, after as many forward passes as it likes.

        Errors: PlanError where a table fits nowhere, or where rows would have fewer than 32 bits.
        """
        if self._group is not None:
            raise UsageError(
                f"embedding: the tables lie on {counted(self._group.size, 'rank')} already; tables are placed once, "
                "before their first use. An engine places them in initialize"
            )
        group = Group("tables", (0,), 0, None, Clock(300.0), Traffic()) if group is None else group
        if memory_bytes is None and group.size == 1:
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._group = group
        self._here, self._ahead = Lane(group, Scratch()), Lane(keys_group or group, Scratch())
        self.device = torch.device("cpu") if device is None else device
        self.dtype = dtype or self.dtype
        self._is_led = is_led
        if self.dtype.itemsize < torch.float32.itemsize:
            raise PlanError(
                f"embedding: rows of {self.dtype} would lose every update below 1/{_ROUNDING[self.dtype]} of a weight; "
                "keep them in torch.float32 (dtype=), and take vectors of 16 bits (compute_dtype=, or an engine's "
                "precision)"
            )
        self._compute_dtype = compute_dtype or self.dtype
        self.choices = plan_tables(self.tables, self.optimizer, group.size, batch, self.dtype, memory_bytes)
        places = {choice.table: choice.place for choice in self.choices}
        if group.size == 1:
            places = dict.fromkeys(places, Place("data_parallel"))
        unlimited = sum(is_unlimited(table.dynamic) for table in self.tables)
        for tables in group_tables(self.tables, places, self.optimizer, group.size):
            way = way_of(tables, group, self.dtype)
            store = Store(tables, group, self.seed, self.dtype, self.device, unlimited)
            self._parts.append(Part(tables, way, store))

        if self._progress_to_load is not None:
            if is_led:  # an engine counts its own steps, and its other optimizer begins anew too
                self._to_load = [
                    (name, Rows.of_weights(rows.keys, rows.weights)) for name, rows in self._to_load
                ]
            else:
                self.load_progress(self._progress_to_load)
            self._progress_to_load = None
        for name, rows in self._to_load:
            self.load_rows(name, of_first_rank(rows, group, f"rows given for table {name}", self.device))
        self._to_load.clear()

    @property
    def is_placed(self) -> bool:
        """True once the tables exist."""
        return self._group is not None

    @property
    def parts(self) -> Sequence[Part]:
        """The groups of tables on this rank."""
        self._settle()
        return self._parts

    @property
    def bytes_here(self) -> int:
        """Memory of weights and optimizer state on this rank, as far as it is taken."""
        return sum(part.store.nbytes for part in self.parts)

    @property
    def tallies(self) -> dict[str, Tally]:
        """Rows in use, inserted and evicted, by table: what this rank speaks for, so that ranks may be summed."""
        return {name: tally for part in self.parts for name, tally in part.store.tallies.items()}

    def describe(self) -> str:
        """A line for each table: where it lies and why."""
        self._settle()
        return "\n".join(map(str, self.choices))

    # A batch -----------------------------------------------------------------------------------------------------

    @property
    def keys_group(self) -> Group:
        """The ranks among which ``prepare`` sends keys."""
        self._settle()
        assert self._ahead is not None, "settled above"
        return self._ahead.group

    @uncompiled
    def prepare(self, features: Mapping[str, Ragged]) -> Prepared:
        """Find the distinct keys of a batch and send them where they are needed; reads no weights, inserts no key.

        For batches to come: goes over ``keys_group``, and may run in one thread of its own. A forward pass on features
        that are not prepared does the same for itself, over ``group``.
        Errors: DataError on every rank where the batch of any is refused.
        """
        self._settle()
        assert self._ahead is not None, "settled above"
        return self._prepare(features, self._ahead)

    def _prepare(self, features: Mapping[str, Ragged], lane: Lane) -> Prepared:
        try:
            samples = batch_size(features)
            asked, weights = [], []
            for part in self._parts:
                names = [feature.name for feature in part.tables.features]
                fused = fuse(part.tables, on_device(part.store.device, features, names), self.dtype)
                weights.append(_live(fused.weights, part))
                if fused.weights is not None:
                    fused = fused._replace(weights=fused.weights.detach())
                asked.append(part.way.ask(fused, lane))
                asked[-1].keeps_vectors = weights[-1] is not None
        except Exception:
            # The others are told in the exchange that they come to next, and end there too.
            with contextlib.suppress(CommError):
                self._numbers([], lane)
            raise
        numbers = self._numbers(asked, lane)
        for part, each, everyone in zip(self._parts, asked, numbers, strict=True):
            part.way.meet(each, everyone, lane)
        flat = {
            feature.name: features[feature.name].offsets.to(self.device)
            for part in self._parts
            for feature in part.tables.features
            if feature.pooling == "none"
        }
        return Prepared(samples, flat, asked, weights=weights)

    def _numbers(self, asked: Sequence[Asked], lane: Lane) -> list[Tensor]:
        """Of each part what leaves every rank for every rank: int64 [N, N, K]. ``asked`` is empty where this rank
        cannot say it."""
        group = lane.group
        if group.size == 1:
            return [each.leaving[None] for each in asked]
        kinds = [part.way.kinds for part in self._parts]
        refused = torch.full((group.size, sum(kinds)), _REFUSED)
        leaving = torch.cat([each.leaving for each in asked], 1) if asked else refused
        everyone = share(leaving, group, "numbers of keys")
        out = [group.ranks[index] for index in (everyone[:, 0, 0] == _REFUSED).nonzero()[:, 0].tolist()]
        if out and asked:
            raise DataError(
                f"embedding: {named_ranks(out)} could not take a part of this batch and said why; the batch was given "
                f"up here, on rank {group.ranks[group.index]}, too"
            )
        return list(everyone.split(kinds, 2))

    @uncompiled
    def forward(self, features: "Mapping[str, Ragged] | Prepared") -> dict[str, Any]:
        """Vectors by feature: [B, D]; [B, n·D] where pooling is concat; ``Sequences`` where it is none."""
        prepared, outputs = self._fetch(features)
        found: dict[str, Any] = {}
        for part, asked, of_part in zip(self._parts, prepared.asked, outputs, strict=True):
            width = part.tables.width
            for (_, start, stop), output in zip(part.tables.runs, of_part, strict=True):
                members = part.tables.features[start:stop]
                if members[0].pooling == "none":
                    found[members[0].name] = Sequences(output, prepared.offsets[members[0].name])
                elif members[0].pooling == "concat":
                    keys = output.shape[0] // prepared.samples if prepared.samples else 0
                    found[members[0].name] = output.view(prepared.samples, keys * width)
                else:
                    # One node for all features: a node for each would sum as many gradients of the whole.
                    vectors = by_feature(output, asked, stop - start, width).unbind(1)
                    found.update(zip((feature.name for feature in members), vectors, strict=True))
        return found

    @uncompiled
    def stacked(self, features: "Mapping[str, Ragged] | Prepared") -> Tensor:
        """All features as one tensor [B, F, D], in the order of ``feature_names``: for interactions of features.

        Every feature is pooled by sum, mean or max, and all tables have one width. Without the copies of stacking the
        vectors of ``forward``, wherever one group has all tables.
        """
        self._settle()
        widths = {part.tables.width for part in self._parts}
        poolings = {feature.pooling for part in self._parts for feature in part.tables.features}
        if len(widths) > 1 or poolings & {"concat", "none"}:
            raise UsageError(
                f"embedding: stacked needs one width and pooled features; here widths {sorted(widths)}, poolings "
                f"{sorted(poolings)}; take the vectors of forward"
            )
        prepared, outputs = self._fetch(features)
        runs = [
            by_feature(output, asked, run.stop - run.start, part.tables.width)
            for part, asked, of_part in zip(self._parts, prepared.asked, outputs, strict=True)
            for run, output in zip(part.tables.runs, of_part, strict=True)
        ]
        return runs[0] if len(runs) == 1 else torch.cat(runs, 1)

    @property
    def feature_names(self) -> list[str]:
        """All features, in the order of ``stacked``."""
        return [feature.name for part in self.parts for feature in part.tables.features]

    def _fetch(self, features: "Mapping[str, Ragged] | Prepared") -> tuple[Prepared, list[list[Tensor]]]:
        self._settle()
        assert self._here is not None, "settled above"
        if isinstance(features, Prepared):
            prepared = features
        else:
            before = features.of(self) if isinstance(features, PreparedFeatures) else None
            prepared = before or self._prepare(features, self._here)
        learns = torch.is_grad_enabled() and self.training
        weighs = torch.is_grad_enabled() and any(weights is not None for weights in prepared.weights)
        if not learns:
            self._check_copy()
        with torch.no_grad():
            fetched = [
                [output.to(self.device) for output in part.way.fetch(each, part.store, learns)]
                for part, each in zip(self._parts, prepared.asked, strict=True)
            ]
        if not learns and not weighs:
            return prepared, [[output.to(self._compute_dtype) for output in of_part] for of_part in fetched]
        if learns:
            if prepared.is_learning:
                raise UsageError(
                    "embedding: a second training forward pass on one prepared batch; prepare it again, or run it "
                    "under torch.no_grad()"
                )
            prepared.is_learning = True
            self._open.append(prepared)
            self._check_steps()
        flat = [output for of_part in fetched for output in of_part]
        anchor = torch.empty(0, dtype=self.dtype, device=self.device, requires_grad=learns)
        outputs = iter(Vectors.apply(anchor, self._parts, prepared, learns, *prepared.weights, *flat))
        return prepared, [[next(outputs).to(self._compute_dtype) for _ in of_part] for of_part in fetched]

    def _check_steps(self) -> None:
        """A loop that never calls ``step`` would keep every batch, and move no row."""
        passes = len(self._open)
        if self._is_led or passes < _MANY_PASSES:
            return
        what = (
            f"embedding: {passes} training forward passes without a step() of the tables, whose rows do not move; call "
            "tables.step() after the optimizer's step, or run passes that are not to learn under torch.no_grad()"
        )
        if passes >= _MOST_PASSES:
            raise UsageError(what)
        if passes == _MANY_PASSES:
            warnings.warn(what, stacklevel=2)

    def _check_copy(self) -> None:
        """A copy made before there were rows has start rows, whatever the original has learnt since."""
        original = None if self._copy_of is None else self._copy_of()
        if original is not None and self.steps == 0 and original.steps > 0:
            raise UsageError(
                "embedding: this collection is a copy that has learnt nothing while its original did, as an average of "
                "weights (AveragedModel) makes one: tables are no parameters and are not averaged. Give it rows "
                "(load_rows, load_state_dict), or evaluate the model itself"
            )

    # Copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles are made of. Errors: UsageError once the tables have rows."""
        if self.is_placed:
            raise UsageError(
                "embedding: tables with rows are not copied or pickled: a copy would not learn with the original, and "
                "a dynamic table takes address space for all rows it may get. Save with engine.save, or "
                "torch.save(model.state_dict()) on one rank, and load it into another model; rows_here(table) gives "
                "the rows of one table. Averages of weights (AveragedModel) leave tables out, so keep them in a model "
                "of the dense part alone"
            )
        return self.__dict__ | {"_copy_of": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmbeddingCollection":
        """Of tables that have no rows yet. Errors: UsageError."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        copied._copy_of = weakref.ref(self)
        return copied

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict`` has of the tables: all rows and their optimizer state, where this rank has all of them.

        Tables that nobody has used yet are all start rows, and tables on several ranks are not carried; both are said.
        """
        if self._group is None:
            return {"format": _STATE_FORMAT, "tables": "unused"}
        if self._group.size > 1:
            _log.warning(
                "the state_dict has no rows of the embedding tables, which lie on %d ranks; engine.save has them",
                self._group.size,
            )
            return {"format": _STATE_FORMAT, "tables": f"on {self._group.size} ranks"}
        return {
            "format": _STATE_FORMAT,
            "progress": self.progress(),
            "tables": {table.name: vars(self.rows_here(table.name)) for table in self.tables},
        }

    def set_extra_state(self, state: Any) -> None:
        """Take what ``get_extra_state`` gave, on every rank the same. Before an engine takes the model: weights alone.

        Errors: MismatchError where it has no rows, or those of other tables.
        """
        found = state.get("tables") if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping) or state.get("format") != _STATE_FORMAT or found is None:
            raise MismatchError("embedding: the state_dict has no state of tables that this version reads")
        if found == "unused":
            if self.is_placed:
                self.load_progress({"steps": 0, "lr_factors": []})
                for table in self.tables:
                    self.restart(table.name)
            return
        if not isinstance(found, Mapping):
            raise MismatchError(
                f"embedding: the state_dict was taken of tables {found}, whose rows are not in it; load what "
                "engine.save wrote"
            )
        given = {name: Rows(**rows) for name, rows in found.items()}
        self._check_given(given)
        if self.is_placed:
            self.clear()
            self.load_progress(state["progress"])
        else:
            self._progress_to_load = dict(state["progress"])
        for name, rows in given.items():
            self.load_rows(name, rows)

    def _check_given(self, given: Mapping[str, Rows]) -> None:
        """Whole tables of the same names, widths and rows."""
        names = {table.name for table in self.tables}
        wrong = [f"table {name!r} is in one of them alone" for name in sorted(names ^ given.keys())]
        for table in self.tables:
            if table.name in given:
                there, rows = given[table.name].weights.shape, table.rows
                is_static = given[table.name].scores is None
                if there[1] != table.width or is_static != (rows is not None) or rows not in (None, there[0]):
                    kind = "static" if is_static else "dynamic"
                    wrong.append(
                        f"table {table.name!r} is {kind}, {there[0]} x {there[1]} there and {rows or 'dynamic'} x "
                        f"{table.width} here"
                    )
        if wrong:
            raise MismatchError(f"embedding: a state_dict of other tables: {'; '.join(wrong[:5])}")

    # The step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def deliver(self) -> None:
        """Bring the gradients of all forward passes since the last step to the owners of the rows.

        Once a step, after its last backward pass. Collective: a rank whose loss does not depend on the vectors brings
        zeros. Without a forward pass since the last call it does nothing.

        Errors: TableFullError on all ranks alike where a table would have more rows than its capacity and evicts none
        for it. The new keys of the step are forgotten then, and its gradients: rows are those of the step before.
        """
        if not self._open:
            return
        self._check_room()
        open_passes, self._open = self._open, []
        for prepared in open_passes:
            for part, asked in zip(self._parts, prepared.asked, strict=True):
                part.way.deliver(asked, part.store)

    def _check_room(self) -> None:
        """One small all-reduce where a table has a capacity and evicts nothing for it; else free."""
        assert self._group is not None, "asked of placed tables"
        capped = [(part.store, table) for part in self._parts for table in part.store.capped]
        if not capped:
            return
        here = [table.rows_after(self.steps + 1) * store.speaks for store, table in capped]
        rows = torch.tensor(here, dtype=torch.float64, device=self.device)
        self._group.all_reduce(rows, "rows of tables", "control").wait()
        for (_, table), total in zip(capped, rows.tolist(), strict=True):
            if table.capacity is not None and total > table.capacity:
                self.drop_gradients()
                raise TableFullError(
                    f"table {table.name!r} would have {total:.0f} rows of at most {table.capacity} after this step, "
                    "and evicts none for that; raise dynamic.capacity (or budget_bytes), admit fewer keys, or set "
                    "dynamic.eviction.type: lru or lfu"
                )

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """Σ g² over the delivered gradients of the rows that this rank owns, fp64: summed over the ranks, that of all
        tables."""
        squares = torch.zeros((), dtype=torch.float64)
        for part in self._parts:
            squares = squares + part.store.square_sum().cpu()
        return squares

    @torch.no_grad()
    def step(self, lr_factor: float = 1.0, divisor: float = 1.0, max_norm: float | None = None) -> None:
        """Update the rows that got gradients since the last step, delivered here if ``deliver`` was not called.

        Gradients are sums over ranks and microbatches; ``divisor`` makes means of them (an engine puts loss scale and
        clipping in it too). ``lr_factor`` is the schedule's. ``max_norm`` clips by the norm over these tables alone.
        Errors: TableFullError, as ``deliver``'s.
        """
        self._settle()
        assert self._group is not None, "settled above"
        self.deliver()
        if max_norm is not None:
            squares = self.square_sum().reshape(1).to(self.device)
            self._group.all_reduce(squares, "the gradient norm of the tables", "control").wait()
            norm = float(squares.sqrt()) / divisor
            divisor = divisor / clip_factor(norm, max_norm)
        self.steps += 1
        if any((table.optimizer or self.optimizer).exact for table in self.tables):
            self._lr_factors.append(lr_factor)
        for part in self._parts:
            part.store.step(self.steps, lr_factor, divisor)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step, and the keys that came: it is skipped (an overflow, an exception).

        Rows, scores and keys that wait for admission are those of the step before. An engine does it by itself; a loop
        of your own calls it where it catches what a batch raised and goes on with the next one.
        """
        self._open.clear()
        for part in self._parts:
            part.store.drop()

    # Rows in and out ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rows_here(self, table: str) -> Rows:
        """What this rank holds of a table: keys, weights, optimizer state, scores; ordered by (bucket, key)."""
        part, place = self._find(table)
        return part.store.rows_here(place)

    @torch.no_grad()
    def load_rows(self, table: str, rows: Rows) -> None:
        """Take from ``rows`` what this rank holds of the table; of a dynamic one, keys it has not get a row.

        Before the tables have a place the rows wait for it.
        """
        if not self.is_placed:
            self._check_name(table)
            self._to_load.append((table, rows))
            return
        part, place = self._find(table)
        part.store.load_rows(place, rows)

    @torch.no_grad()
    def rows_to_write(self, table: str) -> tuple[Stretch, Stretch | None]:
        """What this rank writes of a table into a checkpoint, and of its keys that wait for admission. Collective."""
        assert self._group is not None, "asked of placed tables"
        part, place = self._find(table)
        group, where = self._group, part.tables.places[place]
        is_copy = where.placement == "data_parallel" and group.size > 1
        rows = part.store.rows_here(place, (group.index, group.size) if is_copy else None)
        width, what = part.tables.width, f"table {table}"
        stretch = stretch_to_write(rows, self.buckets(table, rows.keys), where, width, group, what)
        if rows.candidates is None:
            return stretch, None
        keys, scores = rows.candidates.unbind(1)
        buckets = self.buckets(table, keys)
        order = buckets.argsort(stable=True)  # they come by key
        if where.placement in ("data_parallel", "column"):  # every rank knows all of them
            order = order[writer_of(buckets[order], group.size) == group.index]
            where = Place("data_parallel")
        waiting = Rows(keys[order], torch.empty(order.numel(), 0, dtype=self.dtype), scores=scores[order])
        return stretch, stretch_to_write(waiting, buckets[order], where, 0, group, what)

    def place_of(self, table: str) -> tuple[Place, Group]:
        """Where a table lies, and over which ranks."""
        assert self._group is not None, "asked of placed tables"
        part, place = self._find(table)
        return part.tables.places[place], self._group

    def state_names(self, table: str) -> list[str]:
        """Optimizer state that a row of a table has beside its weights."""
        return self._find(table)[0].store.state_names()

    @torch.no_grad()
    def restart(self, table: str) -> None:
        """Forget what a table has learnt: start rows, and of a dynamic one no keys."""
        part, place = self._find(table)
        part.store.restart(place)

    @torch.no_grad()
    def clear(self) -> None:
        """Forget the keys of dynamic tables, and gradients that wait: before other rows are loaded."""
        self._open.clear()
        for part in self.parts:
            part.store.clear()

    @torch.no_grad()
    def load_candidates(self, table: str, candidates: Tensor) -> None:
        """Keys that wait for admission, and their scores: int64 [m, 2]."""
        part, place = self._find(table)
        part.store.load_candidates(place, candidates)

    @torch.no_grad()
    def load_bag(self, table: str, bag: nn.EmbeddingBag | nn.Embedding) -> None:
        """Take the weights of torch's module for a table."""
        weight = bag.weight.detach().cpu()
        self.load_rows(table, Rows.of_weights(torch.arange(weight.shape[0]), weight.to(self.dtype)))

    def buckets(self, table: str, keys: Tensor) -> Tensor:
        """Logical bucket of each key of a table, 0 to ``layout.BUCKETS`` - 1: the same on any number of ranks."""
        part, _ = self._find(table)
        return dynamic_bucket(keys) if part.tables.is_dynamic else static_bucket(keys)

    def progress(self) -> dict[str, Any]:
        """What is no row and must be saved: the steps done and their factors of the learning rate; alike on all ranks.

        Exact Adam replays steps by their rates. Of other optimizers the number of steps is enough, and the factors are
        left out.
        """
        return {"steps": self.steps, "lr_factors": list(self._lr_factors)}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on from there: before rows are loaded."""
        self.steps = int(progress["steps"])
        self._lr_factors = [float(factor) for factor in progress["lr_factors"]]
        for part in self.parts:
            part.store.resume(self.steps, self._lr_factors)

    def _find(self, table: str) -> tuple[Part, int]:
        self._check_name(table)
        places = [
            (part, place)
            for part in self.parts
            for place, policy in enumerate(part.tables.tables)
            if policy.name == table
        ]
        return places[0]

    def _check_name(self, table: str) -> None:
        names = [policy.name for policy in self.tables]
        if table not in names:
            raise UsageError(f"embedding: there is no table {table!r}{nearest(table, names)}")

    def _settle(self) -> None:
        """Tables that nobody placed lie on one rank."""
        if self._group is None:
            self.place()

    def _check_names(self) -> None:
        if not self.tables:
            raise PlanError("embedding: a collection of no tables; give at least one TablePolicy")
        for what, names in (
            ("table", [table.name for table in self.tables]),
            ("feature", [name for table in self.tables for name in table.feature_names]),
        ):
            twice = _first_twice(names)
            if twice is not None:
                hint = " (features of one table: features=(...))" if what == "table" else ""
                raise PlanError(f"embedding: {what} {twice!r} is there twice; names are told apart{hint}")

    def extra_repr(self) -> str:
        """One line for each table."""
        return "\n".join(
            f"{table.name}: {table.rows or 'dynamic'} x {table.width}, {', '.join(table.feature_names)}"
            for table in self.tables
        )


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """The collections of a model by their names in it, in the order of registration: what an engine takes over."""
    return {name: module for name, module in model.named_modules() if isinstance(module, EmbeddingCollection)}


def _live(weights: Tensor | None, part: Part) -> Tensor | None:
    """Weights of keys that want gradients."""
    if weights is None or not weights.requires_grad:
        return None
    if not part.way.sees_rows:
        raise DataError(
            f"embedding: weights of keys of {part.tables} want gradients, and this table sends sums, from which they "
            "do not follow; give it sends: rows, or detach the weights"
        )
    return weights


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
