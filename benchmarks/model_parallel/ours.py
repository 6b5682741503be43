"""Shardwise on the same two ranks: tensor parallel with and without sequence parallelism, or a pipeline.

The model is built on ``meta`` and each rank draws its own part of the start weights, as ``shardwise train`` does.
"""

from __future__ import annotations

from typing import Any

import torch
from contenders import Contender
from setting import Running, Setting
from split import INTERLEAVE, starts
from torch import Tensor
from workload import Workload, policy

import shardwise
import shardwise.engine.construction.build  # the package loads its parts on first use; memory is measured after that
import shardwise.engine.step.pipeline
import shardwise.parallel.tensor
from shardwise.comm.world import join
from shardwise.models.gpt import Gpt


class EngineLoop(Running):
    """``train_step`` over the microbatches."""

    def __init__(self, engine: Any, microbatches: int, *, by_shared_memory: bool) -> None:
        self.engine = engine
        self.microbatches = microbatches
        self.by_shared_memory = by_shared_memory

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        pairs = zip(tokens.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        result = self.engine.train_step([{"tokens": x, "targets": y} for x, y in pairs])
        return float(result.loss)

    def other_bytes(self) -> int:
        return int(self.engine.traffic.total().bytes) if self.by_shared_memory else 0

    def idle_shares(self) -> tuple[float, float] | None:
        """(simulated, measured) idle share of the last step's pipeline."""
        timelines = self.engine.timeline()
        return None if timelines is None else (timelines[0].idle_share, timelines[1].idle_share)


def build(row: Contender, setting: Setting) -> Running:
    """An engine over the model on ``meta``."""
    work = setting.workload
    with torch.device("meta"):
        model = Gpt(policy(work))
    config: dict[str, Any] = {
        "batch": {"global_size": work.micro_batch, "micro_size": work.micro_batch // row.microbatches},
        "optimizer": {"type": "adamw", **work.adamw, "betas": list(work.adamw["betas"])},
        "comm": {"transport": row.options["transport"]},
        "train": {"seed": work.seed},
        **_parallel(row, work),
    }
    engine = shardwise.initialize(model, config=config, world=join(quiet=True))
    shared = row.options["transport"] == "shared_memory"
    return EngineLoop(engine, row.microbatches, by_shared_memory=shared)


def _parallel(row: Contender, work: Workload) -> dict[str, Any]:
    if row.options["kind"] == "tensor":
        return {"mesh": {"tp": row.ranks}, "tensor": {"sequence_parallel": row.options["sequence"] == "yes"}}
    virtual_stages = INTERLEAVE[row.options["schedule"]]
    uniform = [f"blocks.{i}" for i in starts(work, row.ranks * virtual_stages)[1:]]
    return {
        "mesh": {"pp": row.ranks},
        "recompute": row.options["recompute"],
        "check_first_step": "off",  # it holds the uncut model once, which no peer does
        "pipeline": {
            "schedule": row.options["schedule"],
            "virtual_stages": virtual_stages,
            "wgrad_delay": int(row.options["wgrad_delay"]) if "wgrad_delay" in row.options else None,
            "partition": row.options.get("partition", uniform),
        },
    }
