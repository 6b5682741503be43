"""Balance on real text:  python benchmarks/experts/balance.py [--seeds 0,1]

A small GPT learns the source code of Python's standard library for 300 steps: dense, and with 8 experts of half the
width, 2 of which a token goes through, so that both multiply a token with as many weights. The weights of the two add
up to ``scale`` 2: halves that add up, as those of a dense layer do, and not their mean. Held-out loss, and the load of
the worst expert over the mean, the mean of the last 50 steps. Figures in README.md.
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

STEPS, LAST = 300, 50
HIDDEN = 256
"""Of the dense model's feed-forward parts."""
ROUTERS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "none": {"scale": 2.0, "balance": "none"},
    "loss": {"scale": 2.0, "balance": "loss", "balance_weight": 0.01},
    "bias": {"scale": 2.0, "balance": "bias", "bias_rate": 0.01},
}


class Result(NamedTuple):
    """Of one run."""

    held_out: float
    load: float | None
    """Worst expert over the mean; None without experts."""


def configuration(router: dict[str, Any] | None, seed: int, folder: Path) -> dict[str, Any]:
    """What stands in the YAML file."""
    model: dict[str, Any] = {"name": "gpt", "layers": 3, "width": 128, "heads": 4, "context": 128}
    model["hidden"] = HIDDEN
    if router is not None:
        model["experts"] = {"count": 8, "hidden": HIDDEN // 2, "router": {"top_k": 2, **router}}
    return {
        "model": model,
        "data": {"source": "stdlib", "validation_samples": 256, "cache": str(folder / "cache")},
        "batch": {"global_size": 32, "micro_size": 16},
        "optimizer": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "schedule": {"type": "cosine", "warmup_steps": 30, "min_ratio": 0.1},
        "max_grad_norm": 1.0,
        "train": {"steps": STEPS, "eval_every": STEPS, "seed": seed},
        "monitor": {"picture": False, "print_every": 1},
        "checkpoint": {"every": 100_000},
        "output_dir": str(folder / "run"),
    }


def trained(router: dict[str, Any] | None, seed: int) -> Result:
    """One run in a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "run.yaml"
        file.write_text(json.dumps(configuration(router, seed, Path(scratch))))
        words = [sys.executable, "-m", "shardwise", "train", str(file), "--ranks", "1"]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(ended.stdout[-2000:] + ended.stderr[-2000:])
        with (Path(scratch) / "run" / "metrics.csv").open() as lines:
            rows = list(csv.DictReader(lines))
    held_out = [float(row["val_loss"]) for row in rows if row["val_loss"]][-1]
    loads = [float(row["expert_load"]) for row in rows[-LAST:] if row.get("expert_load")]
    return Result(held_out, statistics.mean(loads) if loads else None)


def main() -> None:
    """A line a setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--rows", default=",".join(ROUTERS))
    given = parser.parse_args()
    for name in given.rows.split(","):
        found = [trained(ROUTERS[name], int(seed)) for seed in given.seeds.split(",")]
        losses = ", ".join(f"{each.held_out:.4f}" for each in found)
        loads = ", ".join("-" if each.load is None else f"{each.load:.2f}" for each in found)
        print(f"| {name} | {losses} | {loads} |", flush=True)


if __name__ == "__main__":
    main()
