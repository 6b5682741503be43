"""Steps of GPTs in papers, foreseen by the shipped tables of hardware: the Plan of each layout, priced.

    python published.py [--only sc21 seqsel] [--refit seqsel-22b-full dlperf-dp8] [--write table.json]

published.json holds the rows with their sources. Each row is a GPT of Megatron-LM on V100s or A100s; here it is the GPT
of this package in the same layout, whose attention is fused where theirs is not. ``--refit`` fits factors on the rates
of the rows' table to the named rows, and prints the errors of the others by the fitted table.

Cost: a pass on shapes of each stage of each row; minutes in one process, without data or devices.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.hardware import Hardware
from shardwise.base.hardware_files import find_hardware, write_hardware
from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.models import Gpt, GptPolicy
from shardwise.simulate.price import step_seconds
from shardwise.simulate.refit import StepLine, refit

HERE = Path(__file__).resolve().parent
MICRO_SIZES = (1, 2, 4, 8)
"""Tried if a source does not state the micro size."""


class Foreseen(NamedTuple):
    """A row with its job."""

    row: dict[str, Any]
    measured_s: float
    jobs: dict[int, JobFacts]
    """By micro size."""


def measured_s(row: dict[str, Any]) -> float:
    """Seconds of a step: as published, or by the formula with which the paper counts FLOPs."""
    found = row["measured"]
    if "step_s" in found:
        return float(found["step_s"])
    shape = row["model"]
    width, layers, tokens, vocab = (shape[key] for key in ("width", "layers", "context", "vocab"))
    ratio = 1 + tokens / (6 * width) + vocab / (16 * layers * width)
    flops = 96 * row["global_batch"] * tokens * layers * width**2 * ratio
    return flops / (found["tflops_per_rank"] * 1e12 * row["ranks"])


def make(shape: dict[str, Any]) -> nn.Module:
    """The model, without memory."""
    with torch.device("meta"):
        return Gpt(GptPolicy(family="gpt2", dropout=0.1, **shape))


def config(row: dict[str, Any], micro_size: int) -> dict[str, Any]:
    """The layout, as a configuration."""
    data = row["ranks"] // (row["mesh"]["tp"] * row["mesh"]["pp"])
    pipeline: dict[str, Any] = {"schedule": "1f1b"}
    if row["virtual_stages"] > 1:
        pipeline = {"schedule": "interleaved_1f1b", "virtual_stages": row["virtual_stages"]}
    return {
        "mesh": row["mesh"],
        "zero": {"stage": 0},
        "precision": "fp16",
        "batch": {"micro_size": micro_size, "accumulation": row["global_batch"] // (micro_size * data)},
        "recompute": row["recompute"],
        "pipeline": pipeline,
        "tensor": {"sequence_parallel": row["sequence"]},
        "tiles": {"logits": "off", "mlp": "off"},
        "optimizer": {"type": "adamw", "lr": 1e-4},
    }


def job(row: dict[str, Any], micro_size: int) -> JobFacts:
    """The Plan's inputs, with a pass of each stage on shapes."""
    ids = torch.empty(micro_size, row["model"]["context"], dtype=torch.int64, device="meta")
    example = {"tokens": ids, "targets": ids}
    return read(
        partial(make, row["model"]), config(row, micro_size), row["ranks"], torch.device("cuda"), example
    )


def hardware_of(row: dict[str, Any]) -> Hardware:
    """The row's table: a shipped one, or a shipped one with the changes that the row gives."""
    if isinstance(row["device"], str):
        return find_hardware(row["device"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{row['source']}.json"
        path.write_text(json.dumps(row["device"]))
        return find_hardware(str(path))


def price(row: dict[str, Any], known: JobFacts, hardware: Hardware) -> float:
    """Seconds of a step."""
    offload = known.settings.offload
    outlook = known.outlook(offload)
    policies = known.policies_with(offload)
    return step_seconds(
        outlook.plan, policies, known.passed, hardware, "cuda", per_host=row["per_host"]
    ).total


def micro_sizes(row: dict[str, Any]) -> list[int]:
    """The micro sizes to try."""
    data = row["ranks"] // (row["mesh"]["tp"] * row["mesh"]["pp"])
    given = MICRO_SIZES if row["micro_size"] is None else (row["micro_size"],)
    return [size for size in given if row["global_batch"] % (size * data) == 0]


def shortest(found: Foreseen, hardware: Hardware) -> tuple[float, int]:
    """Seconds of the fastest micro size, and that size."""
    return min((price(found.row, known, hardware), size) for size, known in found.jobs.items())


def rows_with_steps(only: list[str]) -> Iterator[Foreseen]:
    """The rows that have a measured step, with their jobs."""
    for row in json.loads((HERE / "published.json").read_text())["rows"]:
        if only and not any(row["name"].startswith(start) for start in only):
            continue
        if not {"step_s", "tflops_per_rank"} & {*row["measured"]}:
            continue
        try:
            jobs = {size: job(row, size) for size in micro_sizes(row)}
        except Exception as error:
            print(
                f"| {row['name']} | refused: {type(error).__name__}: {str(error)[:160]} | | | |", flush=True
            )
            continue
        yield Foreseen(row, measured_s(row), jobs)


def table(rows: list[Foreseen], hardware_by_row: Callable[[Foreseen], Hardware]) -> list[float]:
    """Print a table, and return foreseen over measured."""
    print("| row | micro size | published, s | foreseen, s | foreseen / published |\n|---|---|---|---|---|")
    ratios = []
    for found in rows:
        seconds, size = shortest(found, hardware_by_row(found))
        ratios.append(seconds / found.measured_s)
        print(f"| {found.row['name']} | {size} | {found.measured_s:.4g} | {seconds:.4g} | {ratios[-1]:.3f} |")
    errors = [abs(ratio - 1) for ratio in ratios]
    print(f"\nmean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}, of {len(errors)}\n")
    return ratios


def refitted(rows: list[Foreseen], names: list[str], write: Path | None) -> None:
    """Fit the table of the named rows to them, and print the others of the same table by it."""
    by_name = {found.row["name"]: found for found in rows}
    used = [by_name[name] for name in names]
    hardware = hardware_of(used[0].row)
    lines = [
        StepLine(
            config=found.row["name"],
            ranks=found.row["ranks"],
            device=hardware.name,
            per_host=found.row["per_host"],
            step_s=found.measured_s,
        )
        for found in used
    ]
    fitted = refit(lines, hardware, lambda line, given: shortest(by_name[line.config], given)[0])
    print("factors:", {name: round(factor, 3) for name, factor in fitted.factors.items()})
    rest = [found for found in rows if found not in used and hardware_of(found.row).name == hardware.name]
    table(rest, lambda _: fitted.hardware)
    if write is not None:
        write_hardware(write, fitted.hardware)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names of rows")
    parser.add_argument("--refit", nargs="+", default=[], help="names of rows")
    parser.add_argument("--write", type=Path, help="file for the fitted table")
    given = parser.parse_args()
    begin = time.perf_counter()
    rows = list(rows_with_steps(given.only))
    print(f"passes of {len(rows)} rows: {time.perf_counter() - begin:.0f} s\n")
    if not rows:
        raise SystemExit("no row of published.json was foreseen")
    ratios = table(rows, lambda found: hardware_of(found.row))
    print(f"geometric mean of foreseen / published: {math.exp(statistics.mean(map(math.log, ratios))):.3f}")
    if given.refit:
        refitted(rows, given.refit, given.write)


if __name__ == "__main__":
    main()
