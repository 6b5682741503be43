"""How long a Plan of all ranks takes to make, and to prove.

The model is model.json: 80 blocks, 70 billion parameters, written down. No module is made, and no process group.

    python run.py --rounds 5 --readme README.md

Cost: under a minute, one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from shardwise.compose.plan import PlanPolicies, make_plan
from shardwise.compose.spec import AxisPlacement, ModelSpec, ParameterSpec, StageBlocks, positions_by_order
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard, ShardBlock
from shardwise.plan.plan import Plan
from shardwise.plan.registry import UpdateRule
from shardwise.plan.validate import validate_plan
from shardwise.precision.policy import PrecisionPolicy

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402
from table import insert  # noqa: E402

MICROBATCHES = 32
MESHES = [
    ("8 ranks", Mesh(pp=2, dp_shard=2, tp=2), "1f1b", 1),
    ("8 ranks in a row", Mesh(pp=8), "1f1b", 1),
    ("10,240 ranks", Mesh(pp=8, dp_shard=160, tp=8), "1f1b", 1),
    ("10,240 ranks, two stages each", Mesh(pp=8, dp_shard=160, tp=8), "interleaved_1f1b", 2),
    ("131,072 ranks", Mesh(pp=8, dp_replicate=16, dp_shard=128, tp=8), "1f1b", 1),
]


def on_tp(row: dict[str, Any]) -> AxisPlacement:
    """Where a parameter lies on "tp", by its word."""
    if row["tp"] == "addend":
        return AxisPlacement(Replicate(), Partial())
    blocks = tuple(ShardBlock(size, parts) for size, parts in row.get("heads", ()))
    shard = Shard(0 if row["tp"] == "rows" else 1, blocks)
    return AxisPlacement(shard, shard)


def model(given: dict[str, Any]) -> ModelSpec:
    """The description, from what model.json holds."""
    blocks = tuple(f"blocks.{i}" for i in range(given["blocks"]))
    rows = dict(
        chain(
            given["before"].items(),
            ((f"{block}.{name}", row) for block in blocks for name, row in given["block"].items()),
            given["behind"].items(),
        )
    )
    parameters = {name: ParameterSpec(name, tuple(row["shape"]), torch.float32) for name, row in rows.items()}
    names = {name: name for name in rows}
    weights = [
        sum(math.prod(row["shape"]) for row in given[part].values()) for part in ("block", "before", "behind")
    ]
    dealt = StageBlocks(
        blocks, (weights[0],) * len(blocks), weights[1], weights[2], positions_by_order(names, blocks)
    )
    places = {name: {"tp": on_tp(row)} for name, row in rows.items()}
    return ModelSpec(parameters, {}, names, tuple(names), blocks, dealt, places)


def planned(spec: ModelSpec, mesh: Mesh, schedule: str, virtual_stages: int) -> Plan:
    """ZeRO-3 with one gather ahead, bf16, AdamW."""
    policies = PlanPolicies(
        ZeroPolicy(stage=3, prefetch_bytes=1),
        PipelinePolicy.model_validate({"schedule": schedule, "virtual_stages": virtual_stages}),
        PrecisionPolicy(compute="bf16"),
        lambda name: 0,
        (UpdateRule(("exp_avg", "exp_avg_sq")),),
        MICROBATCHES,
    )
    return make_plan(spec, mesh, policies)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readme", type=Path)
    wanted = parser.parse_args()
    spec = model(json.loads((HERE / "model.json").read_text()))
    seconds: dict[str, list[float]] = {name: [] for name, *_ in MESHES}
    proofs: dict[str, list[float]] = {name: [] for name, *_ in MESHES}
    made: dict[str, Plan] = {}
    for _ in range(wanted.rounds):  # in turn, so that a busy moment of the machine hits all
        for name, mesh, schedule, virtual_stages in MESHES:
            start = time.perf_counter()
            made[name] = planned(spec, mesh, schedule, virtual_stages)
            seconds[name].append(time.perf_counter() - start)
            start = time.perf_counter()
            validate_plan(made[name], MICROBATCHES)
            proofs[name].append(time.perf_counter() - start)
    facts = describe()
    head = (
        f"`python run.py --rounds {wanted.rounds}`, {facts['date']}, {facts['machine']}, one thread, commit "
        f"{facts['commit']}, torch {facts['versions']['torch']}; medians."
    )
    lines = [
        head,
        "",
        "| mesh | classes | Actions | made, s | of it proved, s | model state on rank 0, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, plan in made.items():
        actions = sum(map(len, plan.actions.values()))
        held = sum(plan.bytes_per_rank().values()) / 2**30
        lines.append(
            f"| {name}: {plan.mesh} | {len(plan.classes)} | {actions:,} | {statistics.median(seconds[name]):.2f} | "
            f"{statistics.median(proofs[name]):.2f} | {held:,.1f} |"
        )
    print("\n".join(lines))
    if wanted.readme:
        wanted.readme.write_text(insert(wanted.readme.read_text(), "\n".join(lines)))


if __name__ == "__main__":
    main()
