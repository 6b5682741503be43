"""The training loop on two ranks in the pool."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import RankPool

from shardwise.base.errors import DataError
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.cli.text_trainer import TextTrainer
from shardwise.comm.world import World
from shardwise.config.auto import resolve
from shardwise.config.run import RunConfig
from shardwise.observe.metrics import StepRecord

Ranks = Callable[[int], RankPool]


class Kept:
    """Sink that keeps the records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def config_of(
    folder: str, stage: int, text: str = "text.txt", changes: dict[str, Any] | None = None
) -> RunConfig:
    return RunConfig.parse(
        {
            "model": {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 16},
            "data": {"source": str(Path(folder) / text), "validation_samples": 5},
            "zero": {"stage": stage},
            "batch": {"global_size": 8, "micro_size": 2},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 4, "eval_every": 2, "sample_tokens": 24},
            "output_dir": str(Path(folder) / "run"),
        }
        | (changes or {})
    )


def trainer_of(world: World, config: RunConfig) -> TextTrainer:
    resolved = resolve(config, world.size, world.device.type)
    return TextTrainer(world, resolved, RunFolder(Path(config.output_dir)))


def trained(
    world: World, folder: str, stage: int, changes: dict[str, Any] | None = None
) -> tuple[list[list[Any]], str | None, str | None]:
    """Losses and norms, and the sample by both routes."""
    before = set(threading.enumerate())
    trainer = trainer_of(world, config_of(folder, stage, changes=changes))
    sink = Kept()
    assert trainer.run(sink)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith("shardwise-data") for name in left), "readers end with the run"
    trainer.engine.wait_for_save()
    whole = trainer.sample()
    trainer.gathered_model_fits = lambda: world.rank != 0  # type: ignore[method-assign]
    by_unit = trainer.sample()
    assert trainer.engine.module.training
    trainer.engine.close()
    rows = [[r.loss, r.val_loss or 0.0, r.grad_norm, r.tokens, r.flops] for r in sink.records]
    return rows, whole, by_unit


def went_on(world: World, folder: str, changes: dict[str, Any]) -> tuple[list[Any], str]:
    """Two more steps of the run in ``folder`` on another mesh: their losses, and the description."""
    more = {"train": {"steps": 6, "eval_every": 2, "sample_tokens": 24}}
    trainer = trainer_of(world, config_of(folder, 0, changes=changes | more))
    trainer.go_on_from(trainer.folder.checkpoints)
    sink = Kept()
    assert trainer.run(sink)
    trainer.engine.wait_for_save()
    assert (trainer.timelines is None) == (trainer.mesh.pp == 1)
    trainer.engine.close()
    return [
        [r.step, r.loss, r.val_loss or 0.0, r.grad_norm, r.tokens] for r in sink.records
    ], trainer.description()


def read_other_texts(world: World, folder: str) -> str:
    try:
        trainer_of(world, config_of(folder, 0, f"text.{world.rank}"))
    except DataError as error:
        return str(error)
    return ""


def write_texts(folder: Path) -> str:
    for name, count in (("text.txt", 300), ("text.0", 300), ("text.1", 200)):
        (folder / name).write_text("".join(f"line {i} says {i * i}\n" for i in range(count)))
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_texts(tmp_path)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_train_and_write_as_one_does(folder: str, tmp_path: Path, ranks: Ranks, stage: int) -> None:
    alone = trained(World(0, 1), folder, 0)
    (tmp_path / "run").rename(tmp_path / "alone")
    for rows, whole, by_unit in ranks(2).run(trained, folder, stage):
        for got, expected in zip(rows, alone[0], strict=True):
            assert got == pytest.approx(expected, rel=2e-6)
        assert whole == by_unit == alone[1]


MODEL = {"model": {"name": "gpt", "layers": 4, "width": 16, "heads": 2, "context": 16, "family": "gpt2"}}
LAYOUTS = [
    (2, 0, {"mesh": {"tp": 2}}),
    (2, 0, {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}),
    (4, 3, {"mesh": {"pp": 2, "dp": 2}}),
    (4, 3, {"mesh": {"dp": 2, "tp": 2}, "recompute": "full"}),
    pytest.param(4, 2, {"mesh": {"pp": 2, "tp": 2}}, marks=pytest.mark.soak),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One rank's run."""
    folder = write_texts(tmp_path_factory.mktemp("alone"))
    first = trained(World(0, 1), folder, 0, MODEL)
    shutil.copytree(Path(folder) / "run", Path(folder) / "four_steps")
    return folder, first, went_on(World(0, 1), folder, MODEL)[0]


@pytest.mark.parametrize(("size", "stage", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_a_cut_model_trains_writes_and_goes_on_as_a_whole_one(
    alone: Any, folder: str, ranks: Ranks, size: int, stage: int, layout: dict[str, Any]
) -> None:
    """Losses, norms, tokens and operations counted once, the sample by both routes; then a run that one rank began."""
    begun, (wanted, text, _), more = alone
    for rows, whole, by_unit in ranks(size).run(trained, folder, stage, MODEL | layout):
        for got, expected in zip(rows, wanted, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)
        assert whole == by_unit == text
    shutil.rmtree(Path(folder) / "run")
    shutil.copytree(Path(begun) / "four_steps", Path(folder) / "run")
    for rows, description in ranks(size).run(went_on, folder, MODEL | layout):
        assert ("tp 2 with sequence parallelism" in description) == ("tp" in layout["mesh"])
        assert ("microbatches through" in description) == ("pp" in layout["mesh"])
        for got, expected in zip(rows, more, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)


def test_ranks_that_read_different_texts_are_stopped(folder: str, ranks: Ranks) -> None:
    for error in ranks(2).run(read_other_texts, folder):
        assert "ranks [1] read other data than rank 0" in error
