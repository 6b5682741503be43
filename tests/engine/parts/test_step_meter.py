"""The rows of a step's own memory are measured in one step, without changing it, and hold what was foreseen."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World
from shardwise.engine.fit.foresee import foresee
from shardwise.memory.ledger import STEP_ROWS
from tests.simulate.layouts import MODELS

OWN: dict[str, Any] = {"check_first_step": "off", "batch": {"duplicates": "allow"}}


def measured(world: World | None, model: str, given: dict[str, Any]) -> dict[str, int]:
    """Rows that the engine holds after a measured step, the second one."""
    make, batch = MODELS[model]
    own = OWN | given
    own["batch"] = OWN["batch"] | given.get("batch", {})
    engine = shardwise.initialize(make(), own, world=world)
    batches = [batch() for _ in range(engine.accumulation)]
    engine.train_step(batches)
    assert not set(STEP_ROWS) & set(engine.held_bytes()), "only a measured step has these rows"
    with engine.measure_memory(batches):
        engine.train_step(batches)
    rows = engine.held_bytes()
    engine.close()
    return rows


def compare(model: str, given: dict[str, Any], ranks: int, real: list[dict[str, int]]) -> None:
    make, batch = MODELS[model]
    outlook = foresee(make, OWN | given, ranks, example=batch())
    for step, rows in zip(outlook.steps, real, strict=len(outlook.steps) > 1):
        foreseen = outlook.rows(step)
        own = sum(rows[row] for row in STEP_ROWS)
        assert own == pytest.approx(sum(foreseen.get(row, 0) for row in STEP_ROWS), rel=0.01, abs=256)
        # A backward pass without windows is announced by its first gradient, later than it begins.
        assert rows["kept"] == pytest.approx(foreseen["kept"], rel=0.1)
        assert rows["received"] == foreseen.get("received", 0)
        state = outlook.plan.bytes_per_rank(step.rank)
        assert {row: rows[row] for row in state} == {row: foreseen[row] for row in state}


def test_a_measured_step_holds_what_was_foreseen() -> None:
    compare("gpt", {}, 1, [measured(None, "gpt", {})])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("gpt", {"zero": {"stage": 3}}),
        ("gpt", {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}}),
        ("gpt", {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}),
        (
            "gpt",
            {
                "mesh": {"pp": 2},
                "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
                "batch": {"accumulation": 4},
            },
        ),
        ("gpt2", {"recompute": "full"}),
        ("llama", {"precision": "bf16"}),
        ("resnet", {"zero": {"stage": 2}}),
    ],
    ids=str,
)
def test_every_layout_holds_what_was_foreseen(ranks: Any, model: str, given: dict[str, Any]) -> None:
    compare(model, given, 2, ranks(2).run(measured, model, given))


class Branching(nn.Module):
    """A model with a number that autograd keeps as a tensor, and with an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu_()
        return (y * y).sum() / len(x)


def test_a_measured_step_computes_the_same_bits() -> None:
    def losses(is_measured: bool) -> list[float]:
        torch.manual_seed(0)
        engine = shardwise.initialize(Branching(), OWN)
        x = torch.linspace(-1, 1, 32).view(4, 8)
        found = []
        for step in range(3):
            if is_measured and step == 0:
                with engine.measure_memory([x]):
                    found.append(engine.train_step([x]).loss)
            else:
                found.append(engine.train_step([x]).loss)
        rows = engine.held_bytes()
        assert (rows.get("kept", 0) >= x.nbytes) is is_measured
        engine.close()
        return found

    assert losses(True) == losses(False)


def test_compiled_steps_are_not_measured() -> None:
    engine = shardwise.initialize(Branching(), OWN | {"compile": {"scope": "blocks", "backend": "eager"}})
    x = torch.ones(4, 8)
    with engine.measure_memory([x]):
        engine.train_step([x])
    assert "kept" not in engine.held_bytes()
    engine.close()
