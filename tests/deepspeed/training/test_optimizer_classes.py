"""Optimizers by the names of DeepSpeed's kernels."""

from typing import Any

import torch

import shardwise.deepspeed as deepspeed
from tests.deepspeed.training.script import PARTS, configuration, net


def counted(engine: Any, loss_of: Any) -> None:
    for place in range(PARTS):
        engine.backward(loss_of(place))
        engine.step()


def test_optimizers_by_the_names_of_their_kernels() -> None:
    """Each is the rule of the same name; DeepSpeed's LAMB corrects the step."""
    from shardwise.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from shardwise.deepspeed.ops.lamb import FusedLamb
    from shardwise.deepspeed.ops.lion import FusedLion

    model = net()
    assert type(FusedAdam(model.parameters())) is torch.optim.AdamW
    assert type(DeepSpeedCPUAdam(model.parameters(), adamw_mode=False)) is torch.optim.Adam
    keys = configuration(1, optimizer=None, scheduler=None)
    for make in (FusedLamb, FusedLion):
        model = net()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=make(model.parameters(), lr=0.1), config=keys
        )
        before = model[0].weight.detach().clone()
        counted(engine, lambda place, engine=engine: engine(torch.ones(2, 4).double()).square().mean())
        moved = (model[0].weight - before).abs()
        assert engine.global_steps == 1 and moved.max() > 0
        if make is FusedLion:
            torch.testing.assert_close(moved, torch.full_like(moved, 0.1))
        engine.destroy()
