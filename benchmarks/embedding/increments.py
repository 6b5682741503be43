"""Seconds from the begin of an export of an increment to a reader in another process that has it.

    python benchmarks/embedding/increments.py --rows 1000000 --changed 50000 --increments 20
    python benchmarks/embedding/increments.py --reader scorer --rows 1000000 --changed 50000 --increments 20

The reader calls ``refresh`` every 50 ms and serves requests between. ``--reader vectors`` looks up 26 times 256
vectors; ``--reader scorer`` computes the logits of 256 samples by a DLRM of 26 features, whose dense part (about
0.2 MiB) is new in each increment too. Each request is of one step, or the program fails: numbers of rows name their
step, and logits are compared with those of a full export of each step. The largest of the seconds and the bytes of an
increment are printed, those of its rows apart from those of its dense part.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise import Scorer
from shardwise.base.ragged import Ragged
from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.models.ctr.build import build_ctr, described
from shardwise.models.ctr.policy import DlrmPolicy
from shardwise.models.dense_part import DensePart
from shardwise.models.increments import ChangedTable, ExportedStep, increment_name, write_increment
from shardwise.models.vectors import INCREMENTS, StoredTable, Vectors, write_vectors
from shardwise.parallel.embedding.policy import DynamicPolicy, TableOptions, TablesPolicy

RUN, WIDTH, FEATURES, DENSE, ASKED = "b3c4", 16, 26, 13, 256
TABLE = "tables.C0"
"""The table that changes; the other 25 of the model have few rows, which stay."""


def vectors_of(keys: Tensor, step: int) -> Tensor:
    """Return vectors of which all numbers are the step."""
    return torch.full((len(keys), WIDTH), float(step))


def dense_of(step: int) -> DensePart:
    """Return the dense part of a DLRM at a step: weights that differ from step to step."""
    schema = ClickSchema(
        tuple(f"n{i}" for i in range(DENSE)), tuple(SparseFeature(f"C{i}") for i in range(FEATURES))
    )
    tables = TablesPolicy(defaults=TableOptions(dynamic=DynamicPolicy()))
    model = build_ctr(DlrmPolicy(width=WIDTH, bottom=(64,), top=(128, 64)), schema, tables)
    draws = torch.Generator().manual_seed(step)
    tensors = {
        name: torch.randn(each.shape, generator=draws) / each.shape[-1]
        for name, each in model.named_parameters()
    }
    return DensePart(tensors, {"click_model": described(model), "target": None, "step": step})


def write_full(folder: Path, rows: int, step: int) -> None:
    """Write full vectors: the table that changes with ``rows`` rows, and 25 others with those that are asked for."""

    def table(name: str, count: int, value: int) -> StoredTable:
        keys = torch.arange(count)
        return StoredTable(name, count, WIDTH, True, lambda: iter([(0, keys, vectors_of(keys, value))]))

    others = [table(f"tables.C{i}", ASKED, 1) for i in range(1, FEATURES)]
    write_vectors(folder, [table(TABLE, rows, step), *others], step, dense=dense_of(step).to_write(), run=RUN)


def write_step(folder: Path, rows: int, changed: int, step: int) -> Path:
    """Write the increment that leads to a step, and return its folder."""
    keys, none = torch.arange(changed), torch.empty(0, dtype=torch.int64)

    def parts() -> Iterator[tuple[int, Tensor, Tensor]]:
        yield 0, keys, vectors_of(keys, step)

    tables = [ChangedTable(TABLE, changed, none, rows, WIDTH, True, parts)]
    tables += [
        ChangedTable(f"tables.C{i}", 0, none, ASKED, WIDTH, True, lambda: iter(()))
        for i in range(1, FEATURES)
    ]
    place = folder / INCREMENTS / RUN / increment_name(step - 1, step)
    start, end = ExportedStep(run=RUN, step=step - 1), ExportedStep(run=RUN, step=step)
    return write_increment(place, tables, start, end, dense=dense_of(step).to_write())


def batch() -> dict[str, Any]:
    """Return a request of 256 samples."""
    keys = torch.arange(ASKED)
    sparse = {f"C{i}": Ragged.of_ones(keys) for i in range(FEATURES)}
    return {"dense": torch.ones(ASKED, DENSE), "sparse": sparse}


def vectors_request(folder: Path) -> tuple[Any, Callable[[], None]]:
    """Return a reader of vectors, and a function that makes one request and checks it."""
    reader, keys = Vectors(folder), torch.arange(ASKED)

    def request() -> None:
        now = reader.at_this_step()
        found = torch.stack([now.lookup(TABLE, keys) for _ in range(FEATURES)])
        assert found.eq(float(now.step)).all(), "a request mixed steps"

    return reader, request


def scorer_request(folder: Path, last: int) -> tuple[Any, Callable[[], None]]:
    """Return a scorer, and a function that makes one request and checks it."""
    given, wanted = batch(), []
    for step in range(last + 1):
        with tempfile.TemporaryDirectory() as full:
            write_full(Path(full), ASKED, step)
            wanted.append(Scorer(full).score(given))
    truth, scorer = torch.stack(wanted), Scorer(folder)

    def request() -> None:
        differs = (scorer.score(given) - truth).abs().amax(1)
        assert float(differs.min()) <= 1e-6, "a request mixed steps"

    return scorer, request


def serve(folder: Path, last: int, kind: str) -> None:
    """Follow the folder up to step ``last``, and print the time at which each step was seen."""
    reader, request = vectors_request(folder) if kind == "vectors" else scorer_request(folder, last)
    requests = 0
    request()
    print("ready", flush=True)
    while reader.step < last:
        if reader.refresh():
            print(reader.step, time.time(), flush=True)
        end = time.time() + 0.05
        while time.time() < end:
            request()
            requests += 1
    print("requests", requests, flush=True)


def main() -> None:
    """Write full vectors and increments, and compare their times with those of a reader."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=int, default=50_000)
    parser.add_argument("--increments", type=int, default=20)
    parser.add_argument("--reader", choices=["vectors", "scorer"], default="vectors")
    parser.add_argument("--serve", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve is not None:
        serve(given.serve, given.increments, given.reader)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_full(folder, given.rows, 0)
        command = [sys.executable, __file__, "--serve", made, "--reader", given.reader]
        reader = subprocess.Popen(
            [*command, "--increments", str(given.increments)], stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        begun = {}
        for step in range(1, given.increments + 1):
            begun[step] = time.time()
            place = write_step(folder, given.rows, given.changed, step)
            time.sleep(0.2)
        dense = sum(file.stat().st_size for file in place.glob("dense*"))
        rows = sum(file.stat().st_size for file in place.glob("tables.*"))
        seen: dict[int, float] = {}
        for line in reader.stdout.read().splitlines():
            name, value = line.split()
            if name == "requests":
                print(f"{value} requests of {FEATURES} x {ASKED} lookups, none mixed steps")
            else:
                seen[int(name)] = float(value)
        assert reader.wait() == 0, "the reader failed"
        # A reader that was busy may have applied several increments at once; the last of them is printed.
        seconds = [
            min(at for step, at in seen.items() if step >= each) - since for each, since in begun.items()
        ]
        print(f"{given.changed} of {given.rows} rows: visible after {max(seconds):.3f} s at most")
        print(f"an increment: {rows:,} bytes of rows ({8 + 4 * WIDTH} a row), {dense:,} of the dense part")


if __name__ == "__main__":
    main()
