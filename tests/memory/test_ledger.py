"""What a rank holds: as the Plan says, as the ledger says, and as the buffers themselves say, to the byte."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World
from shardwise.memory.ledger import PREDICTED, Ledger
from shardwise.models import GptPolicy
from shardwise.models import build as build_model
from shardwise.parallel.zero.gradient import Gradient
from shardwise.plan.mesh import DENSE, EXPERT

MODEL = {"layers": 2, "width": 16, "heads": 2, "vocab": 19, "context": 8}
LAYOUTS: list[dict[str, Any]] = [
    *({"zero": {"stage": stage}} for stage in range(4)),
    {"zero": {"stage": 1}, "batch": {"global_size": 8, "micro_size": 2}},
    {"zero": {"stage": 3}, "precision": "bf16"},
    {"zero": {"stage": 2}, "precision": {"compute": "bf16", "grad": "bf16"}},
    {"zero": {"stage": 3}, "mesh": {"dp": {"replicate": 2, "shard": 1}}},
    {"mesh": {"tp": 2}, "precision": "bf16"},
    {"mesh": {"pp": 2}, "batch": {"global_size": 4, "micro_size": 2}},
    {"optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}},
    {"optimizer": {"type": "sgd", "lr": 0.1}},
    {"optimizer": {"type": "lamb"}, "precision": "bf16"},
    {"optimizer": {"type": "muon"}, "zero": {"stage": 1}},
]


def gpt() -> nn.Module:
    with torch.device("meta"):
        return build_model(GptPolicy(**MODEL))


def counted(engine: Any, gradients: dict[str, int]) -> dict[str, int]:
    """Bytes of the buffers; what two share counts once."""
    seen: set[int] = set()

    def size(tensors: list[Tensor | None]) -> int:
        fresh = [t for t in tensors if t is not None and t.untyped_storage().data_ptr() not in seen]
        seen.update(t.untyped_storage().data_ptr() for t in fresh)
        return sum(tensor.nbytes for tensor in fresh)

    held = [b for h in engine._parts.hooks for state in h.states for b in state.buckets]
    return {
        "weights": size([bucket.weight.shard for bucket in held]),
        "gradients": sum(gradients.values()),
        "master": size([bucket.weight.master for bucket in held]),
        "moments": size([m for _, optimizer in engine._parts.trained for *_, m in optimizer.state.moments()]),
    }


def three_times(world: World, given: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, int]]:
    """By row: what the Plan says, the ledger before a step, the buffers after it; what else is held."""
    engine = shardwise.initialize(gpt(), {"batch": {"global_size": 4}} | given, world=world)
    told, gradients = engine.state_bytes(), {}
    right = Gradient.drop_gradients

    def drop(self: Gradient) -> None:
        gradients[self.what] = 0 if self._buffer is None else self._buffer.nbytes
        right(self)

    rows = torch.arange(9).expand(int(engine.config.batch.micro_size or 0), 9) + engine.dp_index
    with patch.object(Gradient, "drop_gradients", drop):
        engine.train_step([(rows[:, :-1], rows[:, 1:])] * engine.config.batch.accumulation)
    planned = engine.plan.bytes_per_rank()
    measured, rest = counted(engine, gradients), engine.held_bytes()
    assert engine.state_bytes() == told, "nothing grows in a step"
    engine.close()
    return planned, told, {row: measured[row] for row in told}, rest


@pytest.mark.parametrize("given", LAYOUTS, ids=str)
def test_the_plan_the_ledger_and_the_buffers_agree(ranks: Any, given: dict[str, Any]) -> None:
    for planned, told, measured, rest in ranks(2).run(three_times, given):
        assert planned == {row: size for row, size in told.items() if size}  # no row for what is not kept
        assert told == measured
        assert rest["rings"] > 0
        is_cut = given.get("zero", {}).get("stage") == 3 and "mesh" not in given
        assert (rest["gathered"] > 0) == is_cut


def of_experts(world: World) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the experts' view by row: what the Plan says, and what buckets of experts took."""
    with torch.device("meta"):
        model = build_model(GptPolicy.model_validate(MODEL | {"experts": {"count": 2, "first": 1}}))
    config = {"mesh": {"ep": 2}, "zero": {"stage": 3}, "precision": "bf16", "batch": {"global_size": 4}}
    engine = shardwise.initialize(model, config, world=world)
    held: dict[str, int] = {}
    for each in engine._parts.site.ledger.holdings:
        if ".experts" in each.owner:
            held[each.row] = held.get(each.row, 0) + each.size()
    planned = engine.plan.bytes_per_rank(axes=EXPERT)
    together = {
        row: size + planned.get(row, 0) for row, size in engine.plan.bytes_per_rank(axes=DENSE).items()
    }
    assert together == {row: size for row, size in engine.state_bytes().items() if size}
    engine.close()
    return planned, {row: size for row, size in held.items() if size}


def test_each_view_of_the_mesh_holds_what_the_plan_says(ranks: Any) -> None:
    for planned, held in ranks(2).run(of_experts):
        assert len(planned) == 4 and planned == held


def test_the_copy_that_a_save_is_written_from_has_a_row(tmp_path: Path) -> None:
    engine = shardwise.initialize(nn.Linear(16, 16), {})
    assert engine.held_bytes()["save"] == 0
    engine.save(tmp_path, asynchronous=True)
    engine.wait_for_save()
    assert engine.held_bytes()["save"] >= engine.state_bytes()["weights"] > 0
    engine.close()


def test_a_row_is_what_its_holders_say() -> None:
    ledger, rows = Ledger(), [7]
    ledger.take("weights", "a", 3)
    ledger.take("tables", "b", lambda: sum(rows))
    ledger.take("weights", "c", 5)
    rows.append(4)
    assert ledger.bytes_by_row() == {"weights": 8, "tables": 11}
    assert set(ledger.bytes_by_row()) <= set(PREDICTED)
