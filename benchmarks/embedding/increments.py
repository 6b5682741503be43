"""Seconds from the begin of an export of an increment to a reader in another process that has it.

    python benchmarks/embedding/increments.py --rows 1000000 --changed 50000 --increments 20

A reader calls ``refresh`` every 50 ms and serves requests of 26 lookups between; each request reads one step, or the
program fails. The largest of the seconds is printed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shardwise.models.increments import ChangedTable, ExportedStep, increment_name, write_increment
from shardwise.models.vectors import INCREMENTS, StoredTable, Vectors, write_vectors

RUN, WIDTH, FEATURES = "b3c4", 16, 26


def vectors_of(keys: Tensor, step: int) -> Tensor:
    """Return vectors of which all numbers are the step."""
    return torch.full((len(keys), WIDTH), float(step))


def serve(folder: Path, last: int) -> None:
    """Follow the folder up to step ``last``, and print the time at which each step was seen."""
    reader, requests = Vectors(folder), 0
    keys = torch.arange(256)
    print("ready", flush=True)
    while reader.step < last:
        if reader.refresh():
            print(reader.step, time.time(), flush=True)
        now, end = reader.at_this_step(), time.time() + 0.05
        while time.time() < end:
            found = torch.stack([now.lookup("user", keys) for _ in range(FEATURES)])
            assert found.eq(float(now.step)).all(), "a request mixed steps"
            requests += 1
    print("requests", requests, flush=True)


def main() -> None:
    """Write full vectors and increments, and compare their times with those of a reader."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=int, default=50_000)
    parser.add_argument("--increments", type=int, default=20)
    parser.add_argument("--serve", type=Path)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.increments)
        return
    with tempfile.TemporaryDirectory() as made:
        folder, keys = Path(made), torch.arange(given.rows)
        rows = StoredTable("user", given.rows, WIDTH, True, lambda: iter([(0, keys, vectors_of(keys, 0))]))
        write_vectors(folder, [rows], 0, run=RUN)
        command = [sys.executable, __file__, "--serve", made, "--increments", str(given.increments)]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        begun = {}
        for step in range(1, given.increments + 1):

            def parts(step: int = step) -> Iterator[tuple[int, Tensor, Tensor]]:
                yield 0, keys[: given.changed], vectors_of(keys[: given.changed], step)

            table = ChangedTable("user", given.changed, keys[:0], given.rows, WIDTH, True, parts)
            begun[step] = time.time()
            place = folder / INCREMENTS / RUN / increment_name(step - 1, step)
            write_increment(
                place, [table], ExportedStep(run=RUN, step=step - 1), ExportedStep(run=RUN, step=step)
            )
            time.sleep(0.2)
        seen: dict[int, float] = {}
        for line in reader.stdout.read().splitlines():
            name, value = line.split()
            if name == "requests":
                print(f"{value} requests of {FEATURES} lookups, none mixed steps")
            else:
                seen[int(name)] = float(value)
        # A reader that was busy may have applied several increments at once; the last of them is printed.
        seconds = [
            min(at for step, at in seen.items() if step >= each) - since for each, since in begun.items()
        ]
        print(f"{given.changed} of {given.rows} rows: visible after {max(seconds):.3f} s at most")


if __name__ == "__main__":
    main()
