"""The embedding tables of a model beside its parameters.

Rows are no parameters: ZeRO does not cut them, and no gradient of a whole table exists. So the engine places the
collections of a model one by one and calls them at these points of a step:

    build       place           rows go to the data-parallel ranks, each table by its own placement
    step        deliver         row gradients go to the owners of the rows
                square_sum      joins Σ g² of the dense gradients: one norm, one clip factor, one decision to skip
                settle          with numbers of the same all-reduce: drops passes without a backward pass, and refuses
                                the step if a table is full, or if the disk of any rank has failed
                step or drop    with the schedule's factor and the divisor that turns sums into means

Beside "pp" a collection lies on the stage that uses it, spread over that stage's data-parallel ranks. Beside "tp" all
ranks along "tp" hold the same part of the tables: a vector's gradient is whole on each of them, so all compute the same
rows, and the first of them counts in the norm and writes into checkpoints.

Cost: parallel/embedding/cost.py; with several ranks to a model one small all-reduce over them in each step.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import (
    ConfigError,
    PlanError,
    ShardwiseError,
    TableFullError,
    TierError,
    UsageError,
)
from shardwise.base.policy import nearest
from shardwise.comm.collectives import Group
from shardwise.comm.exchange import share
from shardwise.comm.first_text import common_error
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.memory.streams import to_device
from shardwise.parallel.embedding.collection import EmbeddingCollection, collections_of
from shardwise.parallel.embedding.placed import grouped
from shardwise.parallel.embedding.policy import TablePolicy, TablesPolicy
from shardwise.parallel.embedding.registered import infos
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex
from shardwise.parallel.embedding.rows.keyed_rows import RowTally
from shardwise.parallel.embedding.rules import row_bytes
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.validate import validate_plan
from shardwise.tiers.row_cache import CacheFigures

_CPU = torch.device("cpu")
_ALIKE = 1e-3
"""Largest relative difference of Σ g² between ranks that should have the same gradients."""


class GoneKeys:
    """The keys of the rows that dynamic tables evicted since the last export, which the next increment names.

    They are kept only after an export, because the first one writes all rows; and at most about as many as the tables
    have rows: an export that comes so late that more rows went writes all rows again.

    Args:
        collections: The collections that are placed on this rank.
    """

    least = 1 << 16
    """Number of keys that are kept in any case."""
    _MOST_PARTS = 1 << 10
    """Most tensors in which the keys of a table are kept."""

    def __init__(self, collections: Mapping[str, EmbeddingCollection]) -> None:
        self._collections = collections
        self.are_kept = False
        """True if the keys of all rows that went since ``begin`` are there."""
        self._evicted = 0
        """Number of rows that were evicted before ``begin``."""

    def begin(self) -> None:
        """Keep the keys of rows that go from here on, and forget those before, because an export was written."""
        self.drop()
        self.are_kept, self._evicted = True, sum(each.evicted for each in self._indexes())

    def drop(self) -> None:
        """Forget all keys, so that the next export writes all rows."""
        self.are_kept = False
        for collection in self._collections.values():
            collection.saved.forget_gone()

    def bound(self) -> None:
        """Forget the keys if no increment follows from them, or if there are too many; called after each step."""
        if not self.are_kept or self._are_too_many():
            self.drop()
            return
        for each in self._indexes():
            keys = each.evictions.keys
            if keys is not None and len(keys) > self._MOST_PARTS:
                keys[:] = [torch.cat(keys)]  # a tensor takes more memory than the few keys of a step

    def _are_too_many(self) -> bool:
        indexes = self._indexes()
        evicted = sum(each.evicted for each in indexes) - self._evicted
        return evicted > max(self.least, sum(len(each.index) for each in indexes))

    def _indexes(self) -> list[DynamicIndex]:
        parts = (part for each in self._collections.values() for part in each.placed.parts)
        return [index for part in parts for index in part.store.dynamic]


class ModelTables:
    """The collections of embedding tables of one model, by the module's name in the model; possibly none.

    Args:
        everywhere: All collections of the whole model, the same on all ranks.
        collections: The collections that are placed on this rank.
        stages: Pipeline stage of each collection.
        groups: "dp", over which rows are spread, "tp", "model" and "world".
        device: Device of the vectors, and of the numbers that are exchanged; set on stages without tables too.
    """

    def __init__(
        self,
        everywhere: Mapping[str, EmbeddingCollection],
        collections: Mapping[str, EmbeddingCollection],
        stages: Mapping[str, int],
        groups: Mapping[str, Group],
        device: torch.device = _CPU,
    ):
        self.everywhere = dict(everywhere) | dict(collections)
        self.collections = dict(collections)
        self.stages = dict(stages)
        self._groups = groups
        self._device = device
        self._drift: PlanError | None = None
        """Difference between the gradients of ranks along "tp", until ``settle``."""
        self.gone = GoneKeys(self.collections)
        """The keys of rows that went, for the next increment of an export."""
        read = [name for _, _, table in self.each() for name in table.feature_names]
        for collection in self.collections.values():
            collection.note_read_elsewhere(read)

    def __bool__(self) -> bool:
        return bool(self.everywhere)

    def each(self) -> Iterator[tuple[str, EmbeddingCollection, TablePolicy]]:
        """Yield (full name, collection, table) of every table of the model; the collection may lie on another stage."""
        for prefix, collection in self.everywhere.items():
            for table in collection.tables:
                yield full_name(prefix, table.name), collection, table

    def is_here(self, collection: EmbeddingCollection) -> bool:
        """Return whether this rank holds a part of a collection."""
        return any(each is collection for each in self.collections.values())

    @property
    def nbytes(self) -> int:
        """Bytes of weights and optimizer state of static tables on this rank."""
        return sum(collection.placed.static_bytes for collection in self.collections.values())

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the used rows of dynamic tables without tiers on this rank, with optimizer state and indices."""
        parts = [part for each in self.collections.values() for part in each.placed.parts]
        return sum(part.store.nbytes for part in parts if part.tables.is_dynamic and not part.store.is_tiered)

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of tables with tiers on this rank: ``memory`` of rows, ``indexes``, and ``disk``."""
        parts = [part for each in self.collections.values() for part in each.placed.parts]
        found = {"memory": 0, "indexes": 0, "disk": 0}
        for part in parts:
            if part.store.is_tiered:
                memory, disk = part.store.lines.nbytes, part.store.disk_bytes
                found["memory"] += memory
                found["indexes"] += part.store.nbytes - memory
                found["disk"] += disk
        return found

    @property
    def is_tiered(self) -> bool:
        """True if the model has a table with tiers."""
        return any(table.tiers is not None for _, _, table in self.each())

    @property
    def step_bytes(self) -> int:
        """Bytes in host memory for rows on a device: the step of each row's last update, for an exact Adam."""
        parts = (part for collection in self.collections.values() for part in collection.placed.parts)
        return sum(part.store.step_bytes for part in parts)

    def copies(self, mesh: Mesh, rank: int) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        """Yield (tables, rows with their optimizer state, ranks that hold the same) of the groups of this rank.

        Groups with an exact Adam are left out: each rank replays missed steps of the rows that it reads.
        """
        for prefix, collection in self.collections.items():
            for part in collection.placed.parts:
                axes = ("dp", "tp") if part.tables.place.placement == "data_parallel" else ("tp",)
                holders = mesh.neighbours(rank, {axis: mesh.size(axis) for axis in axes})
                for place, rows in enumerate(part.store.steady_rows):
                    if rows.numel():
                        name = full_name(prefix, str(part.tables))
                        yield f"{name} state" if place else name, rows, holders

    @property
    def is_dynamic(self) -> bool:
        """True if the model has a dynamic table."""
        return any(table.dynamic is not None for _, _, table in self.each())

    @property
    def is_first_copy(self) -> bool:
        """True if this rank is the first of the ranks along "tp" with the same rows, and so counts and writes them."""
        return self._groups["tp"].index == 0

    def deliver(self, name: str) -> None:
        """Send the row gradients of a collection to the owners of the rows. Collective over "dp"."""
        self.collections[name].placed.deliver()

    def take_figures(self) -> CacheFigures | None:
        """Return the counts of this rank's tables with tiers since the last call; None if no table has tiers."""
        parts = [part for each in self.collections.values() for part in each.placed.parts]
        found = [figures for part in parts if (figures := part.store.take_figures()) is not None]
        return sum(found, CacheFigures()) if found else None

    def compare(self) -> None:
        """Compare the gradients of the ranks along "tp" after all have been delivered; ``settle`` raises a difference.

        Collective over the ranks that share a model, including ranks without a table.
        """
        if self._is_shared:
            self._drift = self._compared()

    @property
    def _is_shared(self) -> bool:
        """True if the model has tables and several ranks share a model."""
        return bool(self) and self._groups["model"].size > 1

    def numbers(self) -> list[float]:
        """Return the numbers that the ranks along "dp" must sum before ``settle``.

        Those of the collections; where ranks share a model, then 1 if ranks along "tp" have different gradients.
        """
        found = [number for collection in self.collections.values() for number in collection.placed.numbers()]
        return found + [float(self._drift is not None)] * self._is_shared

    def verdict(self, sums: Tensor) -> Tensor:
        """Return whether a pass will be dropped and whether a table is too full, without a copy to the host: fp64 [2].

        Args:
            sums: ``numbers`` summed over "dp".
        """
        bounds = [each for collection in self.collections.values() for each in collection.placed.bounds]
        bounds += [(0.0, 0.0)] * self._is_shared
        if not bounds:
            return sums.new_zeros(2)
        least, most = to_device(torch.tensor(bounds, dtype=torch.float64), sums.device).unbind(1)
        return torch.stack([(sums < least).any(), (sums > most).any()]).double()

    def settle(self, sums: Sequence[float], over_model: Sequence[float]) -> None:
        """Drop passes without a backward pass, and refuse the step if a table is too full or a disk has failed.

        Args:
            sums: ``numbers`` summed over "dp".
            over_model: ``verdict`` summed over the ranks that share a model; zeros if no ranks share one.

        Raises:
            TableFullError: on all ranks alike, if a table is too full.
            TierError: on all ranks alike, if the disk of any rank has failed.
            PlanError: on all ranks alike, if ranks along "tp" have different gradients.
        """
        failed: ShardwiseError | None = None
        start = 0
        for collection in self.collections.values():
            stop = start + len(collection.placed.bounds)
            try:
                collection.placed.settle(sums[start:stop])
            except (TableFullError, TierError) as error:
                failed = failed or error
            start = stop
        drift, self._drift = self._drift, None
        failed = failed or drift
        model, (lets_go, is_refused) = self._groups["model"], over_model
        if model.size > 1 and lets_go:  # dropped passes have changed the row counts
            found = to_device(torch.tensor([float(failed is not None)], dtype=torch.float64), self._device)
            model.all_reduce(found, "whether a table is full", "control").wait()
            is_refused = float(found) + (sums[-1] if self._is_shared else 0.0)
        if model.size > 1 and is_refused:
            raise common_error(failed, self._groups["world"], self._device)
        if failed is not None:
            raise failed

    @contextlib.contextmanager
    def deferred_faults(self) -> Iterator[None]:
        """Keep errors of the disk below the tables in the context; ``raise_faults`` follows."""
        with contextlib.ExitStack() as stack:
            for collection in self.collections.values():
                stack.enter_context(collection.placed.deferred_faults())
            yield

    def raise_faults(self) -> None:
        """Raise the error of the disk that any rank has kept. Collective over all ranks if a table has tiers.

        Raises:
            TierError: on all ranks alike.
        """
        if not self.is_tiered:
            return
        found = [collection.placed.take_fault() for collection in self.collections.values()]
        error = next((each for each in found if each is not None), None)
        world = self._groups["world"]
        failed = to_device(torch.tensor([float(error is not None)], dtype=torch.float64), self._device)
        if world.size > 1:
            world.all_reduce(failed, "whether a disk has failed", "control").wait()
        if float(failed):
            raise common_error(error, world, self._device)

    def _compared(self) -> PlanError | None:
        """Return the error of ranks along "tp" with different gradients; None if all have the same."""
        model = self._groups["model"]
        vector = torch.zeros(3 * len(self.everywhere), dtype=torch.float64)
        vector[0::3] = torch.tensor([float(name in self.collections) for name in self.everywhere])
        vector = to_device(vector, self._device)
        for place, name in enumerate(self.everywhere):
            if name in self.collections:
                squares = self.collections[name].placed.square_sum()
                vector[1 + 3 * place] = squares
                vector[2 + 3 * place] = squares * squares
        model.all_reduce(vector, "gradients of tables", "control").wait()
        sums = vector.tolist()
        model.clock.check_intact()
        for name, ranks, total, squared in zip(
            self.everywhere, sums[::3], sums[1::3], sums[2::3], strict=True
        ):
            spread = squared / ranks - (total / ranks) ** 2
            if spread > (_ALIKE * total / ranks) ** 2:
                return PlanError(
                    f"tables: the {ranks:.0f} ranks along tp come to different gradients of the vectors of {name!r}, "
                    "so that their rows would drift apart: the vectors are used where each rank holds its part of the "
                    "features. Use them in front of the layers that are cut, or leave the module that uses them whole "
                    "('replicate' in tensor.table)"
                )
        return None

    def square_sum(self) -> Tensor:
        """Return Σ g² over the delivered gradients of the rows that this rank counts: fp64."""
        total = torch.zeros((), dtype=torch.float64)
        for collection in self.collections.values() if self.is_first_copy else ():
            total = total + collection.placed.square_sum()
        return total

    def step(self, name: str, lr_factor: float, divisor: float) -> None:
        """Update the rows of a collection that got gradients.

        With the placements row and column all ranks evict, or average, together.
        """
        self.collections[name].placed.step(lr_factor, divisor)

    def drop(self) -> None:
        """Drop the gradients of this step."""
        self._drift = None
        for collection in self.collections.values():
            collection.placed.drop()

    @property
    def choices(self) -> list[str]:
        """One line for each table: its placement and the reason."""
        return [str(choice) for each in self.everywhere.values() for choice in each.choices]

    def tallies(self) -> dict[str, RowTally]:
        """Return the rows in use, inserted and evicted of each table, over all ranks. Collective."""
        rows = []
        for prefix, collection in self.everywhere.items():
            here = collection.placed.tallies if prefix in self.collections and self.is_first_copy else {}
            rows += [here.get(table.name, RowTally(0)) for table in collection.tables]
        counts = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(RowTally._fields))
        if self._groups["world"].size > 1 and rows:
            counts = counts.to(self._device)
            self._groups["world"].all_reduce(counts.view(-1), "rows of tables", "control").wait()
        names = [name for name, _, _ in self.each()]
        return {name: RowTally(*map(int, row)) for name, row in zip(names, counts.tolist(), strict=True)}


