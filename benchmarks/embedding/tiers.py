"""Samples per second of tables with tiers beside tables that fit in memory, and the longest of many steps.

    python benchmarks/embedding/tiers.py FOLDER [--rows 4000000] [--cached 200000] [--hits 0.95] [--rounds 5]
    python benchmarks/embedding/tiers.py FOLDER --long 5000        # the longest step over the median, with saves

Both engines train one model on the same batches, in turns, with the rows of the next step read ahead; the batches are
made before the clock starts, because what makes them would take a core from the thread that reads ahead. A share
``--hits`` of the keys is drawn from rows that stay in the cache, the others from all rows. Every row of the table is
written once before, so that no miss is a row that is merely drawn.

``--long`` runs one engine with tiers and a dynamic table that grows and evicts, and saves every ``--saves`` steps while
steps go on. It prints a line every few seconds, and at the end what the longest steps did (``step_times.py``).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from step_times import StepTimes
from torch import Tensor, nn

import shardwise
from shardwise import DynamicPolicy, EmbeddingCollection, Ragged, TablePolicy
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows

FEATURES, WIDTH, BATCH, WARM = 4, 16, 4096, 20
_CHUNK = 1 << 18


class Clicks(nn.Module):
    """One table that several features read, below a small dense network."""

    def __init__(self, table: TablePolicy) -> None:
        super().__init__()
        self.tables = EmbeddingCollection([table])
        self.dense = nn.Sequential(nn.Linear(FEATURES * WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, keys: dict[str, Ragged], clicks: Tensor) -> Tensor:
        found = self.tables(keys)
        joined = torch.cat([found[f"f{number}"] for number in range(FEATURES)], 1)
        return nn.functional.binary_cross_entropy_with_logits(self.dense(joined)[:, 0], clicks)


def batches_of(rows: int, hot: int, hits: float, steps: int, seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Yield batches whose keys are among the first ``hot`` with probability ``hits``, and anywhere else."""
    for step in range(steps):
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        keys = {}
        for number in range(FEATURES):
            near = torch.randint(0, hot, (BATCH,), generator=random)
            far = torch.randint(hot, rows, (BATCH,), generator=random)
            is_near = torch.rand(BATCH, generator=random) < hits
            keys[f"f{number}"] = Ragged.of_ones(torch.where(is_near, near, far))
        yield [{"keys": keys, "clicks": torch.rand(BATCH, generator=random).round()}]


def engine_of(table: dict[str, Any]) -> Any:
    """Return an engine of the model with one table."""
    names = tuple(f"f{number}" for number in range(FEATURES))
    model = Clicks(TablePolicy(name="t", width=WIDTH, features=names, **table))
    return shardwise.initialize(model, {"optimizer": {"type": "adam", "lr": 1e-3}})


def written_once(engine: Any, rows: int) -> None:
    """Load every row of the table, so that rows that are not in memory are on the disk."""
    (collection,) = engine.tables.values()
    for start in range(0, rows, _CHUNK):
        keys = torch.arange(start, min(start + _CHUNK, rows))
        collection.load_rows("t", KeyedRows.of_weights(keys, torch.zeros(keys.numel(), WIDTH)))


def seconds_of(engine: Any, batches: Iterator[Any]) -> list[float]:
    """Return the seconds of each step."""
    found, last = [], time.perf_counter()
    with engine.prefetch(batches) as steps:
        for step in steps:
            engine.train_step(step)
            now = time.perf_counter()
            found.append(now - last)
            last = now
    return found


def compare(options: argparse.Namespace) -> None:
    """Print samples per second with and without tiers, in turns."""
    tiers = {"host_rows": options.cached, "disk": options.folder}
    engines = {
        "in memory": engine_of({"rows": options.rows}),
        "in tiers": engine_of({"rows": options.rows, "tiers": tiers}),
    }
    for engine in engines.values():
        written_once(engine, options.rows)
    hot = options.cached // 2
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.rounds + 1):
        for name, engine in engines.items():
            batches = list(batches_of(options.rows, hot, options.hits, options.steps, turn))
            seconds = seconds_of(engine, iter(batches))
            figures = engine.take_tier_figures()
            if turn:  # the first turn warms up
                found[name].append(statistics.median(seconds))
            if turn and figures is not None:
                needed = max(figures.hits + figures.misses, 1)
                print(
                    f"turn {turn}: {figures.hits / needed:.1%} of the rows in memory when needed, "
                    f"{figures.read_ahead} read ahead, {figures.stall_s:.3f} s waited for rows"
                )
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name, median in medians.items():
        print(f"{name}: {BATCH / median:,.0f} samples/s")
    print(f"ratio: {medians['in memory'] / medians['in tiers']:.3f}")
    for engine in engines.values():
        engine.close()


def longest(options: argparse.Namespace) -> None:
    """Print the tail of many steps with growth, eviction, compaction and saves."""
    grows = DynamicPolicy(capacity=options.rows // 2, eviction={"type": "lfu"})
    engine = engine_of({"dynamic": grows, "tiers": {"host_rows": options.cached, "disk": options.folder}})
    times = StepTimes(engine, options.long)
    with tempfile.TemporaryDirectory() as saved:
        batches = batches_of(options.rows, options.cached // 2, options.hits, WARM + options.long)
        with engine.prefetch(batches) as steps:
            for batch in islice(steps, WARM):
                engine.train_step(batch)
            for number in range(1, options.long + 1):
                with times.step() as part:
                    with part("next batch"):
                        batch = next(steps)
                    engine.train_step(batch)
                    if options.saves and number % options.saves == 0:
                        with part("save"):
                            engine.save(saved, asynchronous=True)
        engine.wait_for_save()
        figures = engine.take_tier_figures()
        print(f"{engine.table_tallies()}; {figures}")
    times.report("all steps")
    times.machine()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a folder on a local disk")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--cached", type=int, default=200_000)
    parser.add_argument("--hits", type=float, default=0.95)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, default=0, help="steps of the run for the longest step")
    parser.add_argument("--saves", type=int, default=500, help="steps between two saves; 0 saves never")
    options = parser.parse_args()
    if options.long:
        longest(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
