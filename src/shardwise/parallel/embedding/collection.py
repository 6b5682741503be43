"""EmbeddingCollection: the module. Features of a batch in, one vector a sample and feature out.

    tables = EmbeddingCollection([TablePolicy(name="user", rows=1_000_000, width=16), ...])
    vectors = tables({"user": Ragged(values, offsets), ...})          # {"user": [B, 16], ...}
    loss(vectors).backward()
    tables.step()                                                     # under an engine its own step does it

forward, prepare and step are collective: every rank calls them in the same order, a rank that has run out of data with
empty features (``Ragged.of_lists([])``). What they do on the placed tables stands in placed.py.

The weights are no parameters: a gradient of a whole table never exists, and no other optimizer may touch them. They are
plain tensors of the stores, each rank holding what its placement gives it. ``state_dict`` carries them where one rank
has all, rows with their optimizer state; else it says that it does not, and an engine saves them (saved_rows.py).

Shapes: B samples, D width, F features.
"""

import contextlib
import copy
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.parallel.embedding.ahead import PreparedFeatures
from shardwise.parallel.embedding.batch import Prepared, Sequences, by_feature
from shardwise.parallel.embedding.placed import PlacedTables, check_table, grouped, make_parts
from shardwise.parallel.embedding.planner import Choice, plan_tables
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows import Rows, Tally
from shardwise.parallel.embedding.saved import of_first_rank
from shardwise.parallel.embedding.saved_rows import SavedRows
from shardwise.plan.errors import MismatchError, PlanError, UsageError
from shardwise.plan.ragged import Ragged
from shardwise.plan.words import counted

_log = logging.getLogger(__name__)

