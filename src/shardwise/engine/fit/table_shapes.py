"""Embedding tables in a pass on shapes: vectors of the right shape in place of lookups, which read keys.

    pooled feature    [B, D]          concat    [B, n·D]          none    one vector for each key

Only the vectors are counted. Keys, their indices and the rows that a step fetches depend on the keys of its batch.

Shapes: B samples, D width of a table's vectors, n keys in each sample.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.batch import SequenceVectors
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.placed import grouped


def shape_tables(module: nn.Module) -> None:
    """Let the collections of tables in ``module`` return vectors without looking up rows.

    Call inside ``without_numbers``, on a module that is used for nothing else.
    """
    for each in module.modules():
        if isinstance(each, EmbeddingCollection):
            vars(each)["forward"] = partial(_vectors, each)
            vars(each)["stacked"] = partial(_stacked, each)


def _outputs(
    collection: EmbeddingCollection, features: Mapping[str, Ragged]
) -> list[tuple[Any, int, Tensor]]:
    """Return (feature, samples, vectors of its keys) of each feature."""
    found = []
    collection.choose(1)
    learns = torch.is_grad_enabled() and collection.training
    for group in grouped(collection.tables, collection.optimizer, collection.choices, 1):
        samples, rows = 0, []
        for feature in group.features:
            ragged = features[feature.name]
            samples = ragged.offsets.numel() - 1
            keys = ragged.values.numel()
            rows.append(keys if feature.pooling in ("none", "concat") else samples)
        fetched = torch.empty(sum(rows), group.width, dtype=collection.dtype, requires_grad=learns)
        for feature, part in zip(group.features, fetched.split(rows), strict=True):
            found.append((feature, samples, part))
    return found


def _vectors(collection: EmbeddingCollection, features: Mapping[str, Ragged]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for feature, samples, part in _outputs(collection, features):
        if feature.pooling == "none":
            found[feature.name] = SequenceVectors(part, features[feature.name].offsets)
        else:
            found[feature.name] = part.reshape(samples, -1)
    return found


def _stacked(collection: EmbeddingCollection, features: Mapping[str, Ragged]) -> Tensor:
    return torch.stack([part for _, _, part in _outputs(collection, features)], 1)