def full_name(prefix: str, table: str) -> str:
    """Return a table's name in the model: the name of its collection, a dot, and its own name."""
    return f"{prefix}.{table}" if prefix else table


def check_mesh(model: nn.Module, mesh: Mesh, settings: RunConfig) -> None:
    """Check that the model's tables work with the mesh and the settings.

    Raises:
        ConfigError: for sequence parallelism, or for ``offload.step: delayed``, beside tables.
    """
    if mesh.tp > 1 and settings.tensor.sequence_parallel and collections_of(model):
        raise ConfigError(
            f"mesh tp={mesh.tp} with tensor.sequence_parallel: the vectors of embedding tables hold whole samples and "
            "sequences, and between the cut layers each rank holds its part of them; set tensor.sequence_parallel: "
            "false"
        )
    if settings.offload.step == "delayed" and collections_of(model):
        raise ConfigError(
            "offload.step: delayed: rows of embedding tables are updated at once, and would be a step ahead of the "
            "weights; set offload.step: before_use"
        )


def take_over(
    model: nn.Module,
    stages: Mapping[int, nn.Module],
    stage_of: Mapping[str, int],
    settings: RunConfig,
    world: World,
    mesh: Mesh,
    groups: Mapping[str, Group],
    clock: StepClock,
    dense_bytes: int,
) -> ModelTables:
    """Place the collections of this rank's stages, and choose the placements of all tables of the model. Collective.

    Args:
        model: The whole model.
        stages: This rank's stages, by index.
        stage_of: Index of the stage of each collection, by name.
        settings: The resolved configuration.
        world: The ranks of the job.
        mesh: The mesh of the ranks.
        groups: Process groups by name.
        clock: The step in which collectives run.
        dense_bytes: Bytes of model state beside tables on this rank.

    Raises:
        ConfigError: if the configuration does not fit the model's tables.
        PlanError: if a table fits on no rank.
        TierError: on every rank, if the files of a table's tiers cannot be made on one of them.
        UsageError: if a collection has been used or placed already.
    """
    everywhere = collections_of(model)
    found = {name: each for module in stages.values() for name, each in collections_of(module).items()}
    tables = ModelTables(
        everywhere,
        {name: found[name] for name in everywhere if name in found},
        stage_of,
        groups,
        world.device,
    )
    _check(tables, settings)
    if not tables:
        return tables
    dp = groups["dp"]
    # A thread may send keys at any time: so keys have their own transport, and do not count in the order of collectives
    # that ranks compare.
    keys_group = world.group_among(
        dp.ranks, "keys", settings.comm, clock, Traffic(), lane="keys", kin=mesh.groups("dp")
    )
    memory = _least(_memory_of_a_rank(world, model, dense_bytes), groups["world"])
    failed = _place_all(tables, settings, world, groups, keys_group, memory)
    _raise_together(tables, failed, groups["world"], world.device)
    return tables


