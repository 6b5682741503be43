"""A small DLRM, trained end to end: two ranks of one thread over gloo or shared memory.

26 tables of 100,000 rows and width 16, one key each, 2,048 samples a rank; bottom 13-64-16, all pairs, top
367-128-64-1; dense parameters by Adam. Labels come from a planted teacher. Everybody has the same start weights, the
same batches and the same dense network, interaction included (``shardwise.models.ctr.dlrm``, whose ``index_select`` and
symmetric backward pass the peers get too).

    shardwise         initialize(model), train_step: the planner places the tables; row-wise Adagrad, or Adagrad
    shardwise, ahead  the same steps through ``engine.prefetch``: keys of the next step are exchanged in another thread
    torchrec          DistributedModelParallel, every table on one rank, fused row-wise Adagrad; DDP for the rest;
                      "with its interaction": that of torchrec.models.dlrm in place of ours
    DDP               DistributedDataParallel over one nn.EmbeddingBag(sparse) for all features and the dense part;
                      torch's Adagrad for the rows, which knows no row-wise form: its loss is beside that of
                      ``shardwise, adagrad``

The loss is the mean over both ranks; gradients of rows are means over them too, for everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from contender import Case, Contender, Running
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from zipf import BOUND, fill, zipf

from shardwise.base.ragged import Ragged
from shardwise.models.ctr.dlrm import Dlrm
from shardwise.models.ctr.policy import DlrmPolicy
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy

FEATURES, DENSE, WIDTH = 26, 13, 16
LR, DENSE_LR, EPS = 0.02, 1e-3, 1e-8


def cases(tiny: bool) -> list[Case]:
    sizes = {"rows": 200 if tiny else 100_000, "samples": 64 if tiny else 2048}
    return [Case("end_to_end", "two ranks", 2, sizes)]


def contenders(case: Case) -> list[Contender]:
    return [
        Contender("shardwise, rowwise_adagrad"),
        Contender("shardwise, ahead, rowwise_adagrad"),
        Contender("torchrec, rowwise_adagrad", ("torchrec", "fbgemm_gpu")),
        Contender("torchrec with its interaction, rowwise_adagrad", ("torchrec", "fbgemm_gpu")),
        Contender("shardwise, adagrad"),
        Contender("DDP, adagrad"),
    ]


def build(contender: Contender, case: Case, rank: int) -> Running:
    kind, *_, optimizer = contender.name.split(", ")
    if kind == "shardwise":
        return Ours(case, rank, optimizer, ahead="ahead" in contender.name)
    if kind == "DDP":
        return Ddp(case, rank, optimizer)
    return TorchRec(case, rank, optimizer, own_interaction="interaction" in kind)


class Batch:
    """What a rank is given in a step."""

    def __init__(self, case: Case, rank: int, number: int) -> None:
        rows, samples = case.options["rows"], case.options["samples"]
        seed = 2 * number + rank
        generator = torch.Generator().manual_seed(seed)
        self.dense = torch.randn(samples, DENSE, generator=generator)
        self.keys = torch.stack([zipf(samples, rows, seed * FEATURES + each) for each in range(FEATURES)])
        # The teacher: a weight for each key, from a hash of it, and one for each dense feature.
        weights = ((self.keys * 2_654_435_761 >> 7) % 1009).float() / 504 - 1
        logits = weights.sum(0) / 3 + self.dense.sum(1) / 5
        self.labels = (torch.rand(samples, generator=generator) < logits.sigmoid()).float()


class Training(Running):
    def __init__(self, case: Case, rank: int, optimizer: str) -> None:
        self.case, self.rank, self.optimizer = case, rank, optimizer
        self.rows = case.options["rows"]
        self.samples = case.options["samples"] * case.ranks
        self.names = [f"f{number}" for number in range(FEATURES)]

    def model(self) -> Dlrm:
        """The whole model, its tables not yet placed."""
        tables = [
            TablePolicy(name=name, rows=self.rows, width=WIDTH, init_bound=BOUND) for name in self.names
        ]
        policy = RowOptimizerPolicy(type=self.optimizer, lr=LR, eps=EPS)  # type: ignore[arg-type]
        return Dlrm(DlrmPolicy(width=WIDTH, bottom=(64,), top=(128, 64)), DENSE, tables, policy)

    def dense_part(self) -> Dlrm:
        """The model without its tables."""
        model = self.model()
        del model.tables
        return model


class Ours(Training):
    def __init__(self, case: Case, rank: int, optimizer: str, ahead: bool) -> None:
        super().__init__(case, rank, optimizer)
        import shardwise

        config = {
            "optimizer": {"type": "adam", "lr": DENSE_LR},
            "batch": {"micro_size": case.options["samples"], "global_size": self.samples},
            "mesh": {"dp": case.ranks},
            "precision": "fp32",
        }
        self.engine = shardwise.initialize(self.model(), config)
        self.ahead: Iterator[Any] | None = self.engine.prefetch(self._endless(), 1) if ahead else None
        self.next = 0

    def _endless(self) -> Iterator[list[dict[str, Any]]]:
        number = 0
        while True:
            yield [self.made[number]]
            del self.made[number]
            number += 1

    made: dict[int, dict[str, Any]] = {}

    def _batch(self, number: int) -> dict[str, Any]:
        batch = Batch(self.case, self.rank, number)
        sparse = {name: Ragged.of_ones(keys) for name, keys in zip(self.names, batch.keys, strict=True)}
        return {"dense": batch.dense, "sparse": sparse, "labels": batch.labels}

    def data(self, number: int) -> Any:
        if self.ahead is None:
            return [self._batch(number)]
        for each in (number, number + 1):  # the thread asks for one more
            if each >= self.next:
                self.made[each] = self._batch(each)
                self.next = each + 1
        return None

    def step(self, data: Any) -> float:
        result = self.engine.train_step(data if self.ahead is None else next(self.ahead))
        return float(result.loss)

    def state(self) -> list[float]:
        return [float(parameter.double().norm()) for parameter in self.engine.module.parameters()]

    def other_bytes(self) -> int:
        return int(self.engine.traffic.total().bytes)


class TorchRec(Training):
    def __init__(self, case: Case, rank: int, optimizer: str, own_interaction: bool) -> None:
        super().__init__(case, rank, optimizer)
        import torch.distributed as dist
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import ShardingEnv, ShardingType
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.keyed import KeyedOptimizerWrapper
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        names, rows = self.names, self.rows
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=rows, feature_names=[name])
            for name in names
        ]
        bags = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
        apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": LR, "eps": EPS})
        world = dist.group.WORLD
        assert world is not None
        by_table = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=case.ranks, compute_device="cpu", local_world_size=case.ranks),
            batch_size=case.options["samples"],
            constraints={name: by_table for name in names},
        )
        sharders: Any = [EmbeddingBagCollectionSharder()]
        net = _BagNet(bags, self.dense_part(), names, _their_interaction(names) if own_interaction else None)
        if own_interaction:
            _turn_pairs(net.dense)
        self.net = DistributedModelParallel(
            net,
            env=ShardingEnv.from_process_group(world),
            device=torch.device("cpu"),
            plan=planner.collective_plan(net, sharders, world),
            sharders=sharders,
        )
        # Sharding draws weights anew, so the start rows come last.
        with torch.no_grad():
            for lookup in self.net.module.bags._lookups:
                for module in lookup._emb_modules:
                    for key, weights in module.named_split_embedding_weights():
                        fill(weights, key.removesuffix(".weight"))
        dense = {name: each for name, each in self.net.named_parameters() if ".dense." in f".{name}"}
        self.adam = KeyedOptimizerWrapper(
            dense, lambda given: torch.optim.Adam(given, lr=DENSE_LR, fused=True)
        )

    def data(self, number: int) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        batch = Batch(self.case, self.rank, number)
        lengths = torch.ones(batch.keys.numel(), dtype=torch.int32)
        return KeyedJaggedTensor(self.names, batch.keys.reshape(-1), lengths=lengths), batch

    def step(self, data: Any) -> float:
        keyed, batch = data
        self.adam.zero_grad()
        loss = binary_cross_entropy_with_logits(self.net(batch.dense, keyed), batch.labels)
        loss.backward()
        self.adam.step()
        return float(loss.detach())

    def state(self) -> list[float]:
        dense = [each for name, each in self.net.named_parameters() if ".dense." in f".{name}"]
        return [float(parameter.detach().double().norm()) for parameter in dense]


class _BagNet(nn.Module):
    """torchrec's tables beside the dense part."""

    def __init__(self, bags: nn.Module, dense: Dlrm, names: list[str], interaction: nn.Module | None) -> None:
        super().__init__()
        self.bags, self.dense, self.names, self.interaction = bags, dense, names, interaction

    def forward(self, dense: Tensor, keyed: Any) -> Tensor:
        found = self.bags(keyed)
        vectors = found.values().view(len(dense), len(self.names), WIDTH)
        place = {name: number for number, name in enumerate(found.keys())}  # by owners
        order = torch.tensor([place[name] for name in self.names])
        vectors = vectors.index_select(1, order)
        if self.interaction is None:
            return self.dense.logits(dense, vectors)
        return self.dense.top(self.interaction(self.dense.bottom(dense), vectors)).squeeze(1)


