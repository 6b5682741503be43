"""What an optimizer's step costs on two ranks: LAMB, LARS, Lion and Muon beside AdamW, and beside DeepSpeed.

    python benchmarks/optimizers/run.py [--deepspeed PYTHON] [--steps 30] [--readme README.md]

One process a rank, one thread each, fp32, ZeRO stage 1, clipped. Our optimizers take turns in one job, a step each: the
time of ``engine.step()``, and of its Actions behind NORM. Beside DeepSpeed, which makes Muon's update in the backward
pass, a whole step counts. ``--deepspeed``: a Python that has deepspeed and not
Shardwise; its jobs take turns with ours, round by round.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "data_parallel")]

from machine import describe  # noqa: E402
from net import batch, made  # noqa: E402
from table import insert  # noqa: E402

import shardwise  # noqa: E402
from shardwise.comm.world import join  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3},
    "lion": {"lr": 1e-4},
    "lars": {"lr": 1.0},
    "lamb": {"lr": 1e-3},
    "muon": {"lr": 1e-3},
    "muon in fp32": {"type": "muon", "lr": 1e-3, "ns_dtype": "fp32"},
}
STAGE, WARM_UP, SHORT = 1, 3, 12


def worker(kinds: list[str], steps: int, out: str) -> None:
    """One rank: the optimizers in turn."""
    torch.set_num_threads(1)
    world = join(quiet=True)
    engines = {
        kind: shardwise.initialize(
            made(),
            {
                "optimizer": {"type": kind, **KINDS[kind]},
                "zero": {"stage": STAGE},
                "max_grad_norm": 1.0,
            },
            world=world,
            loss=lambda model, batch: model(*batch),
        )
        for kind in kinds
    }
    found: dict[str, dict[str, list[float]]] = {
        kind: {"all": [], "cpu": [], "step": [], "update": [], "bytes": []} for kind in kinds
    }
    for step in range(steps):
        for kind, engine in engines.items():
            engine._parts.groups["world"].barrier()
            begun, spent = time.perf_counter(), time.process_time()
            engine.backward(engine(batch(step, world.rank)))
            start = time.perf_counter()
            engine.step()
            now = time.perf_counter()
            found[kind]["step"].append(now - start)
            found[kind]["all"].append(now - begun)
            found[kind]["cpu"].append(time.process_time() - spent)
            trace = engine.trace
            updates = [
                (stop - start, sent)
                for action, start, stop, sent in zip(
                    trace.actions, trace.starts_s, trace.stops_s, trace.bytes, strict=True
                )
                if action.kind.updates
            ]
            found[kind]["update"].append(sum(seconds for seconds, _ in updates))
            found[kind]["bytes"].append(float(sum(sent for _, sent in updates)))
    for kind, engine in engines.items():
        cpu = torch.tensor(found[kind]["cpu"], dtype=torch.float64)
        engine._parts.groups["world"].all_reduce(cpu, "seconds", purpose="control").wait()
        found[kind]["cpu"] = cpu.tolist()
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))
    for engine in engines.values():
        engine.close()


def ours(kinds: list[str], steps: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """A job of our own."""
    out = folder / "ours.json"
    command = [sys.executable, "-m", "shardwise", "launch", "--ranks", "2", str(Path(__file__))]
    job([*command, "--worker", ",".join(kinds), "--steps", str(steps), "--out", str(out)], {})
    return json.loads(out.read_text())


def theirs(python: str, kind: str, steps: int, folder: Path) -> list[list[float]] | None:
    """A job of DeepSpeed's; None where it cannot run here."""
    out = folder / "theirs.json"
    out.unlink(missing_ok=True)
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29791"]
    done = job(
        [*command, str(HERE / "deepspeed_peer.py"), kind, str(STAGE), str(steps), str(out)],
        {"DS_ACCELERATOR": "cpu"},
        False,
    )
    return json.loads(out.read_text()) if done and out.is_file() else None


