"""A step that is not finite where no loss scale helps: the end of the run, or skipped, a bounded number in a row."""

from pathlib import Path
from typing import Any

import torch
from tests.parallel.zero.test_windows import raised
from tests.precision.test_contract import Growing

import shardwise
from shardwise.base.errors import NonFiniteError
from shardwise.comm.world import World


def start(world: World, stage: int, **precision: Any) -> Any:
    config = {"zero": {"stage": stage}, "optimizer": {"type": "sgd", "lr": 0.5}, "precision": precision}
    return shardwise.initialize(Growing(), config, world=world)


def feed(engine: Any, value: float, loss_alone: bool = False) -> Any:
    """One step whose gradient is ``value`` on rank 1 and 0.25 on the others, or whose loss alone is NaN."""
    is_bad = engine.world.rank == 1
    loss = engine(torch.full((4,), value if is_bad and not loss_alone else 0.25))
    engine.backward(loss + (torch.nan if is_bad and loss_alone else 0.0))
    return engine.step()


def skipped(world: World, folder: Path) -> None:
    for stage, precision in ((0, {"compute": "bf16"}), (3, {}), (2, {"compute": "fp16", "loss_scale": 8.0})):
        policy = {**precision, "nonfinite": "skip", "max_skipped_steps": 2}
        engine = start(world, stage, **policy)
        assert not feed(engine, 0.25).skipped
        before = engine.state_dict()["w"]
        result = feed(engine, torch.inf)
        assert (result.skipped, result.skipped_steps, result.step) == (True, 1, 2)
        assert feed(engine, 0.25, loss_alone=True).skipped_steps == 2
        assert engine.state_dict()["w"].equal(before) and engine.applied_steps == 1
        engine.save(folder / str(stage), asynchronous=False)
        text = raised(NonFiniteError, lambda engine=engine: feed(engine, torch.inf))  # type: ignore[misc]
        assert (
            "step 4: gradients are not finite" in text and "after 2 steps in a row that were skipped" in text
        )
        assert "on rank 1, in microbatch 0, its batch holds NaN" in text
        if "loss_scale" in precision:
            assert "the loss scale is at 8.0" in text and engine.loss_scale == 8.0
        engine.close()
        engine = start(world, stage, **policy)
        engine.load(folder / str(stage))
        text = raised(NonFiniteError, lambda engine=engine: feed(engine, torch.inf))  # type: ignore[misc]
        assert "after 2 steps in a row" in text
        assert not feed(engine, 0.25).skipped
        assert feed(engine, torch.inf).skipped_steps == 3 == engine.skipped_steps
        assert not feed(engine, 0.25).skipped
        engine.close()
    engine = start(world, 0, compute="fp16", loss_scale=8.0)
    assert "and the loss scale is at 8.0" in raised(NonFiniteError, lambda: feed(engine, torch.inf))
    engine.close()


def test_skipped(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(skipped, tmp_path)
