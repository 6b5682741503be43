"""Ranks that train together make calls that do not differ, in every layout: a hang is not taken for a mismatch."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm.watching.answers import StartedCall
from shardwise.comm.watching.mismatch import first_mismatch
from shardwise.comm.watching.recorder import Event
from shardwise.comm.watching.rings import parse_ring
from shardwise.comm.world import World
from shardwise.models import Gpt, GptPolicy

LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 3": {"zero": {"stage": 3}},
    "tensor": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}},
    "pipeline": {"mesh": {"pp": 2}, "batch": {"accumulation": 2}},
    "zero bubble": {"mesh": {"pp": 2}, "batch": {"accumulation": 2}, "pipeline": {"schedule": "zb_h1"}},
}


def started(world: World, config: dict[str, Any]) -> list[StartedCall]:
    """The collectives and messages of three steps and an evaluation."""
    torch.manual_seed(0)
    model = Gpt(GptPolicy(layers=2, width=16, heads=2, context=8, vocab=32))
    batch = config.get("batch", {}) | {"duplicates": "allow"}
    engine = shardwise.initialize(model, config | {"batch": batch, "max_grad_norm": 1.0})
    tokens = torch.arange(16).view(2, 8)
    for _ in range(3):
        engine.train_step([{"tokens": tokens, "targets": tokens}] * (engine.config.batch.accumulation or 1))
    recorder = engine._parts.site.clock.recorder
    assert recorder is not None
    records = parse_ring(recorder.data(), Path("ring")).records
    actions = [str(record.action) for record in records if record.action is not None]
    assert actions[-len(engine.trace.actions) :] == [str(action) for action in engine.trace.actions]
    engine.close()
    return [record.call for record in records if record.event is Event.START and record.call is not None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_of_all_ranks_are_alike(ranks: Any, layout: str) -> None:
    calls = dict(enumerate(ranks(2).run(started, LAYOUTS[layout])))
    assert min(len(each) for each in calls.values()) > 3
    assert first_mismatch(calls) is None
