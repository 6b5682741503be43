"""Lookups: embedding tables in a pass on shapes, and the numbers of keys that an example batch has for them.

In a pass without numbers the tables hold no rows: ``strip_tables`` replaces the forward of each collection by one that
returns vectors of the right shapes. What the lookups send is foreseen from the numbers of keys
(parallel/embedding/calls.py). Keys without numbers count as distinct.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.base.ragged import Ragged
from shardwise.kernels.tables.wire import RowWire
from shardwise.parallel.embedding.calls import GroupLoad
from shardwise.parallel.embedding.collection import EmbeddingCollection, SequenceVectors
from shardwise.parallel.embedding.cost import TableLoad
from shardwise.parallel.embedding.placed import grouped
from shardwise.parallel.embedding.policy import TablePolicy
from shardwise.parallel.embedding.step_keys import mappings_of


def loads_of(collection: EmbeddingCollection, batch: Any, ranks: int) -> tuple[GroupLoad, ...]:
    """Return the groups of a collection's tables with the numbers of keys of ``batch``.

    Without its features in the batch, nothing is returned.

    Args:
        collection: A collection whose placements are chosen.
        batch: A microbatch of one rank.
        ranks: Number of data-parallel ranks.
    """
    names = {name for table in collection.tables for name in table.feature_names}
    having = [each for each in mappings_of(batch) if names <= {*each}]
    if not having:
        return ()
    groups = grouped(collection.tables, collection.optimizer, collection.choices, ranks)
    return tuple(
        GroupLoad(
            group,
            tuple(_load(table, having[0]) for table in group.tables),
            RowWire(collection.wire, collection.dtype),
        )
        for group in groups
    )


def _load(table: TablePolicy, features: Mapping[str, Ragged]) -> TableLoad:
    values = [features[name].values for name in table.feature_names]
    keys = sum(each.numel() for each in values)
    is_known = not any(isinstance(each, FakeTensor) or each.is_meta for each in values)
    distinct = torch.cat(values).unique().numel() if is_known else keys
    return TableLoad(keys, distinct, sum(features[name].samples for name in table.feature_names))


def strip_tables(module: nn.Module) -> None:
    """Let the collections of ``module`` return vectors without numbers. Call inside ``without_numbers``."""
    for each in module.modules():
        if isinstance(each, EmbeddingCollection):
            shapes = _Shapes(each)
            each.forward = shapes.by_feature  # type: ignore[method-assign, assignment]
            each.stacked = shapes.stacked  # type: ignore[method-assign, assignment]


class _Shapes:
    """Vectors of one collection, as shapes."""

    def __init__(self, collection: EmbeddingCollection):
        self._tables = collection.tables
        self._dtype = collection.dtype

    def _vectors(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, requires_grad=torch.is_grad_enabled())

    def stacked(self, features: Mapping[str, Ragged]) -> Tensor:
        """Return the vectors of all features, as ``EmbeddingCollection.stacked`` does."""
        names = [name for table in self._tables for name in table.feature_names]
        return self._vectors(features[names[0]].samples, len(names), self._tables[0].width)

    def by_feature(self, features: Mapping[str, Ragged]) -> dict[str, Any]:
        """Return the vectors by feature, as ``EmbeddingCollection.forward`` does."""
        return {
            name: self._of(table, name, features[name])
            for table in self._tables
            for name in table.feature_names
        }

    def _of(self, table: TablePolicy, name: str, keys: Ragged) -> Any:
        pooling, number, samples = table.pooling_of(name), keys.values.numel(), keys.samples
        if pooling == "none":
            return SequenceVectors(self._vectors(number, table.width), keys.offsets)
        if pooling == "concat":
            return self._vectors(samples, number // max(samples, 1) * table.width)
        return self._vectors(samples, table.width)