def _place_all(
    tables: ModelTables,
    settings: RunConfig,
    world: World,
    groups: Mapping[str, Group],
    keys_group: Group,
    memory: "_TableMemory",
) -> ShardwiseError | None:
    """Place the collections of this rank's stages and choose the placements of the others; return the first error."""
    failed: ShardwiseError | None = None
    for name, collection in tables.everywhere.items():
        _check_unused(collection)
        _set_up(collection, settings)
        if groups["model"].size > 1:
            collection.share_given(groups["world"], world.device)
        given = _given(collection, settings, *memory)
        if name not in tables.collections:
            collection.choose(groups["dp"].size, **given)
            continue
        dtype = settings.precision.compute_dtype
        try:
            collection.place(
                groups["dp"], keys_group, device=world.device, compute_dtype=dtype, is_led=True, **given
            )
        except (ConfigError, TierError, UsageError) as error:
            failed = failed or error
    return failed


def _raise_together(
    tables: ModelTables, failed: ShardwiseError | None, world: Group, device: torch.device
) -> None:
    """Raise the error on every rank if the folder of a table cannot be used by one of them. Collective.

    Tables without tiers have no folder, and what is refused then is refused on every rank.
    """
    if not tables.is_tiered:
        if failed is not None:
            raise failed
        return
    votes = torch.tensor([float(failed is not None)], device=device)
    world.all_reduce(votes, "folders of tables", purpose="control").wait()
    if not votes.item():
        return
    for collection in tables.collections.values():
        if collection.is_placed:
            collection.placed.close()
    if failed is not None and world.size > 1:
        failed = type(failed)(f"rank {world.ranks[world.index]}: {failed}")
    raise common_error(failed, world, device)


