"""Entries of the tensor registry for a table: its rows and their optimizer state, with their placement. Pure.

    data_parallel   Replicate
    table           OnRank(owner)
    row             ByHash(1,024 buckets); ByHash for a dynamic table
    column          Shard(1), balanced; state with one number a row is kept with each piece of the row: Replicate
    mark            int32, the step in which a row last changed, if the table keeps marks: as state with one number

All placements are on "dp", the data-parallel ranks as one axis.
"""

from collections.abc import Iterator

import torch

from shardwise.parallel.embedding.cost import bytes_in_tiers
from shardwise.parallel.embedding.layout import BUCKETS, TablePlacement
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows.dynamic import capacity_of
from shardwise.parallel.embedding.rules import ONE_A_ROW, dtypes_of, optimizer_of, row_bytes, state_columns
from shardwise.plan.placement import ByHash, OnRank, Placement, Replicate, Shard
from shardwise.plan.registry import TensorInfo, TierSizes


def placement_of(place: TablePlacement, ranks: int, is_dynamic: bool) -> Placement:
    """Return the registry's placement of a table's rows on ``ranks`` data-parallel ranks."""
    if ranks == 1 or place.placement == "data_parallel":
        return Replicate()
    if place.placement == "table":
        return OnRank(place.owner)
    if place.placement == "row":
        return ByHash(0 if is_dynamic else BUCKETS)
    return Shard(1, balanced=True)


def state_names(table: TablePolicy, optimizer: RowOptimizerPolicy) -> list[str]:
    """Return the names of the optimizer state that a row has beside its weights.

    Args:
        table: the table.
        optimizer: optimizer of tables without their own.
    """
    return [name for name, _ in state_columns(optimizer_of(table.optimizer or optimizer), table.width)]


def infos(
    name: str,
    table: TablePolicy,
    optimizer: RowOptimizerPolicy,
    place: TablePlacement,
    dtype: torch.dtype,
    ranks: int,
    stage: int = 0,
    group_places: int | None = None,
) -> Iterator[TensorInfo]:
    """Yield the registry's entries of a table: its rows, then their optimizer state.

    A dynamic table is entered with its largest number of rows, 0 without a limit.

    Args:
        name: name of the entries.
        table: the table.
        optimizer: optimizer of tables without their own.
        place: placement of the table.
        dtype: dtype of the collection.
        ranks: number of data-parallel ranks.
        stage: pipeline stage that holds the table.
        group_places: rows in the cache of the table's group on a rank with the table; None: the table is alone.
    """
    rule, rows = optimizer_of(table.optimizer or optimizer), table.rows or 0
    if table.dynamic is not None:
        rows = capacity_of(table.dynamic, row_bytes(table, optimizer, dtype)) or 0
    sizes = None
    if table.tiers is not None:
        line = row_bytes(table, optimizer, dtype)
        held = bytes_in_tiers(table, place.placement, rows, line, ranks, group_places)
        sizes = TierSizes(held.rows, round(held.indexes), round(held.disk))
        # A table without a limit counts as many rows as its memory has.
        rows = rows or held.rows * (ranks if place.placement == "row" else 1)
    where, stored = placement_of(place, ranks, table.dynamic is not None), dtypes_of(table, dtype)
    for label, columns in (("", table.width), *state_columns(rule, table.width)):
        is_whole = label in ONE_A_ROW and place.placement == "column"
        yield TensorInfo(
            name,
            (rows, columns),
            stored.state if label else stored.weights,
            "table",
            {"dp": Replicate() if is_whole else where},
            label=label,
            stages=(stage,),
            grows=table.dynamic is not None,
            tiers=sizes if sizes is None or not label else TierSizes(sizes.rows),
        )
    if table.marks_changes:
        is_whole = place.placement == "column"
        yield TensorInfo(
            name,
            (rows, 1),
            torch.int32,
            "table",
            {"dp": Replicate() if is_whole else where},
            label="mark",
            stages=(stage,),
            grows=table.dynamic is not None,
        )
