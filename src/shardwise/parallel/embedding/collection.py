"""EmbeddingCollection: the module that turns the features of a batch into one vector for each sample and feature.

    tables = EmbeddingCollection([TablePolicy(name="user", rows=1_000_000, width=16), ...])
    vectors = tables({"user": Ragged(values, offsets), ...})          # {"user": [B, 16], ...}
    loss(vectors).backward()
    tables.step()                                                     # under an engine, engine.step() calls this

forward, prepare and step are collective: every rank calls them in the same order, and a rank that has run out of data
passes empty features (``Ragged.of_lists([])``). placed.py contains the operations on the placed tables.

The weights are no parameters: a gradient of a whole table never exists, and no other optimizer may touch them. They
are plain tensors of the stores, and each rank holds the part that the placement assigns to the rank. If one rank holds
all rows, ``state_dict`` contains them with their optimizer state; otherwise it logs that the rows are missing, and an
engine saves them (saved_rows.py).

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

from shardwise.base.errors import MismatchError, PlanError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.base.words import counted
from shardwise.comm.collectives import Group
from shardwise.comm.duals import apart
from shardwise.comm.rendezvous.environment import sets_heap
from shardwise.kernels.tables.wire import WireName
from shardwise.observe.memory import keep_freed_memory
from shardwise.parallel.embedding.ahead import PreparedFeatures
from shardwise.parallel.embedding.batch import PreparedKeys, SequenceVectors, by_feature
from shardwise.parallel.embedding.placed import PlacedTables, check_table, grouped, make_parts
from shardwise.parallel.embedding.planner import PlacementChoice, plan_tables
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows, RowTally
from shardwise.parallel.embedding.rows.saved_rows import SavedRows
from shardwise.parallel.embedding.rules import check_dtypes
from shardwise.parallel.embedding.saved import of_first_rank

_log = logging.getLogger(__name__)

_ROUNDING = {torch.bfloat16: 256, torch.float16: 2048}
"""Reciprocal of half a unit in the last place of 1, by dtype."""
_STATE_FORMAT = 1
_SHOWN = 10
"""Number of features that a warning lists."""
Fill = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Function from (shape, dtype) to a tensor that stands for vectors of another pipeline stage."""
Bring = Callable[[Tensor], Tensor]
"""Function that moves a tensor of features from the host to the device on which the stage computes."""


