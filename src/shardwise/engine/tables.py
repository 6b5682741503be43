"""The embedding tables of a model beside its parameters.

Rows are no parameters: ZeRO does not cut them, and no gradient of a whole table exists. So the engine takes the
collections of a model over one by one and calls them where a step needs them:

    build       place           rows go to the data-parallel ranks, each table by its own placement
    step        deliver         row gradients go to the owners of the rows
                square_sum      joins Σ g² of the dense gradients: one norm, one clip factor, one decision to skip
                step or drop    with the schedule's factor and the divisor that makes means of sums

Cost: parallel/embedding/cost.py.
"""

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Clock, Group
from shardwise.comm.exchange import share
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.parallel.embedding.collection import EmbeddingCollection, collections_of
from shardwise.parallel.embedding.planner import Choice, plan_tables
from shardwise.parallel.embedding.policy import TablePolicy, TablesPolicy
from shardwise.parallel.embedding.rows import Tally
from shardwise.parallel.zero.layout import AXES
from shardwise.plan.errors import ConfigError, UsageError
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import ByHash, Placement, Replicate, Shard
from shardwise.plan.policy import nearest
from shardwise.plan.registry import Registry, TensorInfo

_PLACEMENTS: Mapping[str, Placement] = {
    "data_parallel": Replicate(),
    "table": Replicate(),
    "row": ByHash(),
    "column": Shard(1),
}


class Tables:
    """The placed collections of one model; none of them is no special case."""

    def __init__(self, collections: Mapping[str, EmbeddingCollection], group: Group):
        self.collections = dict(collections)
        """By the module's name in the model."""
        self._group = group

    def __bool__(self) -> bool:
        return bool(self.collections)

    def each(self) -> Iterator[tuple[str, EmbeddingCollection, TablePolicy]]:
        """(full name, collection, table) of every table."""
        for prefix, collection in self.collections.items():
            for table in collection.tables:
                yield full_name(prefix, table.name), collection, table

    @property
    def nbytes(self) -> int:
        """Weights and optimizer state on this rank."""
        return sum(collection.placed.nbytes for collection in self.collections.values())

    def deliver(self) -> None:
        """Row gradients to the owners of the rows. Collective. Errors: TableFullError on all ranks alike."""
        for collection in self.collections.values():
            collection.placed.deliver()

    def square_sum(self) -> Tensor:
        """Σ g² over the delivered gradients of the rows that this rank owns: fp64."""
        total = torch.zeros((), dtype=torch.float64)
        for collection in self.collections.values():
            total = total + collection.placed.square_sum()
        return total

    def step(self, lr_factor: float, divisor: float) -> None:
        """Update the rows that got gradients; placements row and column evict, or average, together."""
        for collection in self.collections.values():
            collection.placed.step(lr_factor, divisor)

    def drop(self) -> None:
        """Forget the gradients of this step."""
        for collection in self.collections.values():
            collection.placed.drop()

    @property
    def choices(self) -> list[str]:
        """A line for each table: where it lies and why."""
        return [str(choice) for each in self.collections.values() for choice in each.choices]

    def tallies(self) -> dict[str, Tally]:
        """Rows in use, inserted and evicted of each table, over all ranks. Collective."""
        here = [collection.placed.tallies[table.name] for _, collection, table in self.each()]
        counts = torch.tensor(here, dtype=torch.float64).reshape(len(here), len(Tally._fields))
        if self._group.size > 1 and here:
            device = next(iter(self.collections.values())).placed.device
            counts = counts.to(device)
            self._group.all_reduce(counts.view(-1), "rows of tables", "control").wait()
        names = [name for name, _, _ in self.each()]
        return {name: Tally(*map(int, row)) for name, row in zip(names, counts.tolist(), strict=True)}


def full_name(prefix: str, table: str) -> str:
    """A table's name in the model: that of its collection before its own."""
    return f"{prefix}.{table}" if prefix else table


def check_mesh(model: nn.Module, mesh: Mesh) -> None:
    """Refuse a mesh that cuts a model with tables. Errors: ConfigError."""
    cut = [axis for axis in ("tp", "pp") if mesh.size(axis) > 1]
    if cut and collections_of(model):
        raise ConfigError(
            f"mesh {', '.join(f'{axis}={mesh.size(axis)}' for axis in cut)}: embedding tables are spread over "
            f"data-parallel ranks, and this mesh cuts the dense model too; leave {' and '.join(cut)} at 1"
        )


