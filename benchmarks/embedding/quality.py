"""How close click-through models come to the best possible AUC, on synthetic logs whose teacher is known.

    python benchmarks/embedding/quality.py [--ranks 2] [--quick] [CASE ...]
    python benchmarks/embedding/quality.py --dtype bf16 [--state-dtype bf16] [--wire bf16] [--quick] [CASE ...]

Each case is one ``shardwise train`` over the log, once from its beginning to its end; nothing is chosen by looking at
the rows held out. The gap is the teacher's AUC on the 200,000 rows held out less the model's. Its bounds: with P
parameters and n samples a learner is about P / 2n nats above the best log loss, and near the best an AUC of 0.001 is
about 0.0008 nats; so larger tables need longer logs, and two million samples serve tables of 100 rows.
The figures go into quality.json beside this file. With rows or messages of other dtypes they go into quality_bits.json,
and the table shows how far the AUC is below that of fp32 in quality.json; asked for is at most 0.001.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.config.run import load
from shardwise.data.clicks import ClickPolicy, build_clicks
from shardwise.observe import metrics
from shardwise.observe.metrics import ClickRecord


class Case(NamedTuple):
    """One run."""

    model: dict[str, Any]
    rows: int
    """Of each of 8 tables."""
    samples: int
    optimizer: dict[str, Any]
    """Of the rows."""
    lr: float
    """Of Adam on the dense part."""
    batch: int
    seed: int = 0
    """Of the log and its teacher."""


class Form(NamedTuple):
    """Dtypes of rows, of their optimizer state, and of messages between ranks."""

    dtype: str = "fp32"
    state_dtype: str = "fp32"
    wire: str = "fp32"

    def __str__(self) -> str:
        return f"rows {self.dtype}, state {self.state_dtype}, wire {self.wire}"


FM = {"name": "deepfm", "width": 3, "hidden": []}
DEEPFM = {"name": "deepfm", "width": 4, "hidden": [32]}
DLRM = {"name": "dlrm", "width": 8, "bottom": [16], "top": [64, 32]}
CASES = {
    "fm": Case(FM, 100, 2_000_000, {"type": "adagrad", "lr": 0.2}, 0.01, 1024),
    "fm-other-log": Case(FM, 100, 2_000_000, {"type": "adagrad", "lr": 0.2}, 0.01, 1024, 1),
    "fm-third-log": Case(FM, 100, 2_000_000, {"type": "adagrad", "lr": 0.2}, 0.01, 1024, 2),
    "deepfm": Case(DEEPFM, 100, 2_000_000, {"type": "adagrad", "lr": 0.2}, 0.003, 1024),
    "dlrm": Case(DLRM, 100, 8_000_000, {"type": "adam", "lr": 0.005}, 0.003, 2048),
    "fm-1000": Case(FM, 1000, 24_000_000, {"type": "adagrad", "lr": 0.4}, 0.01, 2048),
    "fm-5000": Case(FM, 5000, 96_000_000, {"type": "adagrad", "lr": 0.4}, 0.01, 4096),
}
QUICK = ("fm", "deepfm")
HELD_OUT = 200_000


def content_of(case: Case, form: Form, out: str) -> dict[str, Any]:
    """The configuration of a case."""
    synthetic = {
        "samples": case.samples,
        "validation_samples": HELD_OUT,
        "tables": 8,
        "rows": case.rows,
        "seed": case.seed,
    }
    return {
        "model": case.model,
        "data": {"synthetic": synthetic, "epochs": 1},
        "tables": {
            "optimizer": case.optimizer,
            "defaults": {"dtype": form.dtype, "state_dtype": form.state_dtype},
            "wire": form.wire,
        },
        "batch": {"global_size": case.batch},
        "optimizer": {"type": "adam", "lr": case.lr},
        "schedule": {"type": "linear"},
        "train": {"eval_every": 0, "steps": 10**9},
        "monitor": {"tensorboard": False, "picture": False},
        "output_dir": out,
    }


def measured(case: Case, form: Form, ranks: int) -> dict[str, Any]:
    """Train by the case and read what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(content_of(case, form, f"{folder}/run")))
        started = time.perf_counter()
        command = [sys.executable, "-m", "shardwise.cli.main", "train", str(path), "--ranks", str(ranks)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        record = metrics.read(Path(folder) / "run" / "metrics.csv")[-1]
        data = load(path).data
        assert isinstance(record, ClickRecord) and isinstance(data, ClickPolicy) and record.auc is not None
        best = build_clicks(data, Path(folder)).best_on_validation()
    assert best is not None and record.log_loss is not None
    return {
        "rows": case.rows,
        "samples": case.samples,
        "auc": record.auc,
        "best_auc": best.auc,
        "auc_gap": best.auc - record.auc,
        "log_loss_gap": record.log_loss - best.log_loss,
        "seconds": seconds,
        "ranks": ranks,
    }


def main() -> None:
    """Run the cases that are asked for and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; left out: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} alone")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of rows")
    parser.add_argument("--state-dtype", choices=("fp32", "bf16"), default="fp32", help="of optimizer state")
    parser.add_argument("--wire", choices=("fp32", "bf16", "fp16", "int8"), default="fp32")
    arguments = parser.parse_args()
    form = Form(arguments.dtype, arguments.state_dtype, arguments.wire)
    whole = Path(__file__).with_name("quality.json")
    kept = whole if form == Form() else whole.with_name("quality_bits.json")
    figures = json.loads(kept.read_text()) if kept.exists() else {}
    fp32 = json.loads(whole.read_text()) if whole.exists() else {}
    print(form)
    print("| case | rows x 8 | samples | AUC | best possible | gap | below fp32 | log loss gap | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in arguments.cases or (QUICK if arguments.quick else CASES):
        found = measured(CASES[name], form, arguments.ranks)
        below = fp32[name]["auc"] - found["auc"] if name in fp32 else float("nan")
        figures[name if form == Form() else f"{name}, {form}"] = found | {"below_fp32": below}
        print(
            f"| {name} | {found['rows']:,} | {found['samples'] / 1e6:g} M | {found['auc']:.4f} "
            f"| {found['best_auc']:.4f} | {found['auc_gap']:.4f} | {below:.4f} | {found['log_loss_gap']:.4f} "
            f"| {found['seconds']:.0f} |",
            flush=True,
        )
        kept.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