class EmbeddingCollection(nn.Module):
    """Embedding tables and the features that read them.

    Args:
        tables: the tables, each with its features; a feature belongs to one table.
        optimizer: optimizer of the tables that have none of their own; None is row-wise Adagrad.
        seed: start rows are functions of (seed, table, key).
        dtype: dtype of gradients and updates, and of rows unless ``TablePolicy.dtype`` gives them another.

    Example:
        >>> tables = EmbeddingCollection([TablePolicy(name="user", rows=1_000_000, width=16)])
        >>> vectors = tables({"user": Ragged.of_ones(keys)})          # {"user": [B, 16]}
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
        self.wire: WireName = "fp32"
        """Form in which vectors and gradients travel between ranks, given where placements are chosen."""
        self.choices: list[PlacementChoice] = []
        """Placement of each table, with the reason for the choice."""
        self._ranks = 0
        """Number of ranks for which ``choices`` was made."""
        self._placed: PlacedTables | None = None
        self._to_load: list[tuple[str, KeyedRows]] = []
        """Rows that were loaded before the tables were placed, by table name."""
        self._progress_to_load: Mapping[str, Any] | None = None
        self._read_elsewhere: frozenset[str] = frozenset()
        """Features that other collections of the model read."""
        self._has_looked = False
        """True once the feature names of a batch have been compared with those of the tables."""
        self._ended = ""
        """The reason why the rows are gone; empty if they are not."""
        self._copy_of: weakref.ref[EmbeddingCollection] | None = None
        """The original, if this collection is a copy that was made before the tables had rows."""
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
        wire: WireName = "fp32",
        is_led: bool = False,
    ) -> None:
        """Spread the tables over the ranks of ``group`` and draw their start rows. Collective, and allowed once.

        Args:
            group: ranks that hold the tables; None keeps the tables on this rank.
            keys_group: group that carries keys if ``prepare`` runs in a separate thread. It then needs its own
                transport (``World.group_among(..., lane="keys")``) and ``Traffic``. None uses ``group``.
            batch: samples of a rank's microbatch, for the choice of placements.
            memory_bytes: memory of a rank for tables, for the choice of placements. None means the host's memory for a
                single rank on a CPU, and no limit otherwise.
            host_memory_bytes: memory of a rank's host for dynamic tables, if they lie in another memory than static
                ones. None means no limit on an accelerator.
            device: device of the vectors and of the rows of static tables; dynamic tables stay on the CPU.
            dtype: dtype of updates and of rows without one of their own; None takes the constructor's.
            compute_dtype: dtype of the vectors; None takes ``dtype``.
            wire: form in which vectors and gradients travel between ranks, as ``TablesPolicy.wire``.
            is_led: True if an engine calls ``step``, after any number of forward passes.

        Raises:
            UsageError: if the tables are placed already.
            PlanError: if a table fits nowhere, or if the dtypes of a table do not go together.
        """
        self._check_unplaced()
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
            wire=wire,
        )
        if device.type == "cpu" and not sets_heap():
            keep_freed_memory()
        parts = make_parts(self.tables, self.optimizer, self.choices, group, self.seed, dtype, device, wire)
        self._placed = PlacedTables(
            parts, group, keys_group or group, device, dtype, compute_dtype or dtype, is_led
        )
        self._load_given(is_led)

    def _check_unplaced(self) -> None:
        """Raise UsageError if the tables are placed, or if their rows are gone."""
        self._check_not_ended()
        if self._placed is not None:
            raise UsageError(
                f"embedding: the tables lie on {counted(self._placed.group.size, 'rank')} already; tables are placed "
                "once, before their first use. An engine places them in initialize"
            )

    def _check_not_ended(self) -> None:
        """Raise UsageError if the rows are gone."""
        if self._ended:
            raise UsageError(
                f"embedding: the rows of table {self.tables[0].name!r} and the others went with the engine that was "
                f"closed, because {self._ended}. Save before close, build the model anew, and load into its engine"
            )

    def rows_to_hand_on(self) -> tuple[dict[str, Any], torch.dtype] | None:
        """Return a copy of all rows for ``hand_on``, when an engine ends; None if they are not all in this memory.

        Returns:
            (what ``set_extra_state`` takes, dtype of updates).
        """
        if self._placed is None or self._placed.group.size > 1 or any(each.tiers for each in self.tables):
            return None
        return self.get_extra_state(), self.dtype

    def hand_on(self, rows: tuple[dict[str, Any], torch.dtype] | None, why: str) -> None:
        """Keep rows that an engine leaves to plain torch or to the next engine, once the tables are no longer placed.

        Args:
            rows: what ``rows_to_hand_on`` returned before; None refuses every later use.
            why: reason why there are no rows, for the refusal.
        """
        if rows is None:
            self._ended = why
        else:
            state, self.dtype = rows
            self.set_extra_state(state)

    def choose(
        self,
        ranks: int,
        *,
        batch: int = 1024,
        memory_bytes: float | None = None,
        host_memory_bytes: float | None = None,
        dtype: torch.dtype | None = None,
        wire: WireName = "fp32",
    ) -> torch.dtype:
        """Choose where each table is to lie on ``ranks`` ranks, without placing it; return the dtype of updates.

        The result is stored in ``choices``.

        Args:
            ranks: number of ranks.
            batch: as in ``place``.
            memory_bytes: as in ``place``; None is without limit.
            host_memory_bytes: as in ``place``; None means that dynamic tables share ``memory_bytes`` with static ones.
            dtype: dtype of updates and of rows without one of their own; None takes the constructor's.
            wire: as in ``place``.

        Raises:
            PlanError: if a table fits nowhere, or if the dtypes of a table do not go together.
        """
        dtype = dtype or self.dtype
        if dtype.itemsize < torch.float32.itemsize:
            raise PlanError(
                f"embedding: updates in {dtype} would lose everything below 1/{_ROUNDING[dtype]} of a weight; keep "
                "the collection in torch.float32 (dtype=), store rows of 16 bits by TablePolicy(dtype='bf16'), and "
                "take vectors of 16 bits by compute_dtype= or an engine's precision"
            )
        for table in self.tables:
            check_dtypes(table, table.optimizer or self.optimizer, dtype)
        self.dtype = dtype
        self.wire = wire
        self._ranks = ranks
        self.choices = plan_tables(
            self.tables, self.optimizer, ranks, batch, dtype, memory_bytes, host_memory_bytes, wire=wire
        )
        return dtype

    def share_given(self, group: Group, device: torch.device) -> None:
        """Replace the rows that were loaded before placement by those of the first rank of ``group``. Collective.

        Weights of dense parameters are shared in the same way.

        Args:
            group: ranks that share the rows.
            device: device on which the rows travel.
        """
        self._to_load = [
            (name, of_first_rank(rows, group, f"rows given for table {name}", device))
            for name, rows in self._to_load
        ]

    def _load_given(self, is_led: bool) -> None:
        """Load the rows and the progress that were given before the tables were placed."""
        given, self._to_load = self._to_load, []
        progress, self._progress_to_load = self._progress_to_load, None
        if (
            progress is not None and is_led
        ):  # an engine counts its own steps and starts its dense optimizer state anew, so only weights are taken
            given = [(name, KeyedRows.of_weights(rows.keys, rows.weights)) for name, rows in given]
        elif progress is not None:
            self.saved.load_progress(progress)
        for name, rows in given:
            what = f"rows given for table {name}"
            self.load_rows(name, of_first_rank(rows, self.placed.group, what, self.placed.device))

    @property
    def is_placed(self) -> bool:
        """True once the tables are placed."""
        return self._placed is not None

    @property
    def placed(self) -> PlacedTables:
        """The placed tables and the operations of a step on them.

        Reading this property places the tables on one rank if they are not placed yet.
        """
        if self._placed is None:
            self.place()
        assert self._placed is not None, "placed above"
        return self._placed

    @property
    def saved(self) -> SavedRows:
        """The rows of the tables in the form that checkpoints use."""
        return SavedRows(self.placed)

    @property
    def steps(self) -> int:
        """Number of optimizer steps done."""
        return 0 if self._placed is None else self._placed.steps

    @property
    def bytes_here(self) -> int:
        """Bytes of memory that weights and optimizer state take on this rank so far."""
        return self.placed.nbytes

    @property
    def tallies(self) -> dict[str, RowTally]:
        """Rows in use, inserted and evicted, by table. Each row counts on one rank, so that ranks may be summed."""
        return self.placed.tallies

    @property
    def feature_names(self) -> list[str]:
        """Names of all features, in the order of ``stacked``."""
        if not self.choices:
            self.place()
        groups = (
            grouped(self.tables, self.optimizer, self.choices, self._ranks)
            if self._placed is None
            else [part.tables for part in self._placed.parts]
        )
        return [feature.name for group in groups for feature in group.features]

    def describe(self) -> str:
        """Return one line for each table with its placement and the reason for the choice."""
        if not self.is_placed:
            self.place()
        return "\n".join(map(str, self.choices))

    # A batch -----------------------------------------------------------------------------------------------------

    @apart
    def prepare(self, features: Mapping[str, Ragged]) -> PreparedKeys:
        """Find the distinct keys of a future batch and send them to the owners of their rows. Collective.

        No weights are read and no key is inserted. The keys travel over the group for keys, so this method may run in a
        separate thread. A forward pass on features that are not prepared does the same work over the group of the
        vectors.

        Args:
            features: keys of the batch, by feature name.

        Returns:
            The prepared batch, which ``forward`` and ``stacked`` accept in place of features.

        Raises:
            DataError: on every rank, if the batch of any rank is refused.
        """
        return self.placed.prepare(features, ahead=True)

    @apart
    def forward(self, features: "Mapping[str, Ragged] | PreparedKeys") -> dict[str, Any]:
        """Return the vectors of a batch by feature name. Collective.

        Args:
            features: keys of the batch by feature name, or a batch from ``prepare``.

        Returns:
            One entry for each feature: a tensor [B, D] if the feature is pooled, [B, n·D] if pooling is concat (n keys
            in each sample), and ``SequenceVectors`` if pooling is none.
        """
        prepared, outputs = self._vectors(features)
        found: dict[str, Any] = {}
        for part, asked, of_part in zip(self.placed.parts, prepared.asked, outputs, strict=True):
            width = part.tables.width
            for (_, start, stop), output in zip(part.tables.runs, of_part, strict=True):
                members = part.tables.features[start:stop]
                if members[0].pooling == "none":
                    found[members[0].name] = SequenceVectors(output, prepared.offsets[members[0].name])
                elif members[0].pooling == "concat":
                    keys = output.shape[0] // prepared.samples if prepared.samples else 0
                    found[members[0].name] = output.view(prepared.samples, keys * width)
                else:
                    # One unbind for all features: one select for each feature would make autograd build and add
                    # a zero-filled gradient of the whole tensor for each of them.
                    vectors = by_feature(output, asked, stop - start, width).unbind(1)
                    found.update(zip((feature.name for feature in members), vectors, strict=True))
        return found

    @apart
    def stacked(self, features: "Mapping[str, Ragged] | PreparedKeys") -> Tensor:
        """Return the vectors of all features as one tensor [B, F, D], in the order of ``feature_names``. Collective.

        Interactions of features need this form. If one group has all tables, no copy is made, whereas stacking the
        vectors of ``forward`` copies all of them.

        Args:
            features: keys of the batch by feature name, or a batch from ``prepare``.

        Raises:
            UsageError: if the tables differ in width, or if a feature is not pooled by sum, mean or max.
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
        """Record features that other collections of the model read, so that this one does not warn about them."""
        self._read_elsewhere |= frozenset(names)

    def _tell_of_unread(self, features: Mapping[str, Ragged]) -> None:
        """Log once which features of the first batch no table reads, because a name may be misspelt."""
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

    def _vectors(
        self, features: "Mapping[str, Ragged] | PreparedKeys"
    ) -> tuple[PreparedKeys, list[list[Tensor]]]:
        learns = torch.is_grad_enabled() and self.training
        if isinstance(features, PreparedKeys):
            prepared = features
        else:
            if not self._has_looked and isinstance(features, Mapping):
                self._tell_of_unread(features)
            if isinstance(features, PreparedFeatures):
                before = features.of(self)
            else:
                before = self.placed.exchanged(features) if self.placed.at_hand else None
            prepared = before or self.placed.prepare(features)
        if not learns:
            self._check_copy()
        return prepared, self.placed.fetch(prepared, learns)

    def elsewhere(self, name: str, fill: Fill, bring: Bring) -> "AbsentCollection":
        """Return the stand-in for this collection on the pipeline stages that do not hold the tables.

        Args:
            name: name of this collection in the model, for errors.
            fill: makes a tensor of a given shape and dtype on the stage's device.
            bring: moves a tensor of features from the host to the stage's device.
        """
        return AbsentCollection(self, name, fill, bring)

    # The step ----------------------------------------------------------------------------------------------------

    def step(self, lr_factor: float = 1.0, divisor: float = 1.0, max_norm: float | None = None) -> None:
        """Update the rows that have received gradients since the last step. Collective.

        Args:
            lr_factor: factor of the learning rate, from the schedule.
            divisor: divisor of the gradients, which are sums over ranks and microbatches; an engine also includes the
                loss scale and clipping.
            max_norm: largest norm of the gradients of these tables; None does not clip.

        Raises:
            TableFullError: on all ranks, if a table would have more rows than its capacity and does not evict. The rows
                are then those of the step before.
        """
        self.placed.step(lr_factor, divisor, max_norm)

    def drop_gradients(self) -> None:
        """Discard the gradients and new keys since the last step, if the step is skipped (an overflow, an exception).

        Rows, scores and keys that wait for admission become those of the step before. An engine calls this method
        itself; a user's own loop calls it after catching an exception of a batch, before the next batch.
        """
        self.placed.drop()

    # Rows in and out ---------------------------------------------------------------------------------------------

    def rows_here(self, table: str) -> KeyedRows:
        """Return the rows of a table that this rank holds, ordered by (bucket, key)."""
        return self.saved.rows_here(table)

    def load_rows(self, table: str, rows: KeyedRows) -> None:
        """Load the rows of a table that this rank holds; a dynamic table inserts the keys that it lacks.

        If the tables are not placed yet, the rows are kept and loaded at placement.

        Args:
            table: name of the table.
            rows: any rows of the table; those that belong to other ranks are ignored.

        Raises:
            UsageError: if there is no such table.
        """
        if self.is_placed:
            self.saved.load_rows(table, rows)
        else:
            check_table(table, [policy.name for policy in self.tables])
            self._to_load.append((table, rows))

    def load_bag(self, table: str, bag: nn.EmbeddingBag | nn.Embedding) -> None:
        """Load the weights of a torch ``EmbeddingBag`` or ``Embedding`` into a table."""
        weight = bag.weight.detach().cpu()
        self.load_rows(table, KeyedRows.of_weights(torch.arange(weight.shape[0]), weight.to(self.dtype)))

    def _check_copy(self) -> None:
        """Raise UsageError if this collection is an untrained copy of a trained one: the copy still has start rows."""
        original = None if self._copy_of is None else self._copy_of()
        if original is not None and self.steps == 0 and original.steps > 0:
            raise UsageError(
                "embedding: this collection is a copy that has learnt nothing while its original did, as an average of "
                "weights (AveragedModel) makes one: tables are no parameters and are not averaged. Give it rows "
                "(load_rows, load_state_dict), or evaluate the model itself"
            )

    # Copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that copies and pickles are made of.

        Raises:
            UsageError: if the tables have rows.
        """
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
        """Copy a collection whose tables have no rows yet.

        Raises:
            UsageError: if the tables have rows.
        """
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        copied._copy_of = weakref.ref(self)
        copied._has_looked = True  # the original logs unread features; a second warning would repeat it
        return copied

    def get_extra_state(self) -> dict[str, Any]:
        """Return the tables' entry of ``state_dict``: all rows with their optimizer state, if they are on this rank.

        The entry of tables that have not been used only records that fact, because all their rows are start rows. The
        entry of tables on several ranks, or of tables whose rows went with an engine, has no rows, and a warning is
        logged.
        """
        if self._ended:
            _log.warning(
                "the state_dict has no rows of the embedding tables: they went with the engine that was closed"
            )
            return {"format": _STATE_FORMAT, "tables": "of a closed engine"}
        given = dict(self._to_load)
        is_whole = len(self._to_load) == len(given) == len(self.tables)
        if self._placed is None and self._progress_to_load is not None and is_whole:
            found = {name: vars(rows) for name, rows in given.items()}
            return {"format": _STATE_FORMAT, "progress": dict(self._progress_to_load), "tables": found}
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
        """Load what ``get_extra_state`` returned; every rank passes the same state.

        If an engine takes the model afterwards, only the weights are used.

        Raises:
            MismatchError: if the state has no rows, or has rows of other tables.
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
        given = {name: KeyedRows(**rows) for name, rows in found.items()}
        self._check_given(given)
        if self.is_placed:
            self.saved.clear()
            self.saved.load_progress(state["progress"])
        else:
            self._to_load = []  # rows that were given before would come back in a dynamic table
            self._progress_to_load = dict(state["progress"])
        for name, rows in given.items():
            self.load_rows(name, rows)

    def _check_given(self, given: Mapping[str, KeyedRows]) -> None:
        """Raise MismatchError unless ``given`` has whole tables of the same names, widths and numbers of rows."""
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
        """Return one line for each table."""
        return "\n".join(
            f"{table.name}: {table.rows or 'dynamic'} x {table.width}, {', '.join(table.feature_names)}"
            for table in self.tables
        )


