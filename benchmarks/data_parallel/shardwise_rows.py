"""Shardwise at stages 0 to 3, over gloo and over shared memory.

The model is built on ``meta`` and each rank draws its own part of the start weights, as ``shardwise train`` does.
In bf16 the default keeps fp32 gradients, in the buffer and on the wire; the rows with ``grad16`` set
``precision.grad: bf16``, which is what DeepSpeed does by default. Both keep an fp32 master.
"""

from __future__ import annotations

from typing import Any

import torch
from rows import Row
from setting import Running, Setting
from torch import Tensor
from workload import policy

import shardwise
import shardwise.engine.construction.build  # the package loads its parts on first use; memory is measured after that
from shardwise.comm.world import join
from shardwise.models.gpt import Gpt


class ShardwiseLoop(Running):
    """``train_step`` with one microbatch."""

    def __init__(self, engine: Any, *, by_shared_memory: bool) -> None:
        self.engine = engine
        self.by_shared_memory = by_shared_memory

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        result = self.engine.train_step([{"tokens": tokens, "targets": targets}])
        return float(result.loss)

    def other_bytes(self) -> int:
        return int(self.engine.traffic.total().bytes) if self.by_shared_memory else 0


def build(row: Row, setting: Setting) -> Running:
    """An engine over the model on ``meta``."""
    work = setting.workload
    with torch.device("meta"):
        model = Gpt(policy(work))
    precision: dict[str, str] = {"compute": setting.dtype}
    if "grad" in row.options:
        precision["grad"] = row.options["grad"]
    config = {
        "zero": {"stage": row.stage},
        "batch": {"global_size": work.micro_batch * setting.world_size, "micro_size": work.micro_batch},
        "precision": precision,
        "optimizer": {"type": "adamw", **work.adamw, "betas": list(work.adamw["betas"])},
        "comm": {"transport": row.options["transport"]},
        "train": {"seed": work.seed},
    }
    engine = shardwise.initialize(model, config=config, world=join(quiet=True))
    return ShardwiseLoop(engine, by_shared_memory=row.options["transport"] == "shared_memory")