def chosen_for(
    model: nn.Module, stage_of: Mapping[str, int], settings: RunConfig, ranks: int, device: torch.device
) -> ModelTables:
    """Return the tables of ``model`` with placements chosen for ``ranks`` data-parallel ranks; no table is placed.

    The free memory of this host is not considered, because the run may use other hosts; only the configuration counts.

    Args:
        model: The whole model.
        stage_of: Index of the stage of each collection, by name.
        settings: The resolved configuration.
        ranks: Number of data-parallel ranks.
        device: A device of the kind on which the ranks compute.

    Raises:
        ConfigError: if the configuration does not fit the model's tables.
        PlanError: if a table fits on no rank.
    """
    tables = tables_of(model, stage_of)
    _check(tables, settings)
    for collection in tables.everywhere.values():
        _set_up(collection, settings)
        collection.choose(
            ranks, **_given(collection, settings, None, None if device.type == "cpu" else math.inf)
        )
    return tables


def tables_of(model: nn.Module, stage_of: Mapping[str, int] | None = None) -> ModelTables:
    """Return the tables of a model before any of them is placed."""
    everywhere = collections_of(model)
    stages = dict.fromkeys(everywhere, 0) if stage_of is None else stage_of
    return ModelTables(
        everywhere, {}, stages, dict.fromkeys(("dp", "tp", "model", "world"), Group.alone("dp"))
    )


