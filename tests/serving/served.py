"""Trained click-through models for the tests of serving, and a model of a user's own with every pooling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.models.ctr.build import build_ctr
from shardwise.models.ctr.policy import CTR_POLICIES
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import DynamicPolicy, TableOptions, TablePolicy, TablesPolicy

FEATURES = ("user", "item", "tags", "topic", "shop")
SIZES = {
    "wide_deep": {"width": 4, "hidden": (8,)},
    "deepfm": {"width": 4, "hidden": (8,)},
    "dcn": {"width": 4, "cross_layers": 2, "rank": 3, "hidden": (8,), "structure": "parallel"},
    "dlrm": {"width": 4, "bottom": (8,), "top": (8,)},
}
TABLES = TablesPolicy(
    named={
        "user": TableOptions(dynamic=DynamicPolicy()),
        "item": TableOptions(rows=50, out_of_range="modulo"),
        "tags": TableOptions(dynamic=DynamicPolicy(), pooling="mean"),
        "topic": TableOptions(rows=30, pooling="max", out_of_range="clamp"),
        "shop": TableOptions(rows=30, pooling="mean"),
    }
)
CONFIG = {"optimizer": {"type": "adam", "lr": 0.01}, "precision": "fp32", "comm": {"timeout_s": 60}}
ASKED = 100
"""Seed of the batch that is predicted and scored."""


def built(name: str) -> nn.Module:
    """A model with tables of both kinds and all poolings that the built-in models take."""
    schema = ClickSchema(("a", "b", "c"), tuple(SparseFeature(each) for each in FEATURES))
    return build_ctr(CTR_POLICIES[name](**SIZES.get(name, {})), schema, TABLES, seed=3)


def batch(seed: int, samples: int = 12, keys: int = 40) -> dict[str, Any]:
    """Some samples have no key of a feature, and some have several; keys of ``tags`` have weights."""
    draws = torch.Generator().manual_seed(seed)
    sparse = {}
    for name in FEATURES:
        lengths = torch.ones(samples, dtype=torch.int64)
        if name not in ("user", "shop"):
            lengths = torch.randint(0, 4, (samples,), generator=draws)
        of_table = keys if name in ("user", "tags", "item") else 30
        values = torch.randint(0, of_table, (int(lengths.sum()),), generator=draws)
        if name in ("item", "topic"):
            values[::5] += 1000  # outside of the table
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = torch.rand(values.numel(), generator=draws) + 0.5 if name == "tags" else None
        sparse[name] = Ragged(values, offsets, weights)
    dense = torch.randn(samples, 3, generator=draws)
    return {"dense": dense, "sparse": sparse, "labels": torch.rand(samples, generator=draws).round()}


def trained(world: World, folder: str, names: list[str]) -> dict[str, list[float]]:
    """Train each model for three steps, save it under its name, and return the logits of ``batch(ASKED)``."""
    found = {}
    for name in names:
        engine = shardwise.initialize(built(name), CONFIG, world=world)
        for step in range(3):
            engine.train_step([batch(10 * step + world.rank)])
        engine.save(Path(folder) / name, asynchronous=False)
        engine.eval()
        (output,) = engine.predict([batch(ASKED, keys=90)])  # keys that no batch had
        found[name] = output["logits"].tolist()
        engine.close(whole=False)
    return found


class Own(nn.Module):
    """Two collections, one of them inside another module; poolings sum, concat and none; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(
            [
                TablePolicy(
                    name="words",
                    width=3,
                    dynamic=DynamicPolicy(),
                    features=("title", "pair", "text"),
                    pooling={"pair": "concat", "text": "none"},
                )
            ],
            seed=1,
        )
        self.inner = nn.ModuleDict(
            {"places": EmbeddingCollection([TablePolicy(name="city", width=2, rows=9)])}
        )
        self.norm = nn.BatchNorm1d(14)
        self.out = nn.Linear(14, 1)
        draws = torch.Generator().manual_seed(5)
        with torch.no_grad():
            self.out.weight.copy_(torch.randn(1, 14, generator=draws))
            self.out.bias.zero_()

    def forward(self, sparse: Mapping[str, Ragged], labels: Tensor | None = None) -> Any:
        words, city = self.tables(sparse), self.inner["places"](sparse)["city"]
        text = words["text"]
        sums = torch.segment_reduce(text.values, "sum", offsets=text.offsets, axis=0, unsafe=True, initial=0)
        x = torch.cat([words["title"], words["pair"], sums, city], 1)
        logits = self.out(self.norm(x)).squeeze(1)
        if labels is None:
            return logits
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def own_batch(seed: int, samples: int = 8) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(seed)

    def keys(limit: int, each: int) -> Ragged:
        values = torch.randint(0, limit, (samples * each,), generator=draws)
        return Ragged(values, torch.arange(samples + 1) * each)

    sparse = {"title": keys(20, 2), "pair": keys(20, 2), "text": keys(20, 3), "city": keys(9, 1)}
    return {"sparse": sparse, "labels": torch.rand(samples, generator=draws).round()}
