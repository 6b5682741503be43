"""Times of steps while dynamic tables grow, evict and are saved: is any step far longer than the median?

    python benchmarks/embedding/stalls.py                       5,000 steps, 5 M rows in each of three full tables
    python benchmarks/embedding/stalls.py --saves 0             the same without saves
    python benchmarks/embedding/stalls.py --steps 40 --rows 2000 --saves 10        does it run?

One model of four tables of width 8 with row-wise Adagrad: ``grows`` has no limit and gets a row for half of its keys,
``lru`` and ``lfu`` are full from the first step that is timed, ``age`` evicts rows that have not come for 2 · rows /
4,096 steps. A step has 4,096 keys for each table: half of them new, the others mostly from the last rows. Every
``--saves`` steps ``engine.save`` writes the step behind training, into ``--folder``.

A line is printed every few seconds, and at the end the tail of the steps and what the longest of them did
(``step_times.py``). The bar is 3 times the median. Run it alone on the machine: another process's work is a stall too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step_times import StepTimes
from torch import Tensor, nn

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)

KEYS, WIDTH, WARM = 4096, 8, 20
NAMES = ("grows", "lru", "lfu", "age")
_SPREAD = -7_046_029_254_386_353_131
_FILL = 1 << 17
"""Keys of each table in a step that fills the tables before the clock starts."""


class Net(nn.Module):
    """A linear layer over the pooled vectors of four tables."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        evictions = {
            "grows": DynamicPolicy(),
            "lru": DynamicPolicy(capacity=rows, eviction=EvictionPolicy(type="lru")),
            "lfu": DynamicPolicy(capacity=rows, eviction=EvictionPolicy(type="lfu")),
            "age": DynamicPolicy(eviction=EvictionPolicy(type="age", max_age_steps=max(2 * rows // KEYS, 4))),
        }
        tables = [TablePolicy(name=name, width=WIDTH, dynamic=each) for name, each in evictions.items()]
        self.tables = EmbeddingCollection(tables, RowOptimizerPolicy(type="rowwise_adagrad", lr=0.01))
        self.last = nn.Linear(len(NAMES) * WIDTH, 1)

    def forward(self, **batch: Ragged) -> Tensor:
        vectors = self.tables(batch)
        return self.last(torch.cat([vectors[name] for name in NAMES], 1)).square().mean()


def batch_of(first: int, count: int, known: int, generator: torch.Generator) -> dict[str, Ragged]:
    """Return ``count`` keys for each table: half of them never seen, from number ``first`` on."""
    fresh = torch.arange(first, first + count // 2)
    old = first - 1 - (torch.rand(count - len(fresh), generator=generator) ** 4 * min(known, first)).long()
    keys = torch.cat([fresh, old]) * _SPREAD
    return {name: Ragged.of_ones(keys) for name in NAMES}


def filled(engine: Any, rows: int, generator: torch.Generator) -> int:
    """Fill the tables, until a pass of the search ahead is over too, and return the number of the next new key."""
    fill, seen, begun = min(_FILL, rows), 1, time.perf_counter()
    while seen < rows + fill:
        engine.train_step([batch_of(seen, fill, rows, generator)])
        seen += fill // 2
        if seen // (fill // 2) % 20 == 0:
            print(f"  filling: {seen} of {rows + fill} keys, {time.perf_counter() - begun:.0f} s", flush=True)
    return seen


def run(steps: int, rows: int, saves: int, folder: Path) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Net(rows)
    settings: dict[str, Any] = {"optimizer": {"type": "sgd", "lr": 0.01}, "checkpoint": {"keep_last": 1}}
    engine = shardwise.initialize(model, config=settings)
    seen = filled(engine, rows, generator)
    for _ in range(WARM):
        engine.train_step([batch_of(seen, KEYS, rows, generator)])
        seen += KEYS // 2
    times = StepTimes(engine, steps)
    for step in range(1, steps + 1):
        batch = batch_of(seen, KEYS, rows, generator)
        seen += KEYS // 2
        with times.step() as part:
            engine.train_step([batch])
            if saves and step % saves == 0:
                with part("save"):
                    engine.save(folder, asynchronous=True)
    engine.wait_for_save()
    for name, tally in engine.table_tallies().items():
        print(f"{name}: {tally.rows} rows, {tally.inserted} inserted, {tally.evicted} evicted")
    times.report("all steps")
    times.machine()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--saves", type=int, default=1000, help="steps between two saves; 0 saves never")
    parser.add_argument("--folder", type=Path, help="folder of the saves; left out, a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(given.steps, given.rows, given.saves, given.folder or Path(temporary))


if __name__ == "__main__":
    main()
