"""How large tables train in how little memory: tables in tiers under a limit on each process's memory (RLIMIT_DATA,
which counts what is reserved, touched or not).

    python beyond.py FOLDER [--gib 12] [--limit-gib 3] [--host-gib 1] [--steps 20] [--ranks 2 1]

A first job trains, saves into FOLDER/steps, and is gone. A second one with another number of ranks resumes from there,
trains on, and saves again. Each rank prints its loss to the bit, its memory, and what ``shardwise.foresee`` said that a
step would take, which is what ``shardwise train --check --memory`` says of a configuration. FOLDER needs about 4 times
the bytes of the tables.
"""

from __future__ import annotations

import argparse
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise import EmbeddingCollection, Ragged, TablePolicy

GIB = 2**30
WIDTH, TABLES, SAMPLES = 64, 4, 4096
LINE_BYTES = 4 * (WIDTH + 1)
"""Bytes of a row with the state of row-wise Adagrad."""


def now() -> tuple[int, int]:
    """Return the bytes of this process: (data segment, resident pages)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return found["VmData"], found["VmRSS"]


class Peak:
    """The most of both since ``begin``, looked at every 5 ms inside of ``watched``."""

    def __init__(self) -> None:
        self.data, self.resident = now()

    def begin(self) -> None:
        """Forget what was seen before."""
        self.data, self.resident = now()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the process inside."""
        end = threading.Event()

        def watch() -> None:
            while not end.wait(0.005):
                data, resident = now()
                self.data, self.resident = max(self.data, data), max(self.resident, resident)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def __str__(self) -> str:
        return f"at most {self.data / GIB:.3f} GiB of data, {self.resident / GIB:.3f} resident"


class Clicks(nn.Module):
    """Static tables of one width, and a logit."""

    def __init__(self, rows: int, host_bytes: int, disk: Path) -> None:
        super().__init__()
        tiers = {"host": host_bytes // TABLES, "disk": disk}
        self.names = [f"t{place}" for place in range(TABLES)]
        self.tables = EmbeddingCollection(
            [
                TablePolicy(name=name, rows=rows, width=WIDTH, placement="row", tiers=tiers)
                for name in self.names
            ]
        )
        self.out = nn.Linear(TABLES * WIDTH, 1)

    def forward(self, keys: dict[str, Ragged], labels: Tensor) -> Tensor:
        found = self.tables(keys)
        logits = self.out(torch.cat([found[name] for name in self.names], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def batch_of(step: int, rank: int, ranks: int, rows: int) -> dict[str, Any]:
    """Return this rank's part of a step's batch: nine of ten keys among the first rows, the others anywhere."""
    generator = torch.Generator().manual_seed(step)
    mine = slice(SAMPLES // ranks * rank, SAMPLES // ranks * (rank + 1))
    keys = {}
    for place in range(TABLES):
        found = torch.randint(0, rows, (SAMPLES,), generator=generator)
        found[torch.rand(SAMPLES, generator=generator) < 0.9] %= 50_000
        keys[f"t{place}"] = Ragged.of_ones(found[mine])
    labels = torch.rand(SAMPLES, generator=generator).round()[mine]
    return {"keys": keys, "labels": labels}


def model_of(given: argparse.Namespace) -> Clicks:
    """Return the model on meta."""
    with torch.device("meta"):
        return Clicks(given.rows, int(given.host_gib * GIB), given.folder / "disk")


def life(given: argparse.Namespace, ranks: int) -> None:
    """Train on one rank."""
    torch.set_num_threads(1)
    peak = Peak()
    config = {"optimizer": {"type": "adam", "lr": 1e-3}, "batch": {"micro_size": SAMPLES // ranks}}
    from shardwise.models.initial import torch_rules

    first = now()
    example = batch_of(0, 0, ranks, given.rows)
    told = shardwise.foresee(lambda: model_of(given), config, ranks, example=example).step
    assert told is not None, "there is an example"
    limit = int(given.limit_gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = now()
    model = model_of(given)
    engine = shardwise.initialize(model, config, initial=torch_rules(model))
    rank = engine.world.rank

    def say(text: str) -> None:
        print(f"rank {rank} of {ranks}: {text}", flush=True)

    if rank == 0:
        foreseen = ", ".join(f"{row} {size / GIB:.3f}" for row, size in sorted(told.peak.rows.items()))
        say(f"foreseen at {told.peak.action} of {told.peak.unit}: {foreseen} GiB")
        print("\n".join(line for line in str(engine.plan).splitlines() if "tiers" in line))
    planned = sum(size for row, size in told.peak.rows.items() if row not in ("process", "tables on disk"))
    with peak.watched():
        if (given.folder / "steps").exists():
            begin = time.perf_counter()
            engine.load(given.folder / "steps")
            say(f"loaded step {engine.step_count} in {time.perf_counter() - begin:.0f} s: {peak}")
        peak.begin()
        stop = engine.step_count + given.steps
        while engine.step_count < stop:
            begin = time.perf_counter()
            result = engine.train_step([batch_of(engine.step_count, rank, ranks, given.rows)])
            seconds = time.perf_counter() - begin
        say(f"step {result.step}  loss {result.loss.hex()}  {seconds:.2f} s  {peak}")
        for what, most, start in (("data", peak.data, before[0]), ("resident", peak.resident, before[1])):
            say(
                f"steps, {what}: {most / GIB:.3f} GiB; foreseen {(start + planned) / GIB:.3f}, of it "
                f"{start / GIB:.3f} of the process ({(start - first[what == 'resident']) / GIB:.3f} of the forecast); "
                f"ratio {most / (start + planned):.3f}"
            )
        peak.begin()
        begin = time.perf_counter()
        engine.save(given.folder / "steps")
        say(f"saved step {engine.step_count} in {time.perf_counter() - begin:.0f} s: {peak}")
    engine.close(whole=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--gib", type=float, default=12.0, help="bytes of all tables with their optimizer state"
    )
    parser.add_argument("--limit-gib", type=float, default=3.0)
    parser.add_argument("--host-gib", type=float, default=1.0, help="rows in memory over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1])
    given = parser.parse_args()
    given.rows = int(given.gib * GIB / LINE_BYTES / TABLES)
    (given.folder / "disk").mkdir(parents=True, exist_ok=True)
    for ranks in given.ranks:
        print(f"{given.gib:g} GiB of tables on {ranks} ranks, each with {given.limit_gib:g} GiB", flush=True)
        shardwise.launch(life, given, ranks, ranks=ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