def _their_interaction(names: list[str]) -> nn.Module:
    from torchrec.models.dlrm import InteractionArch

    return InteractionArch(num_sparse_features=len(names))


@torch.no_grad()
def _turn_pairs(model: Dlrm) -> None:
    """torchrec has the pairs of the upper triangle, ours are those of the lower one: the same network after a change of
    columns."""
    vectors, weight = FEATURES + 1, model.top[0].weight
    row, column = torch.tril_indices(vectors, vectors, -1)
    place = torch.empty(vectors, vectors, dtype=torch.int64)
    place[column, row] = torch.arange(len(row))
    first, second = torch.triu_indices(vectors, vectors, 1)
    weight[:, WIDTH:] = weight[:, WIDTH:][:, place[first, second]].clone()


class Ddp(Training):
    def __init__(self, case: Case, rank: int, optimizer: str) -> None:
        super().__init__(case, rank, optimizer)
        weights = torch.empty(FEATURES * self.rows, WIDTH)
        for number, name in enumerate(self.names):
            fill(weights[number * self.rows : (number + 1) * self.rows], name)
        bag = nn.EmbeddingBag.from_pretrained(weights, freeze=False, mode="sum", sparse=True)
        net = _OneBagNet(bag, self.dense_part())
        self.net = nn.parallel.DistributedDataParallel(net)
        self.adam = torch.optim.Adam(net.dense.parameters(), lr=DENSE_LR, fused=True)
        self.adagrad = torch.optim.Adagrad(bag.parameters(), lr=LR, eps=EPS)
        self.offsets = torch.arange(FEATURES * case.options["samples"])
        self.bases = torch.arange(FEATURES) * self.rows

    def data(self, number: int) -> Any:
        batch = Batch(self.case, self.rank, number)
        return (batch.keys + self.bases[:, None]).t().reshape(-1), batch

    def step(self, data: Any) -> float:
        keys, batch = data
        self.adam.zero_grad()
        self.adagrad.zero_grad()
        loss = binary_cross_entropy_with_logits(self.net(batch.dense, keys, self.offsets), batch.labels)
        loss.backward()
        self.adam.step()
        self.adagrad.step()
        return float(loss.detach())

    def state(self) -> list[float]:
        return [float(each.detach().double().norm()) for each in self.net.module.dense.parameters()]


class _OneBagNet(nn.Module):
    """One bag for all features beside the dense part."""

    def __init__(self, bag: nn.EmbeddingBag, dense: Dlrm) -> None:
        super().__init__()
        self.bag, self.dense = bag, dense

    def forward(self, dense: Tensor, keys: Tensor, offsets: Tensor) -> Tensor:
        vectors = self.bag(keys, offsets).view(len(dense), FEATURES, WIDTH)
        return self.dense.logits(dense, vectors)
