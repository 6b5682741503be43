"""Collections whose tables grow with their keys."""

from typing import Any

import torch

from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    DynamicPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)

SGD = RowOptimizerPolicy(type="sgd", lr=0.1)


def collection_of(dynamic: DynamicPolicy, placement: str = "auto", **fields: Any) -> EmbeddingCollection:
    table = TablePolicy(**({"name": "t", "width": 3, "dynamic": dynamic, "placement": placement} | fields))
    return EmbeddingCollection([table], SGD, seed=1, dtype=torch.float64)


def train_on(collection: EmbeddingCollection, keys: list[int]) -> torch.Tensor:
    out = collection({"t": Ragged.of_ones(torch.tensor(keys, dtype=torch.int64))})["t"]
    out.sum().backward()
    collection.step()
    return out.detach()


def keys_of(collection: EmbeddingCollection) -> list[int]:
    return sorted(collection.rows_here("t").keys.tolist())
