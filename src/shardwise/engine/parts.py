"""Parts: what ``build`` made and the engine runs."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint import Checkpoints
from shardwise.comm.collectives import Clock, Group
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.engine.step import Trained
from shardwise.parallel.zero.executor import Executor
from shardwise.parallel.zero.layout import Strategy
from shardwise.plan.plan import Plan
from shardwise.precision.loss_scale import LossScale


@dataclass
class Parts:
    """The running parts of one engine."""

    model: nn.Module
    world: World
    device: torch.device
    plan: Plan
    strategy: Strategy
    executor: Executor
    trained: list[Trained]
    """Trained buckets in order of Units."""
    both: Group
    """All data-parallel ranks."""
    shard: Group
    replicate: Group
    clock: Clock
    traffic: Traffic
    loss_scale: LossScale | None
    """Only under fp16."""
    number: int = 0
    """Which engine of its world: keeps the keys of several engines apart in the store."""
    checkpoints: dict[Path, Checkpoints] = field(default_factory=dict)
    """By folder."""
    saves: int = 0
