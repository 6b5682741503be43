"""A model whose tables have far more rows than their caches, on segments so small that a few steps fill many."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import shardwise
from shardwise import MixtureOfExperts
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


class Block(nn.Module):
    """x + down(tanh(up(x))), or x + a mixture of experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        if experts:
            self.mixture = MixtureOfExperts(width, 2 * width, experts)
        else:
            self.up = nn.Linear(width, 2 * width)
            self.down = nn.Linear(2 * width, width)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        if self.experts:
            found: Tensor = x + self.mixture(x[:, None])[:, 0]  # a sample is a sequence of one token
            return found
        return x + self.down(torch.tanh(self.up(x)))


class Clicks(nn.Module):
    """A static table, a dynamic one that evicts, and an exact Adam; then blocks, and a logit.

    Args:
        placement: placement of the tables.
        folder: folder of the rows on disk; None for tables without tiers.
        few: rows in memory of each table.
        blocks: number of residual blocks.
        experts: number of experts in each block; 0 for dense blocks.
        table: more keys of all tables.
    """

    def __init__(
        self,
        placement: str,
        folder: Path | None,
        few: int = FEW,
        blocks: int = 0,
        experts: int = 0,
        **table: Any,
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {"width": WIDTH, "placement": placement, "init_bound": 0.1, **table}
        if folder is not None:
            given["tiers"] = RowTiersPolicy(host_rows=few, disk=folder)
        evicts = DynamicPolicy(capacity=900, eviction=EvictionPolicy(type="lru", fraction=0.1))
        exact = RowOptimizerPolicy(type="adam", lr=0.02, exact=not table)  # rows of 16 bits are not replayed
        self.tables = EmbeddingCollection(
            [
                TablePolicy(name="large", rows=ROWS, **given),
                TablePolicy(name="grows", dynamic=evicts, **given),
                TablePolicy(name="exact", rows=ROWS, optimizer=exact, **given),
            ],
            RowOptimizerPolicy(lr=0.05),
            seed=7,
        )
        self.blocks = nn.ModuleList(Block(3 * WIDTH, experts) for _ in range(blocks))
        self.out = nn.Linear(3 * WIDTH, 1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def tensor_table(self) -> dict[str, str]:
        """How layers are cut along "tp"."""
        return {"blocks.*.up": "column", "blocks.*.down": "row", "out": "replicate"}

    def forward(self, sparse: Mapping[str, Ragged], labels: Tensor) -> Tensor:
        found = self.tables(sparse)
        x = torch.cat([found[name] for name in ("large", "grows", "exact")], 1)
        for block in self.blocks:
            x = block(x)
        return nn.functional.binary_cross_entropy_with_logits(self.out(x)[:, 0], labels.to(x.dtype))


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


def build(
    world: World,
    placement: str,
    folder: Path | None,
    few: int = FEW,
    model: Mapping[str, Any] | None = None,
    **config: Any,
) -> Any:
    """Return an engine; ``model`` are further arguments of ``Clicks``."""
    config = {"optimizer": {"type": "adamw", "lr": 1e-2}, "comm": {"timeout_s": 60}, **config}
    return shardwise.initialize(Clicks(placement, folder, few, **(model or {})), config, world=world)


def train(engine: Any, step: int) -> float:
    """Loss of one step."""
    dp, count = engine._parts.groups["dp"], engine._parts.accumulation.microbatches
    batches = [batch(step + 1000 * i, dp.index, dp.size) for i in range(count)]
    return float(engine.train_step(batches).loss)


def state_of(engine: Any, tables: Collection[str] = ("large", "grows", "exact")) -> dict[str, Tensor]:
    """Copies of the dense weights and of all rows of this rank, with their state and scores."""
    modules = [stage.module for stage in engine._parts.stages]
    found = {name: each.detach().clone() for module in modules for name, each in module.named_parameters()}
    for collection in engine.tables.values():
        for table in (each for each in collection.tables if each.name in tables):
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
