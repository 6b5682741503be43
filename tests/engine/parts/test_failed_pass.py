"""Errors of a forward pass name module and batch; microbatches without a step are told of."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from tests import forked
from tests.engine.nets import seeded


@pytest.fixture
def engine() -> Iterator[shardwise.Engine]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().mean()

    made = shardwise.initialize(
        seeded(nn.Sequential, nn.Linear(3, 4), nn.Linear(4, 1)),
        {"batch": {"accumulation": 2}},
        loss=loss,
        world=World(0, 1),
    )
    yield made
    made.close()


def test_numpy_arrays_are_named(engine: shardwise.Engine) -> None:
    with pytest.raises(UsageError, match=r"the batch holds numpy arrays \(batch\['x'\]\).*torch.from_numpy"):
        engine({"x": np.zeros((2, 3))})


@pytest.mark.parametrize(
    ("device", "place"), [("cpu", "in module '0' (Linear)"), ("meta", "before the model's forward")]
)
def test_a_batch_that_does_not_fit_is_described(engine: shardwise.Engine, device: str, place: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        engine({"x": torch.zeros(2, 5, dtype=torch.float64, device=device)})
    (note,) = caught.value.__notes__
    assert note.startswith(f"shardwise: {place}; the batch holds batch['x'] float64 [2, 5]")


def test_a_close_tells_of_microbatches_without_a_step(
    engine: shardwise.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        engine.backward(engine({"x": torch.zeros(2, 3, dtype=torch.float64)}))
    with caplog.at_level("WARNING", logger="shardwise"):
        engine.close()
    (said,) = [each.getMessage() for each in caplog.records if "never stepped" in each.getMessage()]
    assert said.startswith("close: 1 microbatch was never stepped: 3 backward passes")


SCRIPT = """
import torch, shardwise
engine = shardwise.initialize(torch.nn.Linear(3, 1), loss=lambda model, x: model(x).square().mean())
for _ in range(3):
    engine.backward(engine(torch.zeros(2, 3)))
"""


def test_an_exit_tells_of_it_too(tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert forked.script(SCRIPT, said) == 0, said.read_text()
    assert "exit: 1 microbatch was never stepped: 3 backward passes" in said.read_text()
