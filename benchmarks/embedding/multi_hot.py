"""Many keys a sample: the hotness and the vocabularies of MLPerf's recommender, the latter divided by 400.

26 tables of width 32, 1,024 samples, up to 100 keys a feature and sample, added; forward, backward and update by
row-wise Adagrad, one process, one thread.
"""

from __future__ import annotations

import torch
from contender import Case, Contender, Running
from lookup import EPS, LR, fbgemm_tables, torch_rule
from torch import Tensor, nn
from zipf import BOUND, fill, zipf

from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.transfer import SlabRows

HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
WIDTH = 32


def cases(tiny: bool) -> list[Case]:
    return [
        Case(
            "multi_hot",
            "26 tables, width 32",
            1,
            {"samples": 16 if tiny else 1024, "share": 4000 if tiny else 400},
        )
    ]


def contenders(case: Case) -> list[Contender]:
    return [
        Contender("shardwise, rowwise_adagrad"),
        Contender("fbgemm, rowwise_adagrad", ("fbgemm_gpu",)),
        Contender("shardwise, sgd"),
        Contender("fbgemm, sgd", ("fbgemm_gpu",)),
        Contender("EmbeddingBag, sgd"),
        Contender("EmbeddingBag, adagrad"),
    ]


def build(contender: Contender, case: Case, rank: int) -> Running:
    kind, optimizer = contender.name.split(", ")
    return {"shardwise": Ours, "fbgemm": Fbgemm, "EmbeddingBag": Bag}[kind](case, optimizer)


class Lookup(Running):
    def __init__(self, case: Case, optimizer: str) -> None:
        self.samples, self.optimizer = case.options["samples"], optimizer
        self.rows = [max(3, rows // case.options["share"]) for rows in ROWS]
        generator = torch.Generator().manual_seed(0)
        self.gradient = torch.randn(self.samples, len(ROWS), WIDTH, generator=generator)
        self.lengths = torch.tensor(HOTNESS).repeat_interleave(self.samples)
        self.offsets = torch.cat([torch.zeros(1).long(), self.lengths.cumsum(0)])
        self.watched = self.keys(0)[0].unique()

    def keys(self, number: int) -> list[Tensor]:
        """Of each feature: [B · hotness]."""
        return [
            zipf(self.samples * hotness, rows, number * len(ROWS) + place)
            for place, (hotness, rows) in enumerate(zip(HOTNESS, self.rows, strict=True))
        ]

    def figures(self, rows: Tensor) -> list[float]:
        rows = rows.double()
        return [float(rows.sum()), float((rows * rows).sum()), float(rows[len(rows) // 2, 0])]

    def notes(self) -> dict[str, float]:
        return {"keys a step": int(self.offsets[-1])}


class Ours(Lookup):
    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        tables = [
            TablePolicy(name=f"t{place}", rows=rows, width=WIDTH, init_bound=BOUND)
            for place, rows in enumerate(self.rows)
        ]
        policy = RowOptimizerPolicy(type=optimizer, lr=LR)  # type: ignore[arg-type]
        self.collection = EmbeddingCollection(tables, policy.model_copy(update={"eps": EPS}))
        self.collection.place()
        self.ends = [torch.arange(self.samples + 1) * hotness for hotness in HOTNESS]

    def data(self, number: int) -> dict[str, Ragged]:
        pairs = zip(self.keys(number), self.ends, strict=True)
        return {f"t{place}": Ragged(keys, ends) for place, (keys, ends) in enumerate(pairs)}

    def step(self, data: dict[str, Ragged]) -> float:
        self.collection.stacked(data).backward(self.gradient)
        self.collection.step()
        return 0.0

    def state(self) -> list[float]:
        store = self.collection.placed.parts[0].store
        return self.figures(store.read(SlabRows(self.watched, self.watched)))


class Fbgemm(Lookup):
    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        self.module = fbgemm_tables(self.rows, WIDTH, list(range(len(ROWS))), optimizer)
        for place, weights in enumerate(self.module.split_embedding_weights()):
            fill(weights, f"t{place}")
        self.flat_gradient = self.gradient.view(self.samples, -1)

    def data(self, number: int) -> Tensor:
        return torch.cat(self.keys(number))

    def step(self, data: Tensor) -> float:
        self.module(data, self.offsets).backward(self.flat_gradient)
        return 0.0

    def state(self) -> list[float]:
        return self.figures(self.module.split_embedding_weights()[0][self.watched].detach())


class Bag(Lookup):
    """One nn.EmbeddingBag over all tables; its bags stand by feature, so its gradient is turned beforehand."""

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        bases = torch.tensor([0, *self.rows]).cumsum(0)
        weights = torch.empty(int(bases[-1]), WIDTH)
        for place in range(len(ROWS)):
            fill(weights[bases[place] : bases[place + 1]], f"t{place}")
        self.module = nn.EmbeddingBag.from_pretrained(weights, freeze=False, mode="sum", sparse=True)
        self.rule = torch_rule(optimizer, self.module)
        self.bases = bases[:-1].repeat_interleave(torch.tensor(HOTNESS) * self.samples)
        self.flat_gradient = self.gradient.transpose(0, 1).reshape(-1, WIDTH)

    def data(self, number: int) -> Tensor:
        return torch.cat(self.keys(number)) + self.bases

    def step(self, data: Tensor) -> float:
        self.rule.zero_grad()
        self.module(data, self.offsets[:-1]).backward(self.flat_gradient)
        self.rule.step()
        return 0.0

    def state(self) -> list[float]:
        return self.figures(self.module.weight.detach()[self.watched])