class AbsentCollection(EmbeddingCollection):
    """Stand-in for a collection on another pipeline stage: returns tensors of the right shapes without numbers.

    Args:
        stands_for: the collection.
        name: name of the collection in the model, for errors.
        fill: makes a tensor of a given shape and dtype on the stage's device.
        bring: moves a tensor of features from the host to the stage's device.
    """

    calls = ("forward", "stacked")
    """Names of the methods by which a model asks for vectors."""

    def __init__(self, stands_for: EmbeddingCollection, name: str, fill: Fill, bring: Bring):
        super().__init__(stands_for.tables, stands_for.optimizer, stands_for.seed, stands_for.dtype)
        self._stands_for = (stands_for,)  # a tuple keeps nn.Module from registering it as a child
        self._name = name
        self._fill = fill
        self._bring = bring

    @property
    def placed(self) -> PlacedTables:
        """The placed tables, which this stage does not have.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"embedding: the collection {self._name!r} lives on another pipeline stage")

    @property
    def feature_names(self) -> list[str]:
        """Names of all features, in the order of the collection itself."""
        (collection,) = self._stands_for
        return collection.feature_names

    def forward(self, features: "Mapping[str, Ragged] | PreparedKeys") -> dict[str, Any]:
        """Return fillers of the shapes that ``EmbeddingCollection.forward`` returns."""
        assert not isinstance(features, PreparedKeys), "a model hands over features"
        found: dict[str, Any] = {}
        for table in self.tables:
            for name in table.feature_names:
                ragged, pooling = features[name], table.pooling_of(name)
                keys = ragged.values.numel()
                if pooling == "none":
                    vectors = self._fill((keys, table.width), self.dtype)
                    found[name] = SequenceVectors(vectors, self._bring(ragged.offsets))
                    continue
                columns = keys // max(ragged.samples, 1) if pooling == "concat" else 1
                shape = (ragged.samples, columns * table.width)
                found[name] = self._fill(shape, self.dtype)
        return found

    def stacked(self, features: "Mapping[str, Ragged] | PreparedKeys") -> Tensor:
        """Return a filler of the shape that ``EmbeddingCollection.stacked`` returns."""
        found = self.forward(features)
        return torch.stack([found[name] for table in self.tables for name in table.feature_names], 1)


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Restore the collections of ``model`` on exit: those that passes inside the context placed are unplaced again."""
    before = [(each, dict(vars(each))) for each in collections_of(model).values()]
    try:
        yield
    finally:
        for collection, attributes in before:
            attributes["_has_looked"] = collection._has_looked
            vars(collection).clear()
            vars(collection).update(attributes)


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Return the collections of a model by their names, in the order of registration. An engine takes over these."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingCollection) and not isinstance(module, AbsentCollection)
    }


def _listed(names: Sequence[str]) -> str:
    """Return the names separated by commas, at most ten of them."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
