"""Dynamic tables that grow and evict: 5 % of the keys of each step are new, two ranks of one thread.

One table of width 16 that 26 features of 4,096 samples a rank read, capacity 2 M rows, LFU; it is full before the clock
starts. Of each batch 95 % of the keys come from a Zipf law over 1.5 M keys that have come before, 5 % have never been
seen, on any rank. A step is lookup with insertion, backward, update by row-wise Adagrad, scores, and every few steps
the eviction of 5 % of the rows: times are means over a turn's steps, evictions included.

No peer on a CPU inserts and evicts keys: TorchRec's and HugeCTR's dynamic tables need a GPU.
"""

from __future__ import annotations

import torch
from contender import Case, Contender, Running
from torch import Tensor
from zipf import ranks

from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import join
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)

FEATURES, WIDTH, NEW = 26, 16, 0.05
_SPREAD = -7_046_029_254_386_353_131


def cases(tiny: bool) -> list[Case]:
    sizes = {
        "capacity": 4_000 if tiny else 2_000_000,
        "known": 3_000 if tiny else 1_500_000,
        "samples": 16 if tiny else 4096,
    }
    return [
        Case("dynamic", "two ranks", 2, sizes),
        Case("dynamic", "one rank", 1, sizes),
    ]


def contenders(case: Case) -> list[Contender]:
    return [Contender("shardwise")]


def build(contender: Contender, case: Case, rank: int) -> Running:
    return Ours(case, rank)


class Ours(Running):
    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        options = case.options
        self.keys_here = options["samples"] * FEATURES
        self.samples = options["samples"] * case.ranks
        grows = DynamicPolicy(
            capacity=options["capacity"],
            initial_rows=options["capacity"],
            eviction=EvictionPolicy(type="lfu"),
        )
        names = tuple(f"f{number}" for number in range(FEATURES))
        table = TablePolicy(name="t", width=WIDTH, dynamic=grows, features=names)
        self.collection = EmbeddingCollection([table], RowOptimizerPolicy(type="rowwise_adagrad"))
        self.collection.place(self._group(), batch=options["samples"])
        self.gradient = torch.randn(options["samples"], FEATURES, WIDTH) / 1000
        self._fill()

    def _group(self) -> Group | None:
        if self.case.ranks == 1:
            return None
        world = join(quiet=True)
        everyone = tuple(range(self.case.ranks))
        return world.group_among(everyone, "dp", CommPolicy(), StepClock(300.0), Traffic())

    def _fill(self) -> None:
        """As many rows as the table may have, so that evictions begin at once."""
        known = _scattered(torch.arange(self.case.options["capacity"]))
        for start in range(0, len(known), self.keys_here * self.case.ranks):
            own = known[start + self.rank * self.keys_here :][: self.keys_here]
            self._learn(_as_features(_padded(own, self.keys_here, known[0])))

    def data(self, number: int) -> dict[str, Ragged]:
        seed = number * self.case.ranks + self.rank
        keys = ranks(self.keys_here, self.case.options["known"], seed)
        fresh = int(self.keys_here * NEW)
        generator = torch.Generator().manual_seed(seed)
        places = torch.randperm(self.keys_here, generator=generator)[:fresh]
        keys[places] = self.case.options["capacity"] + seed * fresh + torch.arange(fresh)
        return _as_features(_scattered(keys))

    def step(self, data: dict[str, Ragged]) -> float:
        self._learn(data)
        return 0.0

    def _learn(self, features: dict[str, Ragged]) -> None:
        self.collection.stacked(features).backward(self.gradient)
        self.collection.step(divisor=self.case.ranks)

    def notes(self) -> dict[str, float]:
        (tally,) = self.collection.tallies.values()
        return {
            "keys a step": self.keys_here * self.case.ranks,
            "rows here": tally.rows,
            "inserted here": tally.inserted,
            "evicted here": tally.evicted,
        }


def _scattered(places: Tensor) -> Tensor:
    """Keys of 64 bits, one for each place."""
    return places * _SPREAD


def _padded(keys: Tensor, size: int, filler: Tensor) -> Tensor:
    return torch.cat([keys, filler.expand(size - len(keys))])


def _as_features(keys: Tensor) -> dict[str, Ragged]:
    parts = keys.view(FEATURES, -1)
    return {f"f{number}": Ragged.of_ones(part) for number, part in enumerate(parts)}