def register_tables(plan: Plan, tables: ModelTables, microbatches: int) -> None:
    """Add every table and the state of its rows to the Plan's registry, and validate the Plan again."""
    ranks = plan.mesh.size("dp")
    for prefix, collection in tables.everywhere.items():
        places = {choice.table: choice.place for choice in collection.choices}
        stage, caches = tables.stages[prefix], _cache_places(collection, ranks)
        for table in collection.tables:
            name, place = full_name(prefix, table.name), places[table.name]
            given = (collection.optimizer, place, collection.dtype, ranks, stage, caches.get(table.name))
            for info in infos(name, table, *given):
                plan.registry.add(info)
    if tables:
        validate_plan(plan, microbatches)


def _cache_places(collection: EmbeddingCollection, ranks: int) -> dict[str, int]:
    """Return the rows in the cache of each table's group on a rank that holds the table, for tables with tiers."""
    found = {}
    for group in grouped(collection.tables, collection.optimizer, collection.choices, ranks):
        line_bytes = row_bytes(group.tables[0], group.optimizer, collection.dtype)
        for table, place in zip(group.tables, group.places, strict=True):
            places = group.places_in_memory(place.owner, line_bytes)
            if places is not None:
                found[table.name] = places
    return found


def _check(tables: ModelTables, settings: RunConfig) -> None:
    policy = settings.tables
    names = [table.name for _, _, table in tables.each()]
    if not names:
        if settings.tables != TablesPolicy():
            raise ConfigError(
                "tables: the model has no EmbeddingCollection, so these keys would do nothing; use one in the model, "
                "or remove them"
            )
        if settings.export is not None or settings.checkpoint.tables_full_every is not None:
            key = "export" if settings.export is not None else "checkpoint.tables_full_every"
            raise ConfigError(
                f"{key}: the model has no EmbeddingCollection, whose rows it is about; use one in the model, or remove "
                "the key"
            )
        return
    for pattern in policy.placement:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"tables.placement: no table is called {pattern!r}{nearest(pattern, names)}")


