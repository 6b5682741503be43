"""A state goes from one mesh to another without changing a bit: weights, masters and moments; training goes on.

one rank -> pp x tp -> dp at stage 3 -> dp x tp -> interleaved stages -> stages in a V -> tp with copies of heads
-> one rank

The everyday suite takes every second of these layouts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.checkpoint import verify
from shardwise.comm.world import join
from shardwise.models import Gpt, GptPolicy
from tests.engine.state.test_saving import fingerprint
from tests.engine.test_model_parallel import Layout

VOCABULARY, CONTEXT, SEQUENCES = 19, 8, 8
ROUTE = (
    Layout(pp=2, tp=2, microbatches=2),
    Layout(dp=4, stage=3),
    Layout(dp=2, tp=2, stage=1, microbatches=2),
    Layout(pp=2, dp=2, stage=2, microbatches=4, schedule="interleaved_1f1b", virtual_stages=2),
    Layout(pp=2, tp=2, microbatches=4, schedule="zb_v"),
    Layout(tp=4),
    Layout(pp=2, dp=2, stage=3, microbatches=2, reshard_after_forward=False),
    Layout(pp=4, microbatches=4, schedule="gpipe"),
)
KINDS = {
    "llama": GptPolicy(layers=4, width=16, heads=4, kv_heads=2, context=CONTEXT, vocab=VOCABULARY, hidden=24),
    "gpt2": GptPolicy(
        family="gpt2", layers=4, width=16, heads=4, context=CONTEXT, vocab=VOCABULARY, hidden=24
    ),
}


def build(world: Any, layout: Layout, kind: str, precision: str) -> Any:
    with torch.device("meta"):
        model = Gpt(KINDS[kind])
    config = {
        "mesh": {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp},
        "zero": {"stage": layout.stage, "reshard_after_forward": layout.reshard_after_forward},
        "pipeline": {
            "schedule": layout.schedule,
            "virtual_stages": layout.virtual_stages,
            "partition": layout.partition,
        },
        "batch": {"accumulation": layout.microbatches},
        "precision": precision,
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "max_grad_norm": 1.0,
    }
    return shardwise.initialize(model, config, world=world)


def go_on(engine: Any, layout: Layout, steps: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of the same global batches on any mesh."""
    found = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.step_count)
        tokens = (torch.randint(0, 19, (SEQUENCES, 1), generator=generator) + torch.arange(9)) % 19
        parts = tokens.chunk(layout.dp * layout.microbatches)
        mine = parts[engine.dp_index :: layout.dp]
        result = engine.train_step([(part[:, :-1], part[:, 1:]) for part in mine])
        found.append((result.loss, result.grad_norm))
    return found


def travel(world: Any, folder: str, kind: str, precision: str, route: tuple[Layout, ...]) -> list[Any]:
    """Load what the layout before has saved, save, and train on; states and curves by layout."""
    found = []
    for number, layout in enumerate(route):
        engine = build(world, layout, kind, precision)
        assert engine.load(f"{folder}/{number}") == {"note": "kept"}
        step, weights = engine.step_count, engine.state_dict()
        engine.save(f"{folder}/{number + 1}", {"note": "kept"}, asynchronous=False)
        found.append((step, numbers(weights), go_on(engine, layout, 2)))
        engine.close()
    return found


def numbers(weights: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("precision", "kind", "route"),
    [
        ("fp32", "llama", ROUTE[::2]),
        *(
            pytest.param(precision, kind, ROUTE, marks=pytest.mark.soak)
            for precision in ("fp32", "bf16")
            for kind in KINDS
        ),
    ],
    ids=["every second", *(f"{precision}-{kind}" for precision in ("fp32", "bf16") for kind in KINDS)],
)
def test_no_bit_changes_on_the_way(
    ranks: Any, tmp_path: Path, precision: str, kind: str, route: tuple[Layout, ...]
) -> None:
    solo, one = join(quiet=True), Layout()
    engine = build(solo, one, kind, precision)
    go_on(engine, one, 3)
    engine.save(tmp_path / "0", {"note": "kept"}, asynchronous=False)
    first, weights = fingerprint(engine), numbers(engine.state_dict())
    undisturbed = go_on(engine, one, 2)
    engine.close()
    assert {name.partition("/")[0] for name in first if "/" in name} == {"master", "exp_avg", "exp_avg_sq"}

    by_rank = ranks(4).run(travel, str(tmp_path), kind, precision, route)
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for number, layout in enumerate(route):
        for step, loaded, curve in (found[number] for found in by_rank):
            assert step == 3
            assert loaded == weights, f"changed on loading to {layout}"
            assert torch.tensor(curve) == pytest.approx(torch.tensor(undisturbed), rel=tolerance), str(layout)
        folder = tmp_path / str(number + 1)
        assert not verify(folder / "step_00000003")
        back = build(solo, one, kind, precision)
        back.load(folder)
        assert fingerprint(back) == first, f"changed on saving from {layout}"
        back.close()
