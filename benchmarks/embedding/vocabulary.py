"""A whole Wide&Deep step as the tables grow: 1, 5, 20 and 50 million rows, one process, one thread.

26 features of 4,096 samples over one pool of rows; a row is the wide weight and a vector of width 8; hidden layers
128, 64; dense parameters by Adam. Two laws of keys:

    same keys    the ranks of a Zipf law over 1 M, spread over all rows of the table: the same number of distinct rows
                 in every batch, whatever the table's size, so that what grows is only the table
    zipf         a Zipf law over all rows: larger tables see more distinct rows a batch

Rows are updated by row-wise Adagrad, with torch's nn.EmbeddingBag(sparse) by Adagrad. fbgemm takes widths that 4
divides: its rows are 12 wide.
"""

from __future__ import annotations

from typing import Any

import torch
from contender import Case, Contender, Running
from lookup import fbgemm_tables, torch_rule
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from zipf import BOUND, fill, ranks, spread

from shardwise.base.ragged import Ragged
from shardwise.models.ctr.policy import WideDeepPolicy
from shardwise.models.ctr.wide_deep import WideDeep
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy

FEATURES, DENSE, WIDTH = 26, 13, 8
LR, DENSE_LR, EPS = 0.01, 1e-3, 1e-8
FEWEST = 1_000_000


def cases(tiny: bool) -> list[Case]:
    sizes = (1_000, 5_000) if tiny else (FEWEST, 5_000_000, 20_000_000, 50_000_000)
    return [
        Case(
            "vocabulary",
            f"{law}, {rows:,} rows",
            1,
            {"rows": rows, "fewest": sizes[0], "samples": 64 if tiny else 4096, "law": law},
        )
        for law in ("same keys", "zipf")
        for rows in sizes
    ]


def contenders(case: Case) -> list[Contender]:
    found = [Contender("shardwise")]
    if case.options["law"] == "zipf":
        found += [Contender("fbgemm", ("fbgemm_gpu",)), Contender("EmbeddingBag, adagrad")]
    return found


def build(contender: Contender, case: Case, rank: int) -> Running:
    return {"shardwise": Ours, "fbgemm": Fbgemm, "EmbeddingBag, adagrad": Bag}[contender.name](case)


class Training(Running):
    def __init__(self, case: Case) -> None:
        self.rows, self.samples = case.options["rows"], case.options["samples"]
        self.known = self.rows if case.options["law"] == "zipf" else case.options["fewest"]
        self.distinct = 0

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys by feature [F, B], dense features, labels."""
        places = ranks(FEATURES * self.samples, self.known, number)
        keys = spread(places * (self.rows // self.known), self.rows)
        self.distinct = keys.unique().numel()
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(self.samples, DENSE, generator=generator)
        labels = (torch.rand(self.samples, generator=generator) < dense.sum(1).sigmoid()).float()
        return keys.view(FEATURES, self.samples), dense, labels

    def notes(self) -> dict[str, float]:
        return {"distinct rows a batch": self.distinct}

    def model(self) -> WideDeep:
        """The whole model; its table is not made before it is used."""
        names = tuple(f"f{number}" for number in range(FEATURES))
        table = TablePolicy(name="t", rows=self.rows, width=1 + WIDTH, features=names, init_bound=BOUND)
        policy = RowOptimizerPolicy(type="rowwise_adagrad", lr=LR, eps=EPS)
        return WideDeep(WideDeepPolicy(width=WIDTH, hidden=(128, 64)), DENSE, [table], policy)

    def dense_part(self) -> WideDeep:
        """The model without its tables, and Adam for it."""
        model = self.model()
        del model.tables
        self.adam = torch.optim.Adam(model.parameters(), lr=DENSE_LR, fused=True)
        return model

    def learn(self, dense: Tensor, vectors: Tensor, labels: Tensor) -> float:
        loss = binary_cross_entropy_with_logits(self.net.logits(dense, vectors), labels)
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        return float(loss.detach())

    net: WideDeep


class Ours(Training):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        import shardwise

        config = {
            "optimizer": {"type": "adam", "lr": DENSE_LR},
            "batch": {"micro_size": self.samples, "global_size": self.samples},
            "precision": "fp32",
        }
        self.engine = shardwise.initialize(self.model(), config)

    def data(self, number: int) -> Any:
        keys, dense, labels = self.batch(number)
        sparse = {f"f{place}": Ragged.of_ones(each) for place, each in enumerate(keys)}
        return [{"dense": dense, "sparse": sparse, "labels": labels}]

    def step(self, data: Any) -> float:
        return float(self.engine.train_step(data).loss)

    def state(self) -> list[float]:
        return [float(parameter.double().norm()) for parameter in self.engine.module.parameters()]


class _Plain(Training):
    def state(self) -> list[float]:
        return [float(parameter.detach().double().norm()) for parameter in self.net.parameters()]


class Fbgemm(_Plain):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net = self.dense_part()
        self.bags = fbgemm_tables([self.rows], 12, [0] * FEATURES, "rowwise_adagrad")
        fill(self.bags.split_embedding_weights()[0], "t")
        self.offsets = torch.arange(FEATURES * self.samples + 1)

    def data(self, number: int) -> Any:
        keys, dense, labels = self.batch(number)
        return keys.reshape(-1), dense, labels

    def step(self, data: Any) -> float:
        keys, dense, labels = data
        vectors = self.bags(keys, self.offsets).view(len(dense), FEATURES, 12)[:, :, : 1 + WIDTH]
        return self.learn(dense, vectors, labels)


class Bag(_Plain):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net = self.dense_part()
        weights = fill(torch.empty(self.rows, 1 + WIDTH), "t")
        self.bag = torch.nn.EmbeddingBag.from_pretrained(weights, freeze=False, mode="sum", sparse=True)
        self.rule = torch_rule("adagrad", self.bag)
        self.offsets = torch.arange(FEATURES * self.samples)

    def data(self, number: int) -> Any:
        keys, dense, labels = self.batch(number)
        return keys.t().reshape(-1), dense, labels

    def step(self, data: Any) -> float:
        keys, dense, labels = data
        vectors = self.bag(keys, self.offsets).view(len(dense), FEATURES, 1 + WIDTH)
        loss = self.learn(dense, vectors, labels)
        self.rule.step()
        self.rule.zero_grad()
        return loss
