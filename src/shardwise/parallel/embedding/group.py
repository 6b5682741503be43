"""TableGroup: tables that move together, so that one call of a kernel and one message serve all of them.

Tables share a group if they agree in width, optimizer, dtypes, placement, exchange, in being static or dynamic, and in
the folder of their tiers. The rows of the static tables of a group are numbered consecutively:

    key of the group = base of the table + key of the table

    data_parallel, column   bases follow one another                       slab row = key
    table                   ... tables in the order of their owners        slab row = key - first base of the owner
    row                     ... in multiples of the 1,024 buckets          slab row as in layout.py

Dynamic tables keep their own keys and have an index each, but their keys travel together.

The features of a group stand in the order of its tables, and so in the order of their owners.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.parallel.embedding.layout import BUCKETS, TablePlacement, buckets_of, static_keys_at
from shardwise.parallel.embedding.policy import Pooling, RowOptimizerPolicy, TablePolicy

RunKind = Literal["summed", "max", "rows"]
_KIND: dict[Pooling, RunKind] = {
    "sum": "summed",
    "mean": "summed",
    "max": "max",
    "concat": "rows",
    "none": "rows",
}


class GroupFeature(NamedTuple):
    """A feature of a group of tables."""

    name: str
    table: int
    """Index of the feature's table in the group."""
    pooling: Pooling


class HeldKeys(NamedTuple):
    """Keys of some rows of static tables that one rank holds."""

    keys: Tensor
    """Key of each row in its own table: int64 [U]."""
    tables: list[int]
    """Index in the group of each table with rows on the rank."""
    places: Tensor
    """Index in ``tables`` of each row's table: int64 [U]."""


class FeatureRun(NamedTuple):
    """Features [start, stop) of a group that one call pools."""

    kind: RunKind
    """Operation on the features: a (weighted) sum, a maximum, or no pooling."""
    start: int
    stop: int


