"""Forward, backward and update of embedding tables alone, one thread.

26 features of 4,096 samples, one key each, from a Zipf law with exponent 1.05 over 10 M rows: one pool of rows that
all features share, or 26 tables of 10 M / 26 rows with a law of their own. What comes back as the gradient of the
vectors is the same fixed tensor for everybody.

``shardwise`` is given one ``Ragged`` a feature and joins them within the measured time; the peers are given the flat
keys and offsets that they take.
"""

from __future__ import annotations

from typing import Any

import torch
from contender import Case, Contender, Running
from torch import Tensor, nn
from zipf import BOUND, fill, zipf

from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import RowOptimizerName, RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.transfer import SlabRows

FEATURES, SAMPLES, ROWS = 26, 4096, 10_000_000
LR, EPS = 0.01, 1e-8
WATCHED = 4096
"""Keys of the first batch whose rows are looked at in the end."""


def cases(tiny: bool) -> list[Case]:
    sizes = {"features": FEATURES, "samples": 64 if tiny else SAMPLES, "rows": 2600 if tiny else ROWS}
    every = ["rowwise_adagrad", "adagrad", "sgd"]
    return [
        Case("lookup", "one pool, width 16", 1, {**sizes, "width": 16, "optimizers": every, "tables": 1}),
        Case("lookup", "one pool, width 64", 1, {**sizes, "width": 64, "optimizers": every[:2], "tables": 1}),
        Case(
            "lookup", "26 tables, width 16", 1, {**sizes, "width": 16, "optimizers": every[::2], "tables": 26}
        ),
    ]


def contenders(case: Case) -> list[Contender]:
    found = []
    wide = case.options["width"] > 16
    for optimizer in case.options["optimizers"]:
        if not (wide and optimizer == "adagrad"):  # memory: nobody is compared with it at this width
            found.append(Contender(f"shardwise, {optimizer}"))
            found.append(Contender(f"fbgemm, {optimizer}", ("fbgemm_gpu",)))
        if optimizer != "rowwise_adagrad":  # torch has none
            found.append(Contender(f"EmbeddingBag, {optimizer}"))
    return found


def build(contender: Contender, case: Case, rank: int) -> Running:
    kind, optimizer = contender.name.split(", ")
    return {"shardwise": Ours, "fbgemm": Fbgemm, "EmbeddingBag": Bag}[kind](case, optimizer)


class Lookup(Running):
    """Keys and gradient, the same for everybody."""

    def __init__(self, case: Case, optimizer: str) -> None:
        options = case.options
        self.features, self.samples, self.width = options["features"], options["samples"], options["width"]
        self.tables, self.rows = options["tables"], options["rows"] // options["tables"]
        self.optimizer = optimizer
        generator = torch.Generator().manual_seed(0)
        self.gradient = torch.randn(self.samples, self.features, self.width, generator=generator)
        self.watched = self.keys(0).view(-1)[:WATCHED].unique()

    def keys(self, number: int) -> Tensor:
        """By feature: [F, B]."""
        if self.tables == 1:
            return zipf(self.features * self.samples, self.rows, number).view(self.features, self.samples)
        seeds = range(number * self.features, (number + 1) * self.features)
        return torch.stack([zipf(self.samples, self.rows, seed) for seed in seeds])

    def figures(self, rows: Tensor) -> list[float]:
        rows = rows.double()
        return [float(rows.sum()), float((rows * rows).sum()), float(rows[len(rows) // 2, 0])]


class Ours(Lookup):
    def __init__(self, case: Case, optimizer: RowOptimizerName) -> None:
        super().__init__(case, optimizer)
        names = [f"f{number}" for number in range(self.features)]
        if self.tables == 1:
            tables = [self.table("t0", names)]
        else:
            tables = [self.table(f"t{number}", [name]) for number, name in enumerate(names)]
        policy = RowOptimizerPolicy(type=optimizer, lr=LR)
        if optimizer != "sgd":
            policy = policy.model_copy(update={"eps": EPS})
        self.collection = EmbeddingCollection(tables, policy)
        self.collection.place()
        self.names = names

    def table(self, name: str, features: list[str]) -> TablePolicy:
        return TablePolicy(
            name=name, rows=self.rows, width=self.width, features=tuple(features), init_bound=BOUND
        )

    def data(self, number: int) -> dict[str, Ragged]:
        return {name: Ragged.of_ones(keys) for name, keys in zip(self.names, self.keys(number), strict=True)}

    def step(self, data: dict[str, Ragged]) -> float:
        self.collection.stacked(data).backward(self.gradient)
        self.collection.step()
        return 0.0

    def state(self) -> list[float]:
        store = self.collection.placed.parts[0].store
        rows = store.rows(self.watched, [], learns=False)
        return self.figures(store.read(SlabRows(rows, rows)))


class Fbgemm(Lookup):
    """The fused tables of fbgemm-gpu-cpu, which TorchRec runs."""

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        self.module = fbgemm_tables(
            [self.rows] * self.tables,
            self.width,
            list(range(self.features)) if self.tables > 1 else [0] * self.features,
            optimizer,
        )
        for number, weights in enumerate(self.module.split_embedding_weights()):
            fill(weights, f"t{number}")
        self.offsets = torch.arange(self.features * self.samples + 1)
        self.flat_gradient = self.gradient.view(self.samples, -1)

    def data(self, number: int) -> Tensor:
        return self.keys(number).reshape(-1)

    def step(self, data: Tensor) -> float:
        self.module(data, self.offsets).backward(self.flat_gradient)
        return 0.0

    def state(self) -> list[float]:
        return self.figures(self.module.split_embedding_weights()[0][self.watched].detach())


class Bag(Lookup):
    """One nn.EmbeddingBag with sparse gradients for all features, and torch's optimizer."""

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        weights = torch.empty(self.tables * self.rows, self.width)
        for number in range(self.tables):
            fill(weights[number * self.rows : (number + 1) * self.rows], f"t{number}")
        self.module = nn.EmbeddingBag.from_pretrained(weights, freeze=False, mode="sum", sparse=True)
        self.step_rule = torch_rule(optimizer, self.module)
        self.offsets = torch.arange(self.features * self.samples)
        self.bases = torch.arange(self.features) * self.rows if self.tables > 1 else torch.zeros(1).long()
        self.flat_gradient = self.gradient.view(-1, self.width)

    def data(self, number: int) -> Tensor:
        """Sample after sample, so that nothing is turned within the measured time."""
        return (self.keys(number) + self.bases[:, None]).t().reshape(-1)

    def step(self, data: Tensor) -> float:
        self.step_rule.zero_grad()
        self.module(data, self.offsets).backward(self.flat_gradient)
        self.step_rule.step()
        return 0.0

    def state(self) -> list[float]:
        return self.figures(self.module.weight.detach()[self.watched])


def fbgemm_tables(rows: list[int], width: int, table_of_feature: list[int], optimizer: str) -> Any:
    """fbgemm's fused tables on the CPU."""
    import fbgemm_gpu  # noqa: F401
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    rules = {
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "sgd": EmbOptimType.EXACT_SGD,
    }
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(number, width, *place) for number in rows],
        feature_table_map=table_of_feature,
        optimizer=rules[optimizer],
        learning_rate=LR,
        eps=EPS,
    )


def torch_rule(optimizer: str, module: nn.Module) -> torch.optim.Optimizer:
    """torch's optimizer of that name."""
    if optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), lr=LR)
    return torch.optim.Adagrad(module.parameters(), lr=LR, eps=EPS)
