"""``torch.distributed.pipelining``: GPipe, 1F1B, interleaved 1F1B and two zero-bubble schedules over gloo.

Its stages are made of the same modules as ours (blocks, embedding, norm, head and their kernels), with the same blocks
on the same ranks; its last stage returns logits, and the loss function is the same kernel that our head calls. Shapes
do not change between steps, so its exchange of shapes happens once, before the clock starts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from contenders import Contender
from setting import Running, Setting
from split import INTERLEAVE, stages_of, starts
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from workload import build_model

from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.rotary import angles
from shardwise.models.gpt import Gpt


class Part(nn.Module):
    """Blocks [first, last) of ``model``, with what stands before the first block and after the last."""

    def __init__(self, model: Gpt, first: int, last: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        p = model.policy
        self.head_size, self.theta = p.head_size, p.rope_theta
        self.embed = model.embed if first == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[first:last])
        self.norm = model.norm if last == p.layers else None
        self.head = model.head if last == p.layers else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T] or activations [B, T, D] -> activations, or logits [B, T, V]."""
        at = angles(0, x.shape[1], cast(int, self.head_size), self.theta, x.device)
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, at, use_reentrant=False) if self.recompute else block(x, at)
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits


class PipeliningLoop(Running):
    """``schedule.step`` and the optimizer's."""

    def __init__(self, schedule: Any, optimizer: Optimizer, *, is_first: bool, is_last: bool) -> None:
        self.schedule = schedule
        self.optimizer = optimizer
        self.is_first = is_first
        self.is_last = is_last

    def step(self, tokens: Tensor, targets: Tensor) -> float | None:
        losses: list[Tensor] = []
        # Without ``return_outputs`` the last stage would join the logits of all microbatches for nothing.
        self.schedule.step(
            *([tokens] if self.is_first else []),
            target=targets if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).mean()) if self.is_last else None


def build(row: Contender, setting: Setting) -> Running:
    """The stages of this rank, round robin, and their schedule."""
    work, rank = setting.workload, setting.rank
    kind, recompute = row.options["schedule"], row.options["recompute"] == "full"
    stages = row.ranks * INTERLEAVE[kind]
    bounds = [*starts(work, stages), work.layers]
    model = cast(Gpt, build_model(work))
    here = [
        PipelineStage(Part(model, bounds[s], bounds[s + 1], recompute), s, stages, torch.device("cpu"))
        for s in stages_of(kind, rank, row.ranks)
    ]
    del model
    several = {
        "interleaved_1f1b": ScheduleInterleaved1F1B,
        "zb_h1": ScheduleInterleavedZeroBubble,
        "zb_v": ScheduleZBVZeroBubble,
    }
    if kind in several:
        schedule: Any = several[kind](cast(Any, here), row.microbatches, loss_fn=cross_entropy)
    else:
        single = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind]
        schedule = single(here[0], row.microbatches, loss_fn=cross_entropy)
    parameters = [parameter for stage in here for parameter in stage.submod.parameters()]
    optimizer = AdamW(parameters, fused=True, **work.adamw)
    is_last = stages - 1 in stages_of(kind, rank, row.ranks)
    return PipeliningLoop(schedule, optimizer, is_first=rank == 0, is_last=is_last)
