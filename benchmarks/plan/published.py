"""Steps and memory of GPTs in papers, foreseen by the shipped tables of hardware: the Plan of each layout, priced.

    python published.py [--only sc21 seqsel] [--details] [--refit seqsel-22b-full dlperf-dp8] [--write table.json]

published.json holds the rows with their sources. Each row is a GPT of Megatron-LM on V100s or A100s. Here the GPT of
this package runs on shapes in the same layout, with the attention, the recomputation and the messages of that software
(megatron.py). ``--refit`` fits factors on the rates of the rows' table to the named rows, and prints the errors of the
others by the fitted table: prices alone, from the passes that were measured first.

Cost: a pass on shapes of each kind of stage of each row; minutes in one process, without data or devices.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron import UPDATE_BYTES, attention, with_loss, with_parts_sent, without_stand_ins
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from shardwise.base.hardware import Hardware
from shardwise.base.hardware_files import find_hardware, write_hardware
from shardwise.compose.plan import PlanPolicies, make_plan
from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.engine.fit.outside import with_outside
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.action import Kind
from shardwise.plan.plan import Plan, class_of
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.price import StepSeconds, step_timeline
from shardwise.simulate.refit import StepLine, refit
from shardwise.simulate.timeline import step_memory

HERE = Path(__file__).resolve().parent
MICRO_SIZES = (1, 2, 4, 8)
"""Tried if a source does not state the micro size."""
GIB = 2**30


class PricedJob(NamedTuple):
    """The parts of a job that its prices are computed from."""

    plan: Plan
    policies: PlanPolicies
    passed: dict[int, MeasuredPass]
    facts: JobFacts
    elements: int
    """Parameters of the rank that has most."""


class Foreseen(NamedTuple):
    """A row with its jobs."""

    row: dict[str, Any]
    measured_s: float | None
    """Published seconds of a step; None if the row has memory alone."""
    jobs: dict[int, PricedJob]
    """By micro size."""


def measured_s(row: dict[str, Any]) -> float | None:
    """Seconds of a step: as published, or by the formula with which the paper counts FLOPs."""
    found = row["measured"]
    if "step_s" in found:
        return float(found["step_s"])
    if "tflops_per_rank" not in found:
        return None
    shape = row["model"]
    width, layers, tokens, vocab = (shape[key] for key in ("width", "layers", "context", "vocab"))
    ratio = 1 + tokens / (6 * width) + vocab / (16 * layers * width)
    flops = 96 * row["global_batch"] * tokens * layers * width**2 * ratio
    return float(flops / (found["tflops_per_rank"] * 1e12 * row["ranks"]))


def make(shape: dict[str, Any]) -> nn.Module:
    """Return the model, without memory."""
    with torch.device("meta"):
        return Gpt(GptPolicy(family="gpt2", dropout=0.1, **shape), attention)


def config(row: dict[str, Any], micro_size: int) -> dict[str, Any]:
    """Return the layout, as a configuration."""
    data = row["ranks"] // (row["mesh"]["tp"] * row["mesh"]["pp"])
    pipeline: dict[str, Any] = {"schedule": "1f1b", "partition": "uniform"}
    if row["virtual_stages"] > 1:
        pipeline |= {"schedule": "interleaved_1f1b", "virtual_stages": row["virtual_stages"]}
    return {
        "mesh": row["mesh"],
        "zero": {"stage": 0},
        "precision": {"compute": "fp16", "grad": row["grad"]},
        "batch": {"micro_size": micro_size, "accumulation": row["global_batch"] // (micro_size * data)},
        "recompute": row["recompute"],
        "pipeline": pipeline,
        "tensor": {"sequence_parallel": row["sequence"], "overlap": "off"},
        "tiles": {"logits": "off", "mlp": "off"},
        "optimizer": {"type": "adamw", "lr": 1e-4},
    }


def job(row: dict[str, Any], micro_size: int) -> PricedJob:
    """Return the Plan of a row, with a pass of each stage on shapes."""
    ids = torch.empty(micro_size, row["model"]["context"], dtype=torch.int64, device="meta")
    example = {"tokens": ids, "targets": ids}
    with set_checkpoint_early_stop(False):
        known = read(
            partial(make, row["model"]), config(row, micro_size), row["ranks"], torch.device("cuda"), example
        )
    policies = known.policies_with(known.settings.offload)
    shape, tp = row["model"], row["mesh"]["tp"]
    passed = with_loss(without_stand_ins(known.passed), micro_size * shape["context"] * shape["vocab"] // tp)
    if not row["sequence"]:  # else the messages are parts already
        passed = with_parts_sent(passed, tp)
    plan = make_plan(known.spec, known.mesh, policies)
    elements = max(
        sum(bucket.elements for unit in ranks.units for bucket in unit.buckets)
        for ranks in plan.classes.values()
    )
    return PricedJob(plan, policies, passed, known, elements)


def hardware_of(row: dict[str, Any]) -> Hardware:
    """Return the row's table: a shipped one, or a shipped one with the changes that the row gives."""
    return _hardware(json.dumps(row["device"]), row["source"])