class Round(NamedTuple):
    """Of both packages, in ms a step; theirs is infinite where it cannot run here."""

    ours: float
    theirs: float
    our_cpu: float
    their_cpu: float


def compared(python: str, kinds: list[str], rounds: int, folder: Path) -> dict[str, list[Round]]:
    """By optimizer."""
    found: dict[str, list[Round]] = {}
    for number in range(rounds):
        for kind in kinds:
            own = ours([kind], SHORT, folder)[kind]
            runs = number == 0 or found[kind][0].theirs < math.inf
            other = theirs(python, kind, SHORT, folder) if runs else None
            wall, cpu = (math.inf, math.inf) if other is None else map(middle, other)
            found.setdefault(kind, []).append(Round(middle(own["all"]), wall, middle(own["cpu"]), cpu))
            print(kind, found[kind][-1], file=sys.stderr)
    return found


def job(command: list[str], environment: dict[str, str], must: bool = True) -> bool:
    """Run it. Errors: SystemExit with the end of what it said."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-1500:]}", file=sys.stderr)
        if must:
            raise SystemExit(1)
    return done.returncode == 0


def middle(seconds: list[float]) -> float:
    """Median in ms behind the warm-up."""
    return 1e3 * statistics.median(seconds[WARM_UP:])


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5, help="beside DeepSpeed")
    parser.add_argument("--deepspeed")
    parser.add_argument(
        "--beside", nargs="*", default=["adamw", "lamb", "muon"], help="optimizers, beside DeepSpeed"
    )
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--worker")
    parser.add_argument("--out")
    wanted = parser.parse_args()
    if wanted.worker:
        worker(wanted.worker.split(","), wanted.steps, wanted.out)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        together = ours(list(KINDS), wanted.steps, folder)
        beside = compared(wanted.deepspeed, wanted.beside, wanted.rounds, folder) if wanted.deepspeed else {}
    shown = ["THEIRS" if each == wanted.deepspeed else each for each in sys.argv[1:]]
    lines = [
        f"`python benchmarks/optimizers/run.py {' '.join(shown)}`",
        "",
        "| optimizer | `engine.step()`, ms | behind NORM, ms | over AdamW's (quartiles) | KiB sent behind NORM |",
        "|---|---|---|---|---|",
    ]
    base = together["adamw"]["update"][WARM_UP:]
    for kind, columns in together.items():
        ratios = [a / b for a, b in zip(columns["update"][WARM_UP:], base, strict=True)]
        low, mid, high = statistics.quantiles(ratios, n=4)
        sent = statistics.median(columns["bytes"]) / 1024
        lines.append(
            f"| {kind} | {middle(columns['step']):.1f} | {middle(columns['update']):.1f} | "
            f"{mid:.2f} ({low:.2f}-{high:.2f}) | {sent:.1f} |"
        )
    if beside:
        lines += [
            "",
            "| optimizer | forward, backward, step: ours, ms (CPU ms of both ranks) | deepspeed | wall ratio (range) | "
            "CPU ratio (range) |",
            "|---|---|---|---|---|",
        ]
    for kind, pairs in beside.items():
        own, other, cpu, their_cpu = (statistics.median(each) for each in zip(*pairs, strict=True))
        if other == math.inf:
            lines.append(f"| {kind} | {own:.0f} ({cpu:.0f}) | does not run on the CPU | | |")
            continue
        both = [(a.ours / a.theirs, a.our_cpu / a.their_cpu) for a in pairs]
        said = [
            f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
            for each in zip(*both, strict=True)
        ]
        lines.append(
            f"| {kind} | {own:.0f} ({cpu:.0f}) | {other:.0f} ({their_cpu:.0f}) | {' | '.join(said)} |"
        )
    about = describe()
    lines.insert(
        1,
        f"{about['date']}, {about['machine']}, commit {about['commit']}, torch {about['versions']['torch']}.",
    )
    text = "\n".join(lines)
    print(text)
    if wanted.readme:
        wanted.readme.write_text(insert(wanted.readme.read_text(), text))


if __name__ == "__main__":
    main()
