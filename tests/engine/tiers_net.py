"""A model whose tables have far more rows than their caches, on segments so small that a few steps fill many."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.memory import page_reads
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)
from shardwise.parallel.embedding.rows import store
from shardwise.tiers.row_segments import RowSegments
from shardwise.tiers.row_tiers import RowTiersPolicy

ROWS, SAMPLES, WIDTH = 3000, 96, 16
FEW = 300
"""Rows in memory of each table; a step of all ranks has about 170."""
SMALL = {"segment_bytes": 4 * 4096, "block_bytes": 4096}
"""Segments of about a hundred rows."""


class Clicks(nn.Module):
    """A static table, a dynamic one that evicts, and an exact Adam; then a logit."""

    def __init__(self, placement: str, folder: Path | None, few: int = FEW):
        super().__init__()
        given: dict[str, Any] = {"width": WIDTH, "placement": placement, "init_bound": 0.1}
        if folder is not None:
            given["tiers"] = RowTiersPolicy(host_rows=few, disk=folder)
        evicts = DynamicPolicy(capacity=900, eviction=EvictionPolicy(type="lru", fraction=0.1))
        exact = RowOptimizerPolicy(type="adam", lr=0.02, exact=True)
        self.tables = EmbeddingCollection(
            [
                TablePolicy(name="large", rows=ROWS, **given),
                TablePolicy(name="grows", dynamic=evicts, **given),
                TablePolicy(name="exact", rows=ROWS, optimizer=exact, **given),
            ],
            RowOptimizerPolicy(lr=0.05),
            seed=7,
        )
        self.out = nn.Linear(3 * WIDTH, 1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, sparse: Mapping[str, Ragged], labels: Tensor) -> Tensor:
        found = self.tables(sparse)
        logits = self.out(torch.cat([found[name] for name in ("large", "grows", "exact")], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def batch(step: int, rank: int, ranks: int) -> dict[str, Any]:
    """This rank's samples of a step: two keys each, of which some come often."""
    generator = torch.Generator().manual_seed(step)
    sparse = {}
    mine = slice(SAMPLES // ranks * rank, SAMPLES // ranks * (rank + 1))
    for name in ("large", "grows", "exact"):
        keys = (ROWS * torch.rand(SAMPLES, 2, generator=generator) ** 2).long() * 7919 % ROWS
        sparse[name] = Ragged.of_lists(keys[mine].tolist())
    labels = torch.rand(SAMPLES, generator=generator).round()
    return {"sparse": sparse, "labels": labels[mine]}


def build(world: World, placement: str, folder: Path | None, few: int = FEW, **config: Any) -> Any:
    config = {"optimizer": {"type": "adamw", "lr": 1e-2}, "comm": {"timeout_s": 60}, **config}
    return shardwise.initialize(Clicks(placement, folder, few), config, world=world)


def train(engine: Any, step: int) -> float:
    """Loss of one step."""
    dp = engine._parts.groups["dp"]
    return float(engine.train_step([batch(step, dp.index, dp.size)]).loss)


def state_of(engine: Any) -> dict[str, Tensor]:
    """Copies of the dense weights and of all rows of this rank, with their state and scores."""
    found = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
    for collection in engine.tables.values():
        for table in collection.tables:
            rows = collection.rows_here(table.name)
            found |= {f"{table.name} keys": rows.keys, f"{table.name} weights": rows.weights}
            found |= {f"{table.name} {name}": each for name, each in rows.state.items()}
            if rows.scores is not None:
                found[f"{table.name} scores"] = rows.scores
    return found


def is_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def small_segments() -> Iterator[None]:
    """Make segments of a few pages, which are read without a compiled loop, so that a failing disk is met."""
    small = partial(RowSegments, threads=2, **SMALL)
    with patch.object(store, "RowSegments", small), patch.object(page_reads, "has_numba", lambda: False):
        yield