@dataclass(frozen=True)
class TableGroup:
    """Tables that move together on ``ranks`` ranks.

    Args:
        tables: the tables; for placement ``table``, in the order of their owners.
        places: placement of each table.
        optimizer: optimizer of all tables.
        ranks: number of ranks.
    """

    tables: tuple[TablePolicy, ...]
    places: tuple[TablePlacement, ...]
    optimizer: RowOptimizerPolicy
    ranks: int

    def __str__(self) -> str:
        first, last = self.tables[0].name, self.tables[-1].name
        return first if len(self.tables) == 1 else f"{first} to {last} ({len(self.tables)} tables)"

    @property
    def width(self) -> int:
        """Number of columns of each table."""
        return self.tables[0].width

    @property
    def place(self) -> TablePlacement:
        """Placement of all tables; the owner is that of the first table."""
        return self.places[0]

    @property
    def is_dynamic(self) -> bool:
        """True if the tables are dynamic."""
        return self.tables[0].dynamic is not None

    @cached_property
    def features(self) -> tuple[GroupFeature, ...]:
        """All features, in the order of the tables."""
        return tuple(
            GroupFeature(name, place, table.pooling_of(name))
            for place, table in enumerate(self.tables)
            for name in table.feature_names
        )

    @cached_property
    def runs(self) -> tuple[FeatureRun, ...]:
        """Features that one call pools: a run of neighbours that are added or averaged, or any other single feature."""
        found: list[FeatureRun] = []
        for place, feature in enumerate(self.features):
            kind = _KIND[feature.pooling]
            if found and kind == found[-1].kind == "summed":
                found[-1] = found[-1]._replace(stop=place + 1)
            else:
                found.append(FeatureRun(kind, place, place + 1))
        return tuple(found)

    @cached_property
    def may_go_by_sample(self) -> bool:
        """True if vectors may stand sample after sample, because this rank pools all features in one way."""
        return self.place.exchange != "pooled" and [run.kind for run in self.runs] == ["summed"]

    @cached_property
    def keys_may_go_by_sample(self) -> bool:
        """True if keys may stand sample after sample too: no owner or index needs a feature's keys side by side."""
        return self.may_go_by_sample and not self.is_dynamic and self.place.placement != "table"

    @cached_property
    def feature_bases(self) -> Tensor:
        """Base of each feature's table: int64 [F]; 0 for dynamic tables."""
        return torch.tensor([0 if self.is_dynamic else self.bases[each.table] for each in self.features])

    @cached_property
    def feature_rows(self) -> Tensor:
        """Rows of each feature's table: int64 [F]; -1 for dynamic tables."""
        return torch.tensor([self.tables[each.table].rows or -1 for each in self.features])

    @cached_property
    def features_of_means(self) -> Tensor:
        """Mask of the features that are averaged: bool [F]."""
        return torch.tensor([each.pooling == "mean" for each in self.features])

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """Key of the group at which each static table begins, and the end."""
        bases = [0]
        for table in self.tables:
            rows = table.rows or 0
            if self.place.placement == "row" and self.ranks > 1:
                rows = -(-rows // BUCKETS) * BUCKETS
            bases.append(bases[-1] + rows)
        return tuple(bases)

    def columns(self, index: int) -> range:
        """Return the columns that rank ``index`` holds."""
        return self.place.columns_on(self.width, index, self.ranks)

    def owner_ends(self) -> list[int]:
        """Return the end of each rank's features for placement ``table``.

        Rank r has features [ends[r - 1], ends[r]).
        """
        owners = [self.places[feature.table].owner for feature in self.features]
        return [sum(owner <= rank for owner in owners) for rank in range(self.ranks)]

    def base_on(self, table: int, index: int) -> int:
        """Return the slab row of rank ``index`` at which a static table begins."""
        if self.place.placement == "row" and self.ranks > 1:
            return self.bases[table] // BUCKETS * len(buckets_of(index, self.ranks))
        if self.place.placement == "table":
            return self.bases[table] - self.first_base(index)
        return self.bases[table]

    def first_base(self, index: int) -> int:
        """Return the base of the first table that rank ``index`` owns, for placement ``table``."""
        owned = [base for base, place in zip(self.bases, self.places, strict=False) if place.owner == index]
        return owned[0] if owned else 0

    def keys_at(self, rows: Tensor, index: int) -> HeldKeys:
        """Return the keys of slab rows of static tables on rank ``index``: int64 [U]."""
        tables = [place for place, where in enumerate(self.places) if where.holds(index)]
        starts = torch.tensor([self.base_on(place, index) for place in tables])
        places = torch.searchsorted(starts, rows, right=True) - 1
        keys = rows - starts[places]
        if self.place.placement == "row" and self.ranks > 1:
            keys = static_keys_at(keys, index, self.ranks)
        return HeldKeys(keys, tables, places)

    def slab_rows(self, index: int) -> int:
        """Return the number of slab rows of the static tables on rank ``index``."""
        if self.place.placement == "row" and self.ranks > 1:
            return self.bases[-1] // BUCKETS * len(buckets_of(index, self.ranks))
        if self.place.placement == "table":
            return sum(
                table.rows or 0
                for table, place in zip(self.tables, self.places, strict=True)
                if place.owner == index
            )
        return self.bases[-1]

    def places_in_memory(self, index: int, line_bytes: int) -> int | None:
        """Return the number of rows in the cache of rank ``index``; None if the tables have no tiers.

        Args:
            index: index of the rank.
            line_bytes: bytes of a whole row with its optimizer state.
        """
        if self.tables[0].tiers is None:
            return None
        is_by_row = self.place.placement == "row"
        found = 0
        for table, place in zip(self.tables, self.places, strict=True):
            assert table.tiers is not None, "tables of a group have tiers together"
            if place.holds(index):
                found += table.tiers.rows_in_memory(table.rows, line_bytes, is_by_row, self.ranks)
        return found


def group_tables(
    tables: Sequence[TablePolicy],
    places: Mapping[str, TablePlacement],
    optimizer: RowOptimizerPolicy,
    ranks: int,
) -> list[TableGroup]:
    """Group the tables that may move together.

    Args:
        tables: the tables.
        places: placement of each table, by name.
        optimizer: optimizer of tables without their own.
        ranks: number of ranks.
    """
    found: dict[tuple[object, ...], list[TablePolicy]] = {}
    for table in tables:
        place = places[table.name]
        own = table.optimizer or optimizer
        dtypes = (table.dtype, table.state_dtype)
        folder = None if table.tiers is None else table.tiers.folder
        kind = (table.dynamic is not None, folder, table.marks_changes)
        key = (table.width, own, dtypes, place.placement, place.exchange, kind)
        found.setdefault(key, []).append(table)
    groups = []
    for members in found.values():
        ordered = sorted(members, key=lambda table: places[table.name].owner)
        groups.append(
            TableGroup(
                tuple(ordered),
                tuple(places[table.name] for table in ordered),
                ordered[0].optimizer or optimizer,
                ranks,
            )
        )
    return groups