def take_over(model: nn.Module, settings: RunConfig, world: World, group: Group, clock: Clock) -> Tables:
    """Place every collection of ``model`` over the data-parallel ranks. Collective.

    Errors: ConfigError where the configuration does not fit the model's tables, PlanError for a table that fits
    nowhere.
    """
    collections = collections_of(model)
    tables = Tables(collections, group)
    _check(tables, settings)
    if not collections:
        return tables
    # Keys may travel in a thread of their own: over a transport of their own, and untold in the order of collectives.
    keys_group = world.group_among(group.ranks, "keys", settings.comm, clock, Traffic(), lane="keys")
    memory_bytes = _least(_memory_of_a_rank(world), group, world.device)
    for collection in collections.values():
        if collection.is_placed:
            raise UsageError(
                "tables: a collection of the model has been used or placed already; give the model to initialize() "
                "before its first batch"
            )
        _set_up(collection, settings)
        collection.place(
            group,
            keys_group,
            batch=settings.batch.micro_size or 1024,
            memory_bytes=settings.tables.memory_bytes or memory_bytes,
            device=world.device,
            dtype=torch.promote_types(settings.precision.dtypes("", collection.dtype).master, torch.float32),
            compute_dtype=settings.precision.compute_dtype,
            is_led=True,
        )
    return tables


def choices_for(model: nn.Module, settings: RunConfig, ranks: int) -> list[Choice]:
    """Where the tables of ``model`` would lie on ``ranks`` data-parallel ranks, and why; nothing is placed.

    Errors: as ``take_over``'s; memory is asked of the configuration alone, not of hosts that may not be these.
    """
    tables = tables_of(model)
    _check(tables, settings)
    found: list[Choice] = []
    for collection in tables.collections.values():
        _set_up(collection, settings)
        dtype = settings.precision.dtypes("", collection.dtype).master
        batch, memory_bytes = settings.batch.micro_size or 1024, settings.tables.memory_bytes
        found += plan_tables(collection.tables, collection.optimizer, ranks, batch, dtype, memory_bytes)
    return found


def tables_of(model: nn.Module) -> Tables:
    """What can be asked of a model's tables before any of them is placed."""
    return Tables(collections_of(model), Group.alone("tables"))


def register_tables(registry: Registry, tables: Tables) -> None:
    """Every table with its place on the data-parallel axes."""
    for name, collection, table in tables.each():
        choice = next(choice for choice in collection.choices if choice.table == table.name)
        where = dict.fromkeys(AXES, _PLACEMENTS[choice.place.placement])
        shape = (table.rows or 0, table.width)  # a dynamic table begins without rows
        registry.add(TensorInfo(name, shape, collection.dtype, "table", where))


def _check(tables: Tables, settings: RunConfig) -> None:
    policy = settings.tables
    names = [table.name for _, _, table in tables.each()]
    if not names:
        if settings.tables != TablesPolicy():
            raise ConfigError(
                "tables: the model has no EmbeddingCollection, so these keys would do nothing; use one in the model, "
                "or remove them"
            )
        return
    for pattern in policy.placement:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"tables.placement: no table is called {pattern!r}{nearest(pattern, names)}")


def _set_up(collection: EmbeddingCollection, settings: RunConfig) -> None:
    """What the configuration says of tables goes before what the model's code says."""
    policy = settings.tables
    if policy.optimizer is not None:
        collection.optimizer = policy.optimizer
    tables = []
    for table in collection.tables:
        for pattern, placement in policy.placement.items():
            if fnmatchcase(table.name, pattern):
                given = table.model_dump(exclude_unset=True) | {"placement": placement}
                table = TablePolicy.model_validate(given)  # checked anew: sends may not suit the placement
        tables.append(table)
    collection.tables = tuple(tables)


def _least(memory_bytes: int, group: Group, device: torch.device) -> int:
    """The least of all ranks: every rank plans for all, and must come to the same plan."""
    if group.size == 1:
        return memory_bytes
    mine = torch.full((group.size, 1), memory_bytes, device=device)
    return int(share(mine, group, "memory for tables").min())


def _memory_of_a_rank(world: World) -> int:
    """The host's memory, shared by its ranks; of an accelerator its own."""
    if world.device.type != "cpu":
        return int(torch.accelerator.get_memory_info(world.device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_size