def _given(
    collection: EmbeddingCollection,
    settings: RunConfig,
    memory_bytes: float | None,
    host_memory_bytes: float | None,
) -> dict[str, Any]:
    """Return the arguments for the choice of placements; memory in the configuration overrides the memory found."""
    master = settings.precision.dtypes("", collection.dtype).master
    return {
        "batch": settings.batch.micro_size or 1024,
        "memory_bytes": settings.tables.memory_bytes or memory_bytes,
        "host_memory_bytes": settings.tables.host_memory_bytes or host_memory_bytes,
        "dtype": torch.promote_types(master, torch.float32),
        "wire": settings.tables.wire,
    }


def _check_unused(collection: EmbeddingCollection) -> None:
    """Raise UsageError if the collection has rows already, because a batch has used it or an engine has placed it."""
    if collection.is_placed:
        raise UsageError(
            "tables: a collection of the model has been used or placed already; give the model to initialize() "
            "before its first batch"
        )


def _set_up(collection: EmbeddingCollection, settings: RunConfig) -> None:
    """Apply the configuration's settings of tables, which override the model's own."""
    policy = settings.tables
    if policy.optimizer is not None:
        collection.optimizer = policy.optimizer
    tables = []
    for table in collection.tables:
        for pattern, placement in policy.placement.items():
            if fnmatchcase(table.name, pattern):
                given = table.model_dump(exclude_unset=True) | {"placement": placement}
                table = TablePolicy.model_validate(given)  # the table's other keys may not suit the placement
        if settings.export is not None or settings.checkpoint.tables_full_every is not None:
            table = table.model_copy(update={"marks_changes": True})
        tables.append(table)
    collection.tables = tuple(tables)


class _TableMemory(NamedTuple):
    """Memory of one rank for tables."""

    device: int
    """Bytes for static tables; on a CPU for all tables."""
    host: int | None
    """Bytes for dynamic tables beside an accelerator."""


def _least(mine: _TableMemory, group: Group) -> _TableMemory:
    """Return the least memory of all ranks of the job.

    Every rank chooses placements for all ranks, and all must choose the same.
    """
    if group.size == 1:
        return mine
    told = torch.tensor([mine.device, mine.host or 0])
    device, host = share(told.expand(group.size, 2), group, "memory for tables")[:, 0].amin(0).tolist()
    return _TableMemory(device, None if mine.host is None else host)


def _memory_of_a_rank(world: World, model: nn.Module, dense_bytes: int) -> _TableMemory:
    """Return the memory that tables may take on this rank.

    That is this rank's share of the host's memory and, on an accelerator, the device memory that model state leaves
    free.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_size
    if world.device.type == "cpu":
        return _TableMemory(host, None)
    free = int(torch.accelerator.get_memory_info(world.device)[0])
    # The weights on the device count twice otherwise: they are not free, and they are a part of ``dense_bytes``.
    moved = sum(each.nbytes for each in model.parameters() if each.device == world.device)
    return _TableMemory(max(free + min(moved, dense_bytes) - dense_bytes, 0), host)
