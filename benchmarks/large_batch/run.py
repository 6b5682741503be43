"""Eight times the batch on real text:  python benchmarks/large_batch/run.py --text FILE

A small GPT reads the bytes of FILE once in batches of 4, and in batches of 32 in an eighth of the steps: the same
samples in the same order, from the same start weights, with the same warm-up and fall as parts of the run. Held-out
loss at the end, of each setting and seed; ``--sweep`` tries each setting's rates instead. Figures in README.md.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

SMALL, LARGE = 4, 32
SAMPLES = 16384
"""Of 64 bytes each, about one pass over a megabyte: 4096 steps of 4, 512 of 32."""


class Setting(NamedTuple):
    """One row of the table."""

    batch: int
    optimizer: dict[str, Any]
    lr: float
    rates: tuple[float, ...]
    """Those of the sweep."""
    cycles: bool = False
    """Whether the schedule is one_cycle, up to ``lr``."""


ADAM = {"type": "adamw", "betas": [0.9, 0.99], "weight_decay": 0.01}
LAMB = {"type": "lamb", "betas": [0.9, 0.95], "weight_decay": 0.01}
ROWS = {
    "adam": Setting(SMALL, ADAM, 2e-3, (1e-3, 2e-3, 3e-3)),
    "adam_same_rate": Setting(LARGE, ADAM, 2e-3, (2e-3,)),
    "lamb": Setting(LARGE, LAMB, 3e-2, (2e-2, 3e-2, 4e-2)),
    "one_cycle": Setting(LARGE, ADAM, 1.4e-2, (8e-3, 1.4e-2, 2e-2), cycles=True),
}


def configuration(row: Setting, lr: float, text: str, seed: int, folder: Path) -> dict[str, Any]:
    """What stands in the YAML file."""
    steps = SAMPLES // row.batch
    schedule: dict[str, Any] = {"type": "linear", "warmup_steps": steps // 16}
    if row.cycles:
        rise = steps // 2
        momenta = {"min_momentum": 0.85, "max_momentum": 0.95}
        schedule = {"type": "one_cycle", "min_lr": lr / 20, "max_lr": lr, "rise_steps": rise, **momenta}
    return {
        "model": {"name": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 64},
        "data": {"source": text, "validation_samples": 512, "cache": str(folder / "cache")},
        "batch": {"global_size": row.batch},
        "optimizer": {**row.optimizer, "lr": lr},
        "schedule": schedule,
        "max_grad_norm": 1.0,
        "train": {"steps": steps, "eval_every": steps, "seed": seed},
        "checkpoint": {"every": 100_000},
        "monitor": {"picture": False},
        "output_dir": str(folder / "run"),
    }


def trained(row: Setting, lr: float, text: str, seed: int) -> float:
    """Held-out loss at the end, nats a byte."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "run.yaml"
        file.write_text(json.dumps(configuration(row, lr, text, seed, Path(scratch))))
        words = [sys.executable, "-m", "shardwise", "train", str(file), "--ranks", "1"]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(ended.stdout[-2000:] + ended.stderr[-2000:])
        with (Path(scratch) / "run" / "metrics.csv").open() as lines:
            return float([each["val_loss"] for each in csv.DictReader(lines) if each["val_loss"]][-1])


def main() -> None:
    """A line a setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True, help="a text of about a megabyte")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--sweep", action="store_true", help="try each setting's rates")
    given = parser.parse_args()
    seeds = [int(each) for each in given.seeds.split(",")]
    for name in given.rows.split(","):
        row = ROWS[name]
        for lr in row.rates if given.sweep else (row.lr,):
            losses = [trained(row, lr, given.text, seed) for seed in seeds]
            each = " | ".join(f"{loss:.4f}" for loss in losses)
            print(f"| {name} | {row.batch} | {lr:g} | {each} | {statistics.mean(losses):.4f} |", flush=True)


if __name__ == "__main__":
    main()
