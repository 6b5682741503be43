"""ServedCollection: a collection of tables whose vectors come from files, in the place of one that trains.

    keys of a batch -> fuse (fuse.py) -> vectors of all keys (hot_rows.py) -> pooled (ways.py)

Joining, checking and pooling are those of training, so the result is that of ``EmbeddingCollection`` on one rank. A
batch is not reduced to its distinct keys, because hot keys are found without a search. Calls share no state except hot
rows, which lock themselves: several threads may call one collection.

Shapes: N keys of a group of tables, D width.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.kernels.tables.wire import RowWire
from shardwise.parallel.embedding.batch import PreparedKeys
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.fuse import FusedKeys, batch_size, by_sample, fuse
from shardwise.parallel.embedding.group import TableGroup, group_tables
from shardwise.parallel.embedding.layout import TablePlacement
from shardwise.parallel.embedding.ways import KeyRequest, TableExchange
from shardwise.serving.hot_rows import HotRows, Keys, Lookup, WriteChanges

_NOTHING = torch.empty(0, dtype=torch.int64)


class _ServedTables(TableExchange):
    """The tables of one group, and their vectors in files.

    Args:
        tables: The group of tables.
        prefix: Name of the collection in the model, with a dot if it is not empty.
        dtype: The dtype of the vectors.
        lookup: Function that reads vectors from the files.
        cache_bytes: Most bytes of memory for hot rows.
    """

    def __init__(
        self, tables: TableGroup, prefix: str, dtype: torch.dtype, lookup: Lookup, cache_bytes: int
    ) -> None:
        super().__init__(tables, Group.alone("tables"), RowWire("fp32", dtype))
        names = [f"{prefix}{table.name}" for table in tables.tables]
        carrier = np.float64 if dtype == torch.float64 else np.float32
        self.hot = HotRows(names, tables.width, carrier, lookup, cache_bytes)
        nothing = np.empty(0, np.int64)
        lookup(tuple(names), nothing, nothing)  # the search is made ready here, and not in the first request
        self._of_features = np.array([feature.table for feature in tables.features])
        self._bases = np.array(tables.bases)
        self._last = _Ones(0, *self._ones(0))
        """What requests with one key for each feature and sample share."""

    def vectors(self, asked: KeyRequest) -> list[Tensor]:
        """Return the output of each run of features, as ``TableExchange.fetch``."""
        fused = asked.fused
        if fused.by_sample and fused.weights is None:
            places = None if fused.keys_by_sample else self._of_ones(fused.samples).places
            return [torch.from_numpy(self.hot.read(*self._named(fused), places))]
        rows = torch.from_numpy(self.hot.read(*self._named(fused)))
        return self._pooled(asked, rows)

    def ask(self, fused: FusedKeys, lane: object = None) -> KeyRequest:
        """Return the keys of a batch, each with its own place."""
        if fused.by_sample and fused.weights is None:
            return KeyRequest(fused, fused.keys, _NOTHING, _NOTHING)  # vectors are read to where they belong
        places = torch.arange(fused.keys.numel())
        if fused.by_sample and not fused.keys_by_sample:
            places = by_sample(places, fused.samples)
        return KeyRequest(fused, fused.keys, places, _NOTHING)

    def _named(self, fused: FusedKeys) -> tuple[Keys, Keys]:
        """Return the keys of the tables themselves, and the index of the table of each key."""
        keys = fused.keys.numpy()
        if self.tables.is_dynamic:
            if fused.offsets is None:
                return keys, self._of_ones(fused.samples).tables
            return keys, np.repeat(self._of_features, np.diff(fused.starts))
        tables = np.searchsorted(self._bases[1:], keys, side="right")
        return keys - self._bases[tables], tables

    def _of_ones(self, samples: int) -> "_Ones":
        """Return what requests of as many samples share, if every sample has one key of each feature."""
        found = self._last  # another thread may replace it
        if found.samples != samples:
            self._last = found = _Ones(samples, *self._ones(samples))
        return found

    def _ones(self, samples: int) -> tuple[Keys, Keys]:
        """Return tables and places of keys that stand feature after feature; see ``_Ones``."""
        features = self._of_features.size
        places = np.arange(features * samples).reshape(samples, features).T.reshape(-1)
        return np.repeat(self._of_features, samples), np.ascontiguousarray(places)


class _Ones(NamedTuple):
    """Numbers of the keys of a request with one key for each feature and sample, feature after feature."""

    samples: int
    tables: Keys
    """Index of the table of each key: int64 [F·B]."""
    places: Keys
    """Place of each key's vector if vectors stand sample after sample: int64 [F·B]."""


class _ServedParts(NamedTuple):
    """The groups of tables of a collection, as ``PlacedTables`` has them."""

    parts: tuple[_ServedTables, ...]


class ServedCollection(EmbeddingCollection):
    """A collection whose vectors come from files.

    Args:
        stands_for: The collection whose place it takes.
        name: Name of the collection in the model.
        dtype: The dtype of the vectors: fp32 or fp64.
        lookup: Function of the full names of tables, keys, and the place of each key's table, that reads vectors from
            the files.
        cache_bytes: Most bytes of memory for hot rows.
    """

    def __init__(
        self,
        stands_for: EmbeddingCollection,
        name: str,
        dtype: torch.dtype,
        lookup: Lookup,
        cache_bytes: int,
    ) -> None:
        super().__init__(stands_for.tables, stands_for.optimizer, stands_for.seed, dtype)
        places = {table.name: TablePlacement("data_parallel") for table in self.tables}
        groups = group_tables(self.tables, places, self.optimizer, 1)
        bytes_of = [cache_bytes * len(each.tables) // len(self.tables) for each in groups]
        prefix = f"{name}." if name else ""
        self._served = _ServedParts(
            tuple(
                _ServedTables(each, prefix, dtype, lookup, most)
                for each, most in zip(groups, bytes_of, strict=True)
            )
        )

    @property
    def hot(self) -> list[HotRows]:
        """The hot rows of each group of tables."""
        return [part.hot for part in self._served.parts]

    def take_over(self, before: "ServedCollection", write_changes: WriteChanges) -> None:
        """Hold the hot rows that this collection held at an earlier step, as they are now.

        Args:
            before: The same collection at a step of the same files, with as much memory.
            write_changes: Function that brings vectors to the step of this collection.
        """
        for mine, theirs in zip(self.hot, before.hot, strict=True):
            mine.take_over(theirs, write_changes)

    @property
    def placed(self) -> _ServedParts:  # type: ignore[override]
        """The groups of tables."""
        return self._served

    @functools.cached_property
    def feature_names(self) -> list[str]:
        """Names of all features, in the order of ``stacked``."""
        return [feature.name for part in self._served.parts for feature in part.tables.features]

    def _vectors(
        self, features: "Mapping[str, Ragged] | PreparedKeys"
    ) -> tuple[PreparedKeys, list[list[Tensor]]]:
        if isinstance(features, PreparedKeys):
            raise UsageError(
                "embedding: a served collection reads features, and no keys that were prepared ahead"
            )
        samples = batch_size(features)
        if not self._has_looked:
            self._tell_of_unread(features)
        asked = [part.ask(fuse(part.tables, features, self.dtype)) for part in self._served.parts]
        offsets = {
            feature.name: features[feature.name].offsets
            for part in self._served.parts
            for feature in part.tables.features
            if feature.pooling == "none"
        }
        found = [part.vectors(each) for part, each in zip(self._served.parts, asked, strict=True)]
        return PreparedKeys(samples, offsets, asked), found
