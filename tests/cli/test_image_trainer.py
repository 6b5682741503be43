"""Runs over pictures from start to end: on one rank in this process, on two and four in the pool."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.ranks import RankPool
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.cli.image_trainer import ImageTrainer
from shardwise.cli.rank import train
from shardwise.cli.request import CommandRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.comm.world import World
from shardwise.config.auto import resolve
from shardwise.config.run import load
from shardwise.observe import metrics
from shardwise.observe.metrics import ImageRecord

Ranks = Callable[[int], RankPool]

# Worker processes are forked, which newer Pythons remark upon when threads are alive.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def two_best(outputs: Tensor, labels: Tensor) -> Mapping[str, Any]:
    """A metric of a user's own."""
    hits = (outputs.topk(2).indices == labels[:, None]).any(1)
    return {"top2": hits.sum(), "of_class_1": (hits[labels == 1].sum(), (labels == 1).sum())}


def content_of(folder: Path) -> dict[str, Any]:
    return {
        "model": {"name": "resnet", "depth": 18, "width": 2, "size": 8},
        "data": {"synthetic": {"samples": 64, "validation_samples": 22, "classes": 4}, "workers": 0},
        "batch": {"global_size": 16, "micro_size": 4},
        "batch_norm": "synchronized",
        "train": {"steps": 4, "eval_every": 2, "metrics": f"{__name__}:two_best"},
        "checkpoint": {"every": 2},
        "monitor": {"tensorboard": False, "picture": False},
        "output_dir": str(folder / "run"),
    }


def rows_of(run: Path) -> list[ImageRecord]:
    return metrics.read(run / "metrics.csv")  # type: ignore[return-value]


def test_a_run_and_its_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content_of(tmp_path)))
    assert train(CommandRequest(str(config), ("data.workers=1",))) == 0
    rows = rows_of(tmp_path / "run")
    assert [row.accuracy is not None for row in rows] == [False, True, False, True]
    assert all(row.samples == 16 and row.stalled is not None and 0 <= row.stalled <= 1 for row in rows)
    out = capsys.readouterr().out
    last = rows[-1]
    assert (
        f"held out, 22 pictures: loss {last.val_loss:.4f}, accuracy {last.accuracy:.4f}, of_class_1 0." in out
    )
    assert "top2 " in out and "waiting for pictures" in out and "waits " in out
    # From the middle, the same end.
    assert (
        train(
            CommandRequest(
                str(config),
                (f"output_dir={tmp_path / 'again'}",),
                resume=str(tmp_path / "run/checkpoints/step_00000002"),
            )
        )
        == 0
    )
    for one, other in zip(rows[2:], rows_of(tmp_path / "again"), strict=True):
        assert (one.loss, one.val_loss, one.accuracy) == (other.loss, other.val_loss, other.accuracy)


def on_ranks(world: World, content: dict[str, Any]) -> list[Any]:
    resolved = resolve(load(content), world.size, "cpu")
    trainer = ImageTrainer(world, resolved, RunFolder(Path(content["output_dir"])))
    steps = trainer.steps()
    losses = [trainer.step(steps).loss for _ in range(3)]
    accuracy = trainer.evaluate()
    steps.close()
    return [losses, accuracy, trainer.score]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_any_number_of_ranks_sees_the_same(ranks: Ranks, tmp_path: Path, size: int) -> None:
    content = content_of(tmp_path)
    # Batch statistics are those of a microbatch of all ranks: of the whole batch only where there is one.
    content["batch"] = {"global_size": 16, "accumulation": 1}
    (losses, accuracy, score), *_ = ranks(1).run(on_ranks, content)
    for found in ranks(size).run(on_ranks, content):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[2] == pytest.approx(score, rel=1e-5)
        assert found[1] == accuracy and 0 < accuracy < 1


def on_stages(world: World, content: dict[str, Any]) -> list[Any]:
    trainer = ImageTrainer(
        world, resolve(load(content), world.size, "cpu"), RunFolder(Path(content["output_dir"]))
    )
    pictures, read = trainer.corpus.train.pictures, []
    picture = pictures.picture
    pictures.picture = lambda index: read.append(index) or picture(index)  # type: ignore[func-returns-value]
    steps = trainer.steps()
    losses = [trainer.step(steps).loss for _ in range(3)]
    trainer.evaluate()
    steps.close()
    return [losses, trainer.score["loss"], len(read)]


def test_the_first_stage_alone_reads_pictures(ranks: Ranks, tmp_path: Path) -> None:
    content = content_of(tmp_path)
    del content["batch_norm"], content["train"]["metrics"]
    content["model"] = {"name": "alexnet", "width": 1, "hidden": 4, "size": 64, "dropout": 0.5}
    ((losses, score, read),) = ranks(1).run(on_stages, content)
    assert read >= 3 * 16
    found = ranks(2).run(on_stages, content | {"mesh": {"pp": 2}})
    for each in found:
        assert each[:2] == [pytest.approx(losses, rel=1e-5), pytest.approx(score, rel=1e-5)]
    assert found[0][2] >= 3 * 16
    assert found[1][2] == 16  # of the first step, which is compared with the uncut model on that rank


def test_what_does_not_go_together(tmp_path: Path) -> None:
    for changes, said in (
        ({"data": {"kind": "text"}}, "a model of images reads pictures"),
        ({"data": {"kind": "images", "size": 9}}, "data.size is 9 and model.size 8"),
        ({"model": {"name": "gpt"}, "data": {"kind": "images"}}, "remove kind: images"),
        ({"model": {"name": "gpt"}, "data": {}}, "metrics are computed from outputs and labels of pictures"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve(load(content_of(tmp_path) | changes), 1, "cpu")
