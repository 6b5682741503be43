"""The training steps that commits are compared on, on two ranks.

    zero0 ... zero3   a GPT of 6 blocks, width 384, context 256, 2 sequences a rank, fp32, at that stage
    tp2               the same with matrices cut in two, 4 sequences
    ep2               the same with four experts in every second block, cut in two
    pp2               the same on two stages, 1f1b, four microbatches of one sequence
    tables            a DLRM with 26 tables of 100,000 rows and width 16, 2,048 samples a rank

Only what both commits know may be used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardwise
from shardwise import Ragged, RowOptimizerPolicy, TablePolicy
from shardwise.models.ctr.dlrm import Dlrm
from shardwise.models.ctr.policy import DlrmPolicy
from shardwise.models.gpt import Gpt, GptPolicy

CONTEXT, VOCABULARY = 256, 256
FEATURES, DENSE, SAMPLES, ROWS = 26, 13, 2048, 100_000
OPTIMIZER = {"type": "adamw", "lr": 1e-3}


def gpt(**other: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"layers": 6, "width": 384, "heads": 6, "context": CONTEXT, "vocab": VOCABULARY}
    return Gpt(GptPolicy.model_validate(sizes | other))


def text(seed: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def step_of(name: str, world: Any) -> Callable[[], Any]:
    """A step, ready to be called."""
    if name == "tables":
        return dlrm_step(world)
    model: dict[str, Any] = {}
    if name == "pp2":
        config = {"mesh": {"pp": 2}, "batch": {"accumulation": 4}, "optimizer": OPTIMIZER}
        batches = [text(i, 1) for i in range(4)]
    elif name == "tp2":
        config = {"mesh": {"tp": 2}, "optimizer": OPTIMIZER}
        batches = [text(0, 4)]
    elif name == "ep2":
        config = {"mesh": {"ep": 2}, "optimizer": OPTIMIZER}
        batches = [text(world.rank, 2)]
        model = {"experts": {"count": 4, "every": 2}}
    else:
        config = {"zero": {"stage": int(name[-1])}, "optimizer": OPTIMIZER}
        batches = [text(world.rank, 2)]
    engine = shardwise.initialize(gpt(**model), config, world=world)
    return lambda: engine.train_step(batches)


def dlrm_step(world: Any) -> Callable[[], Any]:
    torch.manual_seed(0)
    tables = [TablePolicy(name=f"f{i}", rows=ROWS, width=16) for i in range(FEATURES)]
    rows = RowOptimizerPolicy(type="rowwise_adagrad", lr=0.02)
    model = Dlrm(DlrmPolicy(width=16, bottom=(64,), top=(128, 64)), DENSE, tables, rows)
    engine = shardwise.initialize(model, {"optimizer": OPTIMIZER}, world=world)
    generator = torch.Generator().manual_seed(world.rank)
    keys = torch.randint(0, ROWS, (FEATURES, SAMPLES), generator=generator)
    batch = {
        "dense": torch.randn(SAMPLES, DENSE, generator=generator),
        "sparse": {f"f{i}": Ragged.of_ones(keys[i]) for i in range(FEATURES)},
        "labels": torch.randint(0, 2, (SAMPLES,), generator=generator).float(),
    }
    return lambda: engine.train_step([batch])
