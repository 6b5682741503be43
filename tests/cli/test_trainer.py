"""The training loop on two ranks in the pool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import RankPool

from shardwise.cli.run_folder import RunFolder
from shardwise.cli.trainer import Trainer, tokens_in
from shardwise.comm.world import World
from shardwise.config.auto import resolve
from shardwise.config.run import RunConfig
from shardwise.observe.metrics import StepRecord
from shardwise.plan.errors import DataError

Ranks = Callable[[int], RankPool]


class Kept:
    """Sink that keeps the records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def config_of(folder: str, stage: int, text: str = "text.txt") -> RunConfig:
    return RunConfig.parse(
        {
            "model": {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 16},
            "data": {"source": str(Path(folder) / text), "validation_samples": 5},
            "zero": {"stage": stage},
            "batch": {"global_size": 8, "micro_size": 2},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 4, "eval_every": 2, "sample_tokens": 24},
            "out": str(Path(folder) / "run"),
        }
    )


def trainer_of(world: World, config: RunConfig) -> Trainer:
    resolved = resolve(config, world.size, world.device.type)
    return Trainer(world, resolved, RunFolder(Path(config.out)))


def trained(world: World, folder: str, stage: int) -> tuple[list[list[Any]], str | None, str | None]:
    """Losses and norms, and the sample by both routes."""
    trainer = trainer_of(world, config_of(folder, stage))
    sink = Kept()
    assert trainer.run(sink)
    trainer.engine.wait_for_save()
    whole = trainer.sample()
    trainer.gathered_model_fits = lambda: world.rank != 0  # type: ignore[method-assign]
    by_unit = trainer.sample()
    assert trainer.engine.module.training
    trainer.engine.close()
    return [[r.loss, r.val_loss or 0.0, r.grad_norm, r.tokens] for r in sink.records], whole, by_unit


def read_other_texts(world: World, folder: str) -> str:
    try:
        trainer_of(world, config_of(folder, 0, f"text.{world.rank}"))
    except DataError as error:
        return str(error)
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name, count in (("text.txt", 300), ("text.0", 300), ("text.1", 200)):
        (tmp_path / name).write_text("".join(f"line {i} says {i * i}\n" for i in range(count)))
    return str(tmp_path)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_train_and_write_as_one_does(folder: str, tmp_path: Path, ranks: Ranks, stage: int) -> None:
    alone = trained(World(0, 1), folder, 0)
    (tmp_path / "run").rename(tmp_path / "alone")
    for rows, whole, by_unit in ranks(2).run(trained, folder, stage):
        for got, expected in zip(rows, alone[0], strict=True):
            assert got == pytest.approx(expected, rel=2e-6)
        assert whole == by_unit == alone[1]


def test_ranks_that_read_different_texts_are_stopped(folder: str, ranks: Ranks) -> None:
    for error in ranks(2).run(read_other_texts, folder):
        assert "ranks [1] read other text than rank 0" in error


def test_only_targets_that_count_are_counted() -> None:
    targets = torch.tensor([[1, 2, -100], [-100, -100, 3]])
    assert tokens_in({"tokens": targets, "targets": targets}) == 3
    assert tokens_in({"targets": torch.rand(3)}) is None
    assert tokens_in((targets, targets)) is None
