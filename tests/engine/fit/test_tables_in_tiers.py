"""Memory of tables with tiers is foreseen as the parts count it: indexes, buffers, and what saves and loads take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.engine.fit.beside_steps import load_rows, table_bytes_at_save
from shardwise.engine.fit.foresee import foresee
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import DynamicPolicy, EvictionPolicy, TablePolicy
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.simulate.storages import LiveBytes

ROWS = {"few": 20_000, "many": 100_000}
CACHED = {"few": 9_000, "many": 30_000, "grows": 14_000}
KEYS = 60_000
"""Capacity of the dynamic table."""
WIDTH = 48
"""Width at which the two static tables are read when they are written."""


class Clicks(nn.Module):
    """Two static tables in one group, with caches of two sizes, and a dynamic table that may evict."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        grows = DynamicPolicy(capacity=KEYS, eviction=EvictionPolicy(type="lru"), initial_rows=64)
        tiers = {name: {"host_rows": rows, "disk": folder} for name, rows in CACHED.items()}
        self.tables = EmbeddingCollection(
            [TablePolicy(name=name, rows=rows, width=WIDTH, tiers=tiers[name]) for name, rows in ROWS.items()]
            + [TablePolicy(name="grows", width=4, dynamic=grows, tiers=tiers["grows"])]
        )
        self.out = nn.Linear(2 * WIDTH + 4, 1)

    def forward(self, keys: dict[str, Ragged]) -> Tensor:
        found = self.tables(keys)
        loss: Tensor = self.out(torch.cat([found[name] for name in CACHED], 1)).square().mean()
        return loss


def batch(part: int) -> dict[str, Any]:
    """Return the keys of a step: as many as a rank has in memory, of which none came before."""
    samples = min(CACHED.values())
    keys = torch.arange(samples) + part * samples
    return {"keys": {name: Ragged.of_ones(keys % ROWS.get(name, KEYS)) for name in CACHED}}


def test_memory_is_what_the_parts_count(tmp_path: Path) -> None:
    """A term that is left out of the forecast, or counted twice, is more than the difference that is allowed."""
    plan = foresee(lambda: Clicks(tmp_path), {}).plan
    engine = shardwise.initialize(Clicks(tmp_path), {})
    tables, live = engine.tables["tables"], LiveBytes()
    loaded = []
    for every in (1, 2, 3, 2, 3):  # segments are left with some of their rows, and compaction begins
        for name, rows in ROWS.items():
            keys = torch.arange(0, rows, every)
            lines = torch.zeros(len(keys), WIDTH)
            live.most = live.held
            with live:
                tables.load_rows(name, KeyedRows.of_weights(keys, lines))
            loaded.append(live.most + lines.nbytes)
    for part in range(-(-KEYS // min(CACHED.values()))):
        engine.train_step([batch(part)])
    below = [part.store.tiers.below for part in tables.placed.parts if part.store.tiers is not None]
    begun = [each.figures().bytes_compacted > 0 for each in below]  # type: ignore[attr-defined]
    assert begun == [True, False]
    held, foreseen = engine.held_bytes(), plan.bytes_per_rank()
    foreseen["table indexes"] -= below[1].shape.block_bytes  # type: ignore[attr-defined]  # not taken yet
    for row in ("table cache", "table indexes"):
        assert held[row] == pytest.approx(foreseen[row], rel=0.004), row
    assert 0.3 * load_rows(plan, 0)["read"] <= max(loaded) <= load_rows(plan, 0)["read"]
    saved = streamed(tables, live)
    engine.close(whole=False)
    assert 0.5 * table_bytes_at_save(plan, 0) <= max(saved.values()) <= table_bytes_at_save(plan, 0)


def streamed(tables: EmbeddingCollection, live: LiveBytes) -> dict[str, int]:
    """Most bytes of storages while a save reads a block of each kind of number of the large table."""
    tables.saved.begin_save()
    found = tables.saved.rows_to_stream("many")
    assert found is not None, "rows of this table are read when they are written"
    most = {}
    for kind, (columns, dtype) in found[0].columns.items():
        live.most = live.held
        with live:
            found[0].read(kind, (0, min(ROWS["many"], 2**24 // (columns * dtype.itemsize))))
        most[kind] = live.most
    tables.saved.close()
    return most
