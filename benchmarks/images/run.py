"""A step of the examples with pictures beside the slower of its halves: reading alone, computing alone.

    python benchmarks/images/run.py [--rounds 8] [--steps 8] [--examples cifar ...] [--readme README.md]

Two CPU ranks, one thread each, the example as it is. In one job three ways take turns, round by round, some steps each:

    read        all ranks take the batches of as many steps and do nothing with them
    compute     training steps over batches that lie in memory
    both        training steps as a run makes them

The first step of each turn is not measured: it empties or fills what is read ahead. The ratio is that of one round, of
wall clock; CPU seconds are those of all ranks and of the processes that read for them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "data_parallel")]

from machine import describe  # noqa: E402
from table import insert  # noqa: E402

WAYS = ("read", "compute", "both")
Figures = dict[str, list[dict[str, float]]]


def worker(example: str, rounds: int, steps: int, out: Path) -> None:
    """One rank."""
    import torch

    from shardwise.cli.image_trainer import ImageTrainer
    from shardwise.cli.request import CommandRequest
    from shardwise.cli.runs.run_folder import RunFolder
    from shardwise.comm.world import join
    from shardwise.config.auto import resolve

    world = join(quiet=True)
    config = CommandRequest(example, (f"output_dir={out.parent / 'run'}",)).load()
    trainer = ImageTrainer(
        world, resolve(config, world.size, world.device.type), RunFolder(Path(config.output_dir))
    )
    stream = trainer.steps()
    held = [next(stream) for _ in range(2)]
    everyone = trainer.engine._parts.groups["world"]

    def train(batches: list[Any]) -> None:
        trainer.train_step(batches, trainer.weights(batches))

    ways: dict[str, Callable[[int], Any]] = {
        "read": lambda _: next(stream),
        "compute": lambda number: train(held[number % len(held)]),
        "both": lambda _: train(next(stream)),
    }
    found: Figures = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, step in ways.items():
            step(0)
            everyone.barrier()
            spent, began = _cpu_s(), time.perf_counter()
            for each in range(steps):
                step(each)
            own = time.perf_counter() - began
            everyone.barrier()
            wall = time.perf_counter() - began
            cpu = torch.tensor([_cpu_s() - spent], dtype=torch.float64)
            everyone.all_reduce(cpu, "seconds", purpose="control").wait()
            if number:  # the first round warms up
                found[way].append({"s": wall / steps, "own_s": own / steps, "cpu_s": float(cpu) / steps})
    stream.close()
    if world.rank == 0:
        out.write_text(json.dumps(found))
    trainer.engine.close()
    world.close()


def _cpu_s() -> float:
    """User and system time of this process and of those that it started and that live."""
    me, ticks = os.getpid(), os.sysconf("SC_CLK_TCK")
    spent = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended since
                continue
            if int(entry.name) == me or int(fields[1]) == me:
                spent += (int(fields[11]) + int(fields[12])) / ticks
    return spent


def measured(example: str, rounds: int, steps: int) -> Figures:
    """A job."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "shardwise", "launch", "--ranks", "2", str(Path(__file__))]
        command += [
            "--worker",
            str(out),
            "--examples",
            example,
            "--rounds",
            str(rounds),
            "--steps",
            str(steps),
        ]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-2000:]}")
        found: Figures = json.loads(out.read_text())
        return found


def row(example: str, found: Figures) -> str:
    """Of the table."""
    ms = {way: 1e3 * statistics.median(each["s"] for each in found[way]) for way in WAYS}
    cpu = {way: 1e3 * statistics.median(each["cpu_s"] for each in found[way]) for way in WAYS}
    rounds = list(zip(*(found[way] for way in WAYS), strict=True))
    low, mid, high = statistics.quantiles(
        [both["s"] / max(read["s"], compute["s"]) for read, compute, both in rounds], n=4
    )
    return (
        f"| {example} | {ms['read']:.0f} ({cpu['read']:.0f}) | {ms['compute']:.0f} ({cpu['compute']:.0f}) | "
        f"{ms['both']:.0f} ({cpu['both']:.0f}) | {mid:.2f} ({low:.2f}-{high:.2f}) |"
    )


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", nargs="+", default=["cifar", "alexnet_pipeline", "resnet50"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--worker", type=Path)
    wanted = parser.parse_args()
    if wanted.worker:
        worker(wanted.examples[0], wanted.rounds, wanted.steps, wanted.worker)
        return
    about = describe()
    lines = [
        f"`python benchmarks/images/run.py {' '.join(sys.argv[1:])}`",
        f"{about['date']}, {about['machine']}, commit {about['commit']}, torch {about['versions']['torch']}.",
        "",
        "| example | reading alone, ms a step (CPU ms) | computing alone | both | both over the slower (quartiles) |",
        "|---|---|---|---|---|",
    ]
    for example in wanted.examples:
        lines.append(row(example, measured(example, wanted.rounds, wanted.steps)))
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    if wanted.readme:
        wanted.readme.write_text(insert(wanted.readme.read_text(), text))


if __name__ == "__main__":
    main()
