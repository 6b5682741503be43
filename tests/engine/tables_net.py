"""A model with embedding tables of every kind beside a dense network, and the same global batches on any ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    AdmissionPolicy,
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)

SAMPLES = 12
"""Of the global batch."""
ROWS = 2500
FEATURES = ("a", "b", "grows", "rare", "d")


class Net(nn.Module):
    """Five features, four tables, two widths; pooled to a logit by a small dense part."""

    def __init__(self, placements: Mapping[str, str], seed: int = 3):
        super().__init__()
        evicts = EvictionPolicy(type="lfu", fraction=0.1, pinned=(1,))
        waits = AdmissionPolicy(type="frequency", count=2)
        self.tables = EmbeddingCollection(
            [
                TablePolicy(
                    name="large", width=6, rows=ROWS, features=("a", "b"), pooling={"a": "sum", "b": "mean"}
                ),
                TablePolicy(name="grows", width=6, dynamic=DynamicPolicy(capacity=40, eviction=evicts)),
                TablePolicy(name="rare", width=6, dynamic=DynamicPolicy(admission=waits)),
                TablePolicy(
                    name="wide",
                    width=8,
                    rows=ROWS,
                    features=("d",),
                    optimizer=RowOptimizerPolicy(type="adam", lr=0.02),
                ),
            ],
            RowOptimizerPolicy(lr=0.05),
            seed=seed,
        )
        self.tables.tables = tuple(
            TablePolicy.model_validate(
                table.model_dump(exclude_unset=True) | {"placement": placements.get(table.name, "auto")}
            )
            for table in self.tables.tables
        )
        generator = torch.Generator().manual_seed(seed)
        self.hidden = nn.Linear(32, 8)
        self.out = nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, sparse: Mapping[str, Ragged], labels: Tensor) -> Tensor:
        found = self.tables(sparse)
        joined = torch.cat([found[name] for name in FEATURES], 1)
        logits = self.out(torch.tanh(self.hidden(joined)))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="sum"
        )
        return loss / max(len(labels), 1)


def build(world: World, placements: Mapping[str, str] | None = None, **config: Any) -> Any:
    """An engine of the net."""
    config = {
        "precision": "fp64",
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "max_grad_norm": 0.5,
        "schedule": {"type": "cosine", "warmup_steps": 3, "total_steps": 100},
        "comm": {"timeout_s": 60},
        **config,
    }
    return shardwise.initialize(Net(placements or {}), config, world=world)


def batch(step: int, start: int = 0, stop: int = SAMPLES) -> dict[str, Any]:
    """Samples [start, stop) of a step's global batch: several keys a sample, none in some; few that come often."""
    generator = torch.Generator().manual_seed(step)
    sparse = {}
    for name in FEATURES:
        lengths = torch.randint(0, 4, (SAMPLES,), generator=generator)
        keys = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        keys[::3] = keys[::3] % 7
        ends = [0, *lengths.cumsum(0).tolist()]
        lists = [keys[first:last].tolist() for first, last in zip(ends, ends[1:], strict=False)]
        sparse[name] = Ragged.of_lists(lists[start:stop])
    labels = torch.rand(SAMPLES, generator=generator).round()
    return {"sparse": sparse, "labels": labels[start:stop]}


def train(engine: Any, steps: int, microbatches: int = 1, shares: Sequence[int] | None = None) -> list[float]:
    """Losses of the next steps. ``shares``: samples of each rank; left out, equal ones."""
    world = engine.world
    shares = shares or [SAMPLES // world.size] * world.size
    first, mine = sum(shares[: world.rank]), shares[world.rank]
    losses = []
    for _ in range(steps):
        cuts = [first + mine * i // microbatches for i in range(microbatches + 1)]
        spans = list(zip(cuts, cuts[1:], strict=False))
        batches = [batch(engine.step_count, *span) for span in spans]
        losses.append(engine.train_step(batches, [float(stop - start) for start, stop in spans]).loss)
    return losses


def row_of(engine: Any) -> dict[str, dict[int, list[float]]]:
    """What this rank holds of each table, by key: weights and optimizer state of whole rows, scores."""
    found: dict[str, dict[int, list[float]]] = {}
    for collection in engine.tables.values():
        for table in collection.tables:
            rows = collection.rows_here(table.name)
            columns = [rows.weights.double(), *(rows.state[name].double() for name in sorted(rows.state))]
            if rows.scores is not None:
                columns.append(rows.scores[:, None].double())
            lines = torch.cat(columns, 1).tolist()
            found[table.name] = dict(zip(rows.keys.tolist(), lines, strict=True))
            if rows.candidates is not None:
                found[f"{table.name} waiting"] = {key: [count] for key, count in rows.candidates.tolist()}
    return found
