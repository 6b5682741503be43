"""``guard.on_alarm: restore`` in ``shardwise train``: the run goes back to a good step and ends as if nothing was."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from shardwise.base.errors import DivergedError
from shardwise.cli.rank import _train
from shardwise.cli.request import CommandRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.cli.text_trainer import TextTrainer
from shardwise.comm.world import World
from shardwise.config.auto import resolve
from shardwise.config.run import RunConfig
from shardwise.engine.parts.guard import GuardFollower
from shardwise.observe.metrics import read


def run(folder: Path, guard: dict[str, Any], faults: tuple[int, ...]) -> list[tuple[int, float]]:
    """Train; before each step that follows one of ``faults``, a bit of a moment flips. The rows of metrics.csv."""
    (folder / "text.txt").write_text(
        "all the world is a stage, and all the men and women merely players. " * 40
    )
    config = RunConfig.parse(
        {
            "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
            "data": {"source": str(folder / "text.txt"), "validation_samples": 5},
            "batch": {"global_size": 4, "micro_size": 4},
            "train": {"steps": 8},
            "checkpoint": {"every": 1, "keep_last": 10},
            "output_dir": str(folder / "run"),
            "guard": guard,
        }
    )
    world = World(0, 1)
    trainer = TextTrainer(world, resolve(config, 1, "cpu"), RunFolder(folder / "run"))
    left = list(faults)
    plain = trainer.train_step

    def train_step(*given: Any) -> Any:
        if left and trainer.engine.step_count == left[0]:
            left.pop(0)
            guards = [each for each in trainer.engine._parts.followers if isinstance(each, GuardFollower)]
            moment = next(each for each in guards[0]._state.tensors() if each.kind == "exp_avg")
            moment.flat.view(torch.uint8).numpy()[2] ^= 4
        return plain(*given)

    trainer.train_step = train_step  # type: ignore[method-assign]
    try:
        _train(trainer, Console(file=io.StringIO()), CommandRequest(config="config.yaml"))
    finally:
        trainer.engine.close()
    return [(row.step, row.loss) for row in read(folder / "run" / "metrics.csv")]


def test_a_run_goes_back_and_ends_as_without_the_fault(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    guard = {"every": 2, "on_alarm": "restore"}
    clean = run(tmp_path / "a", guard, ())
    assert [step for step, _ in clean] == [*range(1, 9)]
    assert run(tmp_path / "b", guard, (4, 6)) == clean


def test_a_run_stops_at_an_alarm(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="state of rank 0 changed"):
        run(tmp_path, {"every": 2}, (4,))