_ROUNDING = {torch.bfloat16: 256, torch.float16: 2048}
"""Half a unit in the last place of 1."""
_STATE_FORMAT = 1
_SHOWN = 10
"""Features that a warning lists."""
Fill = Callable[[tuple[int, ...], torch.dtype], Tensor]
Bring = Callable[[Tensor], Tensor]


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
        self._ranks = 0
        """For how many ranks that was chosen."""
        self._placed: PlacedTables | None = None
        self._to_load: list[tuple[str, Rows]] = []
        """Rows that were given before the tables had a place."""
        self._progress_to_load: Mapping[str, Any] | None = None
        self._read_elsewhere: frozenset[str] = frozenset()
        """Features that other collections of the model read."""
        self._has_looked = False
        """True once the names of a batch's features were looked through."""
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
        memory_bytes: float | None = None,
        host_memory_bytes: float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        is_led: bool = False,
    ) -> None:
        """Spread the tables over the ranks of ``group`` and draw their start rows; once, on all ranks alike.

        ``keys_group`` carries keys where ``prepare`` runs in a thread of its own; it then needs its own transport
        (``World.group_among(..., lane="keys")``) and ``Traffic``. For the choice of placements: ``batch``, samples of a
        rank's microbatch; ``memory_bytes``, memory of a rank for tables (left out: one rank alone on a CPU takes the
        host's, else there is no limit); ``host_memory_bytes``, for dynamic ones, where it is another (left out: on an
        accelerator without limit). ``device``: of the vectors, and of the rows of static tables; dynamic tables stay
        on the CPU. ``dtype``: of the rows, instead of the constructor's; ``compute_dtype``: of the vectors, where it is
        another. ``is_led``: an engine calls ``step``, after as many forward passes as it likes.

        Errors: PlanError where a table fits nowhere, or where rows would have fewer than 32 bits.
        """
        if self._placed is not None:
            raise UsageError(
                f"embedding: the tables lie on {counted(self._placed.group.size, 'rank')} already; tables are placed "
                "once, before their first use. An engine places them in initialize"
            )
        group = Group.alone("tables") if group is None else group
        device = torch.device("cpu") if device is None else device
        if device.type != "cpu" and host_memory_bytes is None:
            host_memory_bytes = math.inf
        elif memory_bytes is None and group.size == 1:
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        dtype = self.choose(
            group.size,
            batch=batch,
            memory_bytes=memory_bytes,
            host_memory_bytes=host_memory_bytes,
            dtype=dtype,
        )
        parts = make_parts(self.tables, self.optimizer, self.choices, group, self.seed, dtype, device)
        self._placed = PlacedTables(
            parts, group, keys_group or group, device, dtype, compute_dtype or dtype, is_led
        )
        self._load_given(is_led)

    def choose(
        self,
        ranks: int,
        *,
        batch: int = 1024,
        memory_bytes: float | None = None,
        host_memory_bytes: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.dtype:
        """Choose where each table is to lie on ``ranks`` (``choices``), without placing it; returns the dtype of rows.

        Arguments and errors as ``place``'s.
        """
        dtype = dtype or self.dtype
        if dtype.itemsize < torch.float32.itemsize:
            raise PlanError(
                f"embedding: rows of {dtype} would lose every update below 1/{_ROUNDING[dtype]} of a weight; "
                "keep them in torch.float32 (dtype=), and take vectors of 16 bits (compute_dtype=, or an engine's "
                "precision)"
            )
        self.dtype = dtype
        self._ranks = ranks
        self.choices = plan_tables(
            self.tables, self.optimizer, ranks, batch, dtype, memory_bytes, host_memory_bytes
        )
        return dtype

    def share_given(self, group: Group, device: torch.device) -> None:
        """Rows that wait for a place become those of the first rank of ``group``, as weights do. Collective."""
        self._to_load = [
            (name, of_first_rank(rows, group, f"rows given for table {name}", device))
            for name, rows in self._to_load
        ]

    def _load_given(self, is_led: bool) -> None:
        """What was to be loaded before the tables had a place."""
        given, self._to_load = self._to_load, []
        progress, self._progress_to_load = self._progress_to_load, None
        if (
            progress is not None and is_led
        ):  # an engine counts its own steps, and its dense state begins anew too
            given = [(name, Rows.of_weights(rows.keys, rows.weights)) for name, rows in given]
        elif progress is not None:
            self.saved.load_progress(progress)
        for name, rows in given:
            what = f"rows given for table {name}"
            self.load_rows(name, of_first_rank(rows, self.placed.group, what, self.placed.device))

    @property
    def is_placed(self) -> bool:
        """True once the tables exist."""
        return self._placed is not None

    @property
    def placed(self) -> PlacedTables:
        """The placed tables, and the acts of a step on them. Tables that nobody placed lie on one rank."""
        if self._placed is None:
            self.place()
        assert self._placed is not None, "placed above"
        return self._placed

    @property
    def saved(self) -> SavedRows:
        """The rows as checkpoints have them."""
        return SavedRows(self.placed)

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return 0 if self._placed is None else self._placed.steps

    @property
    def bytes_here(self) -> int:
        """Memory of weights and optimizer state on this rank, as far as it is taken."""
        return self.placed.nbytes

    @property
    def tallies(self) -> dict[str, Tally]:
        """Rows in use, inserted and evicted, by table: what this rank counts, so that ranks may be summed."""
        return self.placed.tallies

    @property
    def feature_names(self) -> list[str]:
        """All features, in the order of ``stacked``."""
        if not self.choices:
            self.place()
        groups = (
            grouped(self.tables, self.optimizer, self.choices, self._ranks)
            if self._placed is None
            else [part.tables for part in self._placed.parts]
        )
        return [feature.name for group in groups for feature in group.features]

    def describe(self) -> str:
        """A line for each table: where it lies and why."""
        if not self.is_placed:
            self.place()
        return "\n".join(map(str, self.choices))

    # A batch -----------------------------------------------------------------------------------------------------

    @uncompiled
    def prepare(self, features: Mapping[str, Ragged]) -> Prepared:
        """Find the distinct keys of a batch and send them where they are needed; reads no weights, inserts no key.

        For batches to come: goes over the group for keys, and may run in one thread of its own. A forward pass on
        features that are not prepared does the same for itself, over the group of the vectors.
        Errors: DataError on every rank where the batch of any is refused.
        """
        return self.placed.prepare(features, ahead=True)

    @uncompiled
    def forward(self, features: "Mapping[str, Ragged] | Prepared") -> dict[str, Any]:
        """Vectors by feature: [B, D]; [B, n·D] where pooling is concat; ``Sequences`` where it is none."""
        prepared, outputs = self._vectors(features)
        found: dict[str, Any] = {}
        for part, asked, of_part in zip(self.placed.parts, prepared.asked, outputs, strict=True):
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
        widths = {part.tables.width for part in self.placed.parts}
        poolings = {feature.pooling for part in self.placed.parts for feature in part.tables.features}
        if len(widths) > 1 or poolings & {"concat", "none"}:
            raise UsageError(
                f"embedding: stacked needs one width and pooled features; here widths {sorted(widths)}, poolings "
                f"{sorted(poolings)}; take the vectors of forward"
            )
        prepared, outputs = self._vectors(features)
        runs = [
            by_feature(output, asked, run.stop - run.start, part.tables.width)
            for part, asked, of_part in zip(self.placed.parts, prepared.asked, outputs, strict=True)
            for run, output in zip(part.tables.runs, of_part, strict=True)
        ]
        return runs[0] if len(runs) == 1 else torch.cat(runs, 1)

    def note_read_elsewhere(self, names: Iterable[str]) -> None:
        """Take features that other collections of the model read, which this one does not name as unread."""
        self._read_elsewhere |= frozenset(names)

    def _tell_of_unread(self, features: Mapping[str, Ragged]) -> None:
        """Log once which features of the first batch no table reads: a misspelt name, perhaps."""
        self._has_looked = True
        known = {name for table in self.tables for name in table.feature_names}
        unread = sorted(map(str, features.keys() - known - self._read_elsewhere))
        if unread:
            _log.warning(
                "embedding: no table reads %s of the batch; the tables read %s. Name features in TablePolicy's "
                "features, or leave them out of the batch",
                _listed(unread),
                _listed(sorted(known)),
            )

    def _vectors(self, features: "Mapping[str, Ragged] | Prepared") -> tuple[Prepared, list[list[Tensor]]]:
        learns = torch.is_grad_enabled() and self.training
        if isinstance(features, Prepared):
            prepared = features
        else:
            if not self._has_looked and isinstance(features, Mapping):
                self._tell_of_unread(features)
            before = features.of(self) if isinstance(features, PreparedFeatures) else None
            prepared = before or self.placed.prepare(features)
        if not learns:
            self._check_copy()
        return prepared, self.placed.fetch(prepared, learns)

    def elsewhere(self, name: str, fill: Fill, bring: Bring) -> "AbsentCollection":
        """What stands for this collection on other pipeline stages than its own."""
        return AbsentCollection(self, name, fill, bring)

    # The step ----------------------------------------------------------------------------------------------------

    def step(self, lr_factor: float = 1.0, divisor: float = 1.0, max_norm: float | None = None) -> None:
        """Update the rows that got gradients since the last step.

        Gradients are sums over ranks and microbatches; ``divisor`` makes means of them (an engine puts loss scale and
        clipping in it too). ``lr_factor`` is the schedule's. ``max_norm`` clips by the norm over these tables alone.

        Errors: TableFullError on all ranks alike where a table would have more rows than its capacity and evicts none
        for it; rows are those of the step before then.
        """
        self.placed.step(lr_factor, divisor, max_norm)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step, and the keys that came: it is skipped (an overflow, an exception).

        Rows, scores and keys that wait for admission are those of the step before. An engine does it by itself; a loop
        of your own calls it where it catches what a batch raised and goes on with the next one.
        """
        self.placed.drop()

    # Rows in and out ---------------------------------------------------------------------------------------------

    def rows_here(self, table: str) -> Rows:
        """What this rank holds of a table: keys, weights, optimizer state, scores; ordered by (bucket, key)."""
        return self.saved.rows_here(table)

    def load_rows(self, table: str, rows: Rows) -> None:
        """Take from ``rows`` what this rank holds of the table; a dynamic one gets a row for each key it lacks.

        Before the tables have a place the rows wait for it.
        """
        if self.is_placed:
            self.saved.load_rows(table, rows)
        else:
            check_table(table, [policy.name for policy in self.tables])
            self._to_load.append((table, rows))

    def load_bag(self, table: str, bag: nn.EmbeddingBag | nn.Embedding) -> None:
        """Take the weights of torch's module for a table."""
        weight = bag.weight.detach().cpu()
        self.load_rows(table, Rows.of_weights(torch.arange(weight.shape[0]), weight.to(self.dtype)))

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
        copied._has_looked = True  # the original tells
        return copied

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict`` has of the tables: all rows and their optimizer state, where this rank has all of them.

        Tables that nobody has used yet are all start rows, and tables on several ranks are not carried; both are said.
        """
        if self._placed is None:
            return {"format": _STATE_FORMAT, "tables": "unused"}
        if self._placed.group.size > 1:
            _log.warning(
                "the state_dict has no rows of the embedding tables, which lie on %d ranks; engine.save has them",
                self._placed.group.size,
            )
            return {"format": _STATE_FORMAT, "tables": f"on {self._placed.group.size} ranks"}
        return {
            "format": _STATE_FORMAT,
            "progress": self.saved.progress(),
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
                self.saved.load_progress({"steps": 0, "lr_factors": []})
                for table in self.tables:
                    self.saved.restart(table.name)
            return
        if not isinstance(found, Mapping):
            raise MismatchError(
                f"embedding: the state_dict was taken of tables {found}, whose rows are not in it; load what "
                "engine.save wrote"
            )
        given = {name: Rows(**rows) for name, rows in found.items()}
        self._check_given(given)
        if self.is_placed:
            self.saved.clear()
            self.saved.load_progress(state["progress"])
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


class AbsentCollection(EmbeddingCollection):
    """Stands for a collection that lives on another pipeline stage: vectors of its shapes that hold nothing.

    ``fill(shape, dtype)`` makes them, where the stage computes; features lie on the host, and ``bring`` takes what a
    model gets of them there.
    """

    calls = ("forward", "stacked")
    """What a model asks for vectors by."""

    def __init__(self, stands_for: EmbeddingCollection, name: str, fill: Fill, bring: Bring):
        super().__init__(stands_for.tables, stands_for.optimizer, stands_for.seed, stands_for.dtype)
        self._stands_for = (stands_for,)  # in a tuple: no child of this module
        self._name = name
        self._fill = fill
        self._bring = bring

    @property
    def placed(self) -> PlacedTables:
        """Not here. Errors: UsageError."""
        raise UsageError(f"embedding: the collection {self._name!r} lives on another pipeline stage")

    @property
    def feature_names(self) -> list[str]:
        """As of the collection itself."""
        (collection,) = self._stands_for
        return collection.feature_names

    def forward(self, features: "Mapping[str, Ragged] | Prepared") -> dict[str, Any]:
        """Fillers of the shapes of ``EmbeddingCollection.forward``."""
        assert not isinstance(features, Prepared), "a model hands over features"
        found: dict[str, Any] = {}
        for table in self.tables:
            for name in table.feature_names:
                ragged, pooling = features[name], table.pooling_of(name)
                keys = ragged.values.numel()
                if pooling == "none":
                    vectors = self._fill((keys, table.width), self.dtype)
                    found[name] = Sequences(vectors, self._bring(ragged.offsets))
                    continue
                columns = keys // max(ragged.samples, 1) if pooling == "concat" else 1
                shape = (ragged.samples, columns * table.width)
                found[name] = self._fill(shape, self.dtype)
        return found

    def stacked(self, features: "Mapping[str, Ragged] | Prepared") -> Tensor:
        """Fillers of the shapes of ``EmbeddingCollection.stacked``."""
        found = self.forward(features)
        return torch.stack([found[name] for table in self.tables for name in table.feature_names], 1)


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Collections that passes inside place have no place again at the end."""
    before = [(each, dict(vars(each))) for each in collections_of(model).values()]
    try:
        yield
    finally:
        for collection, attributes in before:
            attributes["_has_looked"] = collection._has_looked
            vars(collection).clear()
            vars(collection).update(attributes)


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """The collections of a model by their names in it, in the order of registration: what an engine takes over."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingCollection) and not isinstance(module, AbsentCollection)
    }


def _listed(names: Sequence[str]) -> str:
    """Return the names with commas between, at most ten of them."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
