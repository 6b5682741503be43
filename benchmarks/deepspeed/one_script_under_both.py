"""Runs one_script.py under DeepSpeed and under Shardwise, and compares what each rank saw.

    python benchmarks/deepspeed/one_script_under_both.py --deepspeed /path/to/deepspeed/bin/python

``--deepspeed``: a Python that has deepspeed and not Shardwise; this Python has Shardwise. Equal: data order, counters,
boundaries. Compared by their largest difference: losses, norms (relative), learning rates.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).with_name("one_script.py")
LIMITS = {"loss": 1e-4, "norm": 2e-3, "lr": 1e-6}
LIMITS_BF16 = {"loss": 3e-2, "norm": 1e9, "lr": 1e-6}
RANKS = 2


class Found(NamedTuple):
    """The comparison of one setting."""

    equal: bool
    """Data order, counters, boundaries."""
    loss: float
    norm: float
    lr: float
    """Largest differences; of norms relative."""
    steps: int


def run(command: list[str], environment: dict[str, str]) -> None:
    """Errors: SystemExit with the end of what it said."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")


def both(deepspeed: str, folder: Path, options: list[str], port: int) -> Found:
    """One setting under both packages."""
    threads = {"OMP_NUM_THREADS": "1"}
    theirs, ours = folder / "theirs.json", folder / "ours.json"
    agent = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(port)]
    run(
        [deepspeed, *agent, str(SCRIPT), *options, "--out", str(theirs)], {**threads, "DS_ACCELERATOR": "cpu"}
    )
    launch = ["-m", "shardwise", "launch", "--as-deepspeed", "--ranks", str(RANKS)]
    run([sys.executable, *launch, str(SCRIPT), *options, "--out", str(ours)], threads)
    return compare(*([rows_of(file, rank) for rank in range(RANKS)] for file in (theirs, ours)))


def rows_of(file: Path, rank: int) -> list[dict[str, Any]]:
    """What one rank saw."""
    return json.loads(file.with_suffix(f".{rank}.json").read_text())["rows"]


def compare(theirs: list[list[dict[str, Any]]], ours: list[list[dict[str, Any]]]) -> Found:
    """By rank and microbatch."""
    equal = len(theirs[0]) == len(ours[0])
    worst = {"loss": 0.0, "norm": 0.0, "lr": 0.0}
    for their_rank, our_rank in zip(theirs, ours, strict=True):
        for one, other in zip(their_rank, our_rank, strict=True):
            equal &= all(one[key] == other[key] for key in ("places", "counters", "boundary", "applied"))
            worst["loss"] = max(worst["loss"], abs(one["loss"] - other["loss"]))
            worst["lr"] = max(
                worst["lr"], max(abs(a - b) for a, b in zip(one["lr"], other["lr"], strict=True))
            )
            if one["norm"] and other["norm"]:
                worst["norm"] = max(worst["norm"], abs(one["norm"] - other["norm"]) / one["norm"])
    return Found(equal, worst["loss"], worst["norm"], worst["lr"], theirs[0][-1]["counters"][0])


def main() -> None:
    """A row for each setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True, help="a Python with deepspeed")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    args = parser.parse_args()
    print(
        "| stage | dtype | steps | order, counters | losses | norms | rates |\n|---|---|---|---|---|---|---|"
    )
    missed = []
    for place, (dtype, stage) in enumerate((d, s) for d in args.dtypes for s in args.stages):
        options = [
            "--stage",
            str(stage),
            "--steps",
            str(args.steps),
            *(["--bf16"] if dtype == "bf16" else []),
        ]
        with tempfile.TemporaryDirectory() as folder:
            found = both(args.deepspeed, Path(folder), options, 29650 + place)
        words = "equal" if found.equal else "DIFFER"
        print(
            f"| {stage} | {dtype} | {found.steps} | {words} | {found.loss:.1e} | {found.norm:.1e} | {found.lr:.1e} |",
            flush=True,
        )
        limits = LIMITS_BF16 if dtype == "bf16" else LIMITS
        if not found.equal or any(getattr(found, key) > limit for key, limit in limits.items()):
            missed.append((stage, dtype))
    if missed:
        raise SystemExit(f"beyond the limits: {missed}")


if __name__ == "__main__":
    main()