@cache
def _hardware(device: str, source: str) -> Hardware:
    given = json.loads(device)
    if isinstance(given, str):
        return find_hardware(given)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{source}.json"
        path.write_text(device)
        return find_hardware(str(path))


def price(row: dict[str, Any], known: PricedJob, hardware: Hardware) -> StepSeconds:
    """Return the foreseen seconds of a step, with gradients reduced and weights updated as Megatron-LM does it."""
    timeline = step_timeline(
        known.plan, known.policies, known.passed, hardware, "cuda", per_host=row["per_host"]
    )
    found = StepSeconds.of(timeline)
    spent, exposed = dict(found.spent), dict(found.exposed)
    if row["reduces"] == "after":  # what ran beside the backward pass runs behind it
        reduced_s = sum(
            span.stop_s - span.start_s
            for span in timeline.spans[timeline.slowest]
            if span.lane == "exchange" and span.action.kind is Kind.REDUCE
        )
        late_s = max(reduced_s - exposed.get("dp", 0.0), 0.0)
        spent["exchange"] += late_s
        exposed["dp"] = exposed.get("dp", 0.0) + late_s
    spent["update"] = hardware.touched_s(known.elements * UPDATE_BYTES[row["grad"]])
    return found._replace(spent=spent, exposed=exposed)


def micro_sizes(row: dict[str, Any]) -> list[int]:
    """Return the micro sizes to try."""
    data = row["ranks"] // (row["mesh"]["tp"] * row["mesh"]["pp"])
    given = MICRO_SIZES if row["micro_size"] is None else (row["micro_size"],)
    return [size for size in given if row["global_batch"] % (size * data) == 0]


def shortest(found: Foreseen, hardware: Hardware) -> tuple[StepSeconds, int]:
    """Return the seconds of the fastest micro size, and that size."""
    prices = [(price(found.row, known, hardware), size) for size, known in found.jobs.items()]
    return min(prices, key=lambda each: each[0].total)


def rows_of(only: Sequence[str]) -> Iterator[Foreseen]:
    """Yield the rows whose names begin as asked, with their jobs."""
    given = json.loads((HERE / "published.json").read_text())
    for row in given["rows"]:
        if only and not any(row["name"].startswith(start) for start in only):
            continue
        row = {**given["sources"][row["source"]].get("all", {}), **row}
        yield Foreseen(row, measured_s(row), {size: job(row, size) for size in micro_sizes(row)})


def table(
    rows: list[Foreseen], hardware_by_row: Callable[[Foreseen], Hardware], details: bool = False
) -> dict[str, float]:
    """Print a table of steps, and return foreseen over measured by row."""
    print("| row | micro size | published, s | foreseen, s | foreseen / published |\n|---|---|---|---|---|")
    ratios = {}
    for found in rows:
        if found.measured_s is None:
            continue
        seconds, size = shortest(found, hardware_by_row(found))
        name = found.row["name"]
        ratios[name] = seconds.total / found.measured_s
        parts = ""
        if details:
            parts = ", ".join(f"{use} {each:.3g}" for use, each in seconds.spent.items() if each)
            parts += "; " + ", ".join(f"{axis} {each:.3g}" for axis, each in seconds.exposed.items())
        print(
            f"| {name} | {size} | {found.measured_s:.4g} | {seconds.total:.4g} | {ratios[name]:.3f} | {parts}",
            flush=True,
        )
    print()
    sources = dict.fromkeys(found.row["source"] for found in rows)
    for source in (*sources, "all"):
        errors = [
            abs(ratios[found.row["name"]] - 1)
            for found in rows
            if found.row["name"] in ratios and source in (found.row["source"], "all")
        ]
        if errors:
            print(
                f"{source}: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}, of {len(errors)}"
            )
    print()
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
            step_s=found.measured_s or 0.0,
        )
        for found in used
    ]
    begin = time.perf_counter()
    fitted = refit(lines, hardware, lambda line, given: shortest(by_name[line.config], given)[0].total)
    print(f"\n{hardware.name}, refitted to {', '.join(names)} in {time.perf_counter() - begin:.0f} s")
    print("factors:", {name: round(factor, 3) for name, factor in fitted.factors.items()})
    rest = [found for found in rows if found not in used and hardware_of(found.row).name == hardware.name]
    table(rest, lambda _: fitted.hardware)
    if write is not None:
        write_hardware(write, fitted.hardware)


