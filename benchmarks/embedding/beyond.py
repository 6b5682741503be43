"""How large tables train in how little memory: tables in tiers under a limit on each process's memory (RLIMIT_DATA,
which counts what is reserved, touched or not).

    python beyond.py FOLDER [--gib 12] [--limit-gib 3] [--host-gib 1] [--steps 20] [--ranks 2 1]

A first job trains, saves into FOLDER/steps, and is gone. A second one with another number of ranks resumes from there,
trains on, and saves again. Each rank prints the most memory of its load, of its steps and of its save, and the ratio to
what a process of its own had foreseen of the job before: the sum of the rows of ``shardwise.foresee`` in memory, which
``shardwise train --check --memory`` prints of a configuration. What is foreseen is resident memory; the data segment
also has addresses that nobody has written to. FOLDER needs about 4 times the bytes of the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
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
from shardwise.models.initial import torch_rules
from shardwise.plan.plan import tier_of_row

GIB = 2**30
WIDTH, TABLES, SAMPLES = 64, 4, 16384
LINE_BYTES = 4 * (WIDTH + 1)
"""Bytes of a row with the state of row-wise Adagrad."""


def of_process(field: str) -> int:
    """Return the bytes of this process in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Peak:
    """The most memory of this process since ``begin``: resident pages as the kernel counts them, and the data segment,
    looked at every 5 ms.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was seen before."""
        Path("/proc/self/clear_refs").write_text("5")  # the largest resident memory begins anew
        self.data = of_process("VmData")

    @property
    def resident(self) -> int:
        """Most bytes of resident pages."""
        return of_process("VmHWM")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the process inside."""
        end = threading.Event()

        def watch() -> None:
            while not end.wait(0.005):
                self.data = max(self.data, of_process("VmData"))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()


class Clicks(nn.Module):
    """Static tables of one width, and a logit."""

    def __init__(self, rows: int, host_bytes: int, disk: Path) -> None:
        super().__init__()
        tiers = {"host": host_bytes // TABLES, "disk": disk, "hit_rate": 0.5}
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
    """Return this rank's part of a step's batch: half of the keys among the first rows, the others anywhere."""
    generator = torch.Generator().manual_seed(step)
    mine = slice(SAMPLES // ranks * rank, SAMPLES // ranks * (rank + 1))
    keys = {}
    for place in range(TABLES):
        found = torch.randint(0, rows, (SAMPLES,), generator=generator)
        found[torch.rand(SAMPLES, generator=generator) < 0.5] %= 50_000
        keys[f"t{place}"] = Ragged.of_ones(found[mine])
    labels = torch.rand(SAMPLES, generator=generator).round()[mine]
    return {"keys": keys, "labels": labels}


def model_of(given: argparse.Namespace) -> Clicks:
    """Return the model on meta."""
    with torch.device("meta"):
        return Clicks(given.rows, int(given.host_gib * GIB), given.folder / "disk")


def config_of(given: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the configuration of a job."""
    return {
        "optimizer": {"type": "adam", "lr": 1e-3},
        "batch": {"micro_size": SAMPLES // ranks},
        "checkpoint": {"every": given.steps},
    }


def foresee(given: argparse.Namespace, ranks: int) -> dict[str, dict[str, int]]:
    """Return the rows of the forecast at the most of each phase, as ``shardwise train --check --memory`` has them."""
    told = shardwise.foresee(
        lambda: model_of(given), config_of(given, ranks), ranks, example=batch_of(0, 0, ranks, given.rows)
    ).step
    assert told is not None, "there is an example"
    return {
        phase: {row: size for row, size in point.rows.items() if tier_of_row(row) != "disk"}
        for phase, point in told.points.items()
    }


def life(given: argparse.Namespace, told: dict[str, dict[str, int]]) -> None:
    """Train on one rank."""
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    limit = int(given.limit_gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    peak = Peak()
    model = model_of(given)
    engine = shardwise.initialize(model, config_of(given, ranks), initial=torch_rules(model))
    rank = engine.world.rank
    foreseen = max(sum(rows.values()) for rows in told.values())

    def say(what: str, begin: float) -> None:
        print(
            f"rank {rank} of {ranks}: {what} in {time.perf_counter() - begin:.1f} s: at most {peak.resident / GIB:.3f} "
            f"GiB resident, {peak.resident / foreseen:.3f} of what was foreseen; {peak.data / GIB:.3f} GiB of data, "
            f"{peak.data / limit:.2f} of the limit",
            flush=True,
        )
        peak.begin()

    if rank == 0:
        print("\n".join(line for line in str(engine.plan).splitlines() if "tiers" in line))
    with peak.watched():
        begin = time.perf_counter()
        if (given.folder / "steps").exists():
            engine.load(given.folder / "steps")
            say(f"loaded step {engine.step_count}", begin)
        stop, begin = engine.step_count + given.steps, time.perf_counter()
        while engine.step_count < stop:
            result = engine.train_step([batch_of(engine.step_count, rank, ranks, given.rows)])
        if rank == 0:
            held = ", ".join(f"{row} {size / GIB:.3f}" for row, size in engine.held_bytes().items() if size)
            print(f"step {result.step}, loss {result.loss.hex()}, held: {held} GiB")
        say(f"trained to step {result.step}", begin)
        begin = time.perf_counter()
        engine.save(given.folder / "steps")
        engine.wait_for_save()
        say(f"saved step {engine.step_count}", begin)
    engine.close(whole=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--gib", type=float, default=12.0, help="bytes of all tables with their optimizer state"
    )
    parser.add_argument("--limit-gib", type=float, default=3.0)
    parser.add_argument("--host-gib", type=float, default=1.0, help="rows in memory over all ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--foresee", type=int, metavar="RANKS", help="print the forecast alone, as JSON")
    parser.add_argument("--told", help="what was foreseen, as JSON, for a rank of a job")
    given = parser.parse_args()
    given.rows = int(given.gib * GIB / LINE_BYTES / TABLES)
    (given.folder / "disk").mkdir(parents=True, exist_ok=True)
    if given.foresee is not None:
        print(json.dumps(foresee(given, given.foresee)))
        return 0
    if given.told is not None:
        life(given, json.loads(given.told))
        return 0
    for ranks in given.ranks:
        print(f"{given.gib:g} GiB of tables on {ranks} ranks, each with {given.limit_gib:g} GiB", flush=True)
        command = [sys.executable, *sys.argv, "--foresee", str(ranks)]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for phase in ("load", "step", "save"):
            rows = ", ".join(f"{row} {size / GIB:.3f}" for row, size in told[phase].items())
            print(f"foreseen, {phase}: {sum(told[phase].values()) / GIB:.3f} GiB: {rows}", flush=True)
        launch = [sys.executable, "-m", "shardwise", "launch", "--ranks", str(ranks)]
        subprocess.run([*launch, *sys.argv, "--told", json.dumps(told)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