MEMORY = {
    "state_gib": ("model state", GIB),
    "activations_gib": ("activations", GIB),
    "memory_mib": ("all in use", 2**20),
}
"""Name, and bytes of the unit, by key of ``measured``."""


def memory_of(known: PricedJob) -> dict[str, int]:
    """Return the foreseen bytes of the first rank, by key of ``MEMORY``."""
    beside = known.facts.rows_beside(known.plan, 0)
    step = step_memory(known.plan, known.policies, known.facts.passed, "cuda", 0, beside)
    rows = with_outside(step, known.plan, "cuda").points["step"].rows
    return {
        "state_gib": sum(known.plan.bytes_per_rank(0).values()),
        "activations_gib": most_kept(known.plan, known.facts.passed),
        "memory_mib": sum(rows.values()),
    }


def most_kept(plan: Plan, passed: Mapping[int, MeasuredPass]) -> int:
    """Return the most bytes that forward passes of the first rank keep for backward passes at once."""
    kept = {
        stage: each.received_bytes
        + sum(share.net_bytes for (kind, _), share in each.shares.items() if kind is Kind.F)
        for stage, each in passed.items()
    }
    held = most = 0
    for action in plan.classes[class_of(plan.mesh, 0)].actions:
        if action.unit < 0 and action.kind in (Kind.F, Kind.B):
            held += kept[action.stage] if action.kind is Kind.F else -kept[action.stage]
            most = max(most, held)
    return most


def memory_table(rows: list[Foreseen]) -> None:
    """Print published and foreseen memory of the first rank, in GiB."""
    print("| row | what | published, GiB | foreseen, GiB | foreseen / published |\n|---|---|---|---|---|")
    errors: dict[str, list[float]] = {}
    for found in rows:
        published = {key: each for key, each in found.row["measured"].items() if key in MEMORY}
        if not published:
            continue
        foreseen = memory_of(next(iter(found.jobs.values())))
        for key, size in published.items():
            what, unit = MEMORY[key]
            ratio = foreseen[key] / (size * unit)
            errors.setdefault(what, []).append(abs(ratio - 1))
            told = f"{size * unit / GIB:.2f} | {foreseen[key] / GIB:.2f} | {ratio:.3f}"
            print(f"| {found.row['name']} | {what} | {told} |", flush=True)
    print()
    for what, each in errors.items():
        print(f"{what}: mean error {statistics.mean(each):.1%}, worst {max(each):.1%}, of {len(each)}")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of names of rows")
    parser.add_argument("--details", action="store_true", help="print what the seconds are spent on")
    parser.add_argument("--memory", action="store_true", help="print the memory that the sources have too")
    parser.add_argument(
        "--refit",
        nargs="+",
        action="append",
        default=[],
        help="names of rows; may be given for several tables",
    )
    parser.add_argument("--write", type=Path, help="file for the fitted table of the last --refit")
    given = parser.parse_args()
    begin = time.perf_counter()
    rows = list(rows_of(given.only))
    print(f"passes of {len(rows)} rows: {time.perf_counter() - begin:.0f} s\n")
    if not rows:
        raise SystemExit("no row of published.json was foreseen")
    begin = time.perf_counter()
    ratios = table(rows, lambda found: hardware_of(found.row), given.details)
    print(f"prices: {time.perf_counter() - begin:.0f} s")
    print(
        f"geometric mean of foreseen / published: {math.exp(statistics.mean(map(math.log, ratios.values()))):.3f}"
    )
    if given.memory:
        memory_table(rows)
    for names in given.refit:
        refitted(rows, names, given.write)


if __name__ == "__main__":
    main()
