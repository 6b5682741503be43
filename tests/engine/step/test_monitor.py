"""Numbers of a loop of the user's own: written where ``monitor:`` asks for it, and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn, ones

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import World
from shardwise.engine.step import monitor
from shardwise.observe.metrics import read


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def train(world: World, folder: str, asked: dict[str, Any], steps: int, **config: Any) -> None:
    batch = {"micro_size": 2, "accumulation": 2}
    given = {"monitor": asked, "output_dir": folder, "batch": batch, **config}
    engine = shardwise.initialize(Net(), given, world=world)
    for _ in range(2 * steps):
        engine.backward(engine(ones(2, 3)))
        engine.step()
    engine.monitor.send({"mine": 1.5})
    engine.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    train(World(0, 1), str(tmp_path / "run"), {"breakdown": True, "tags": {"loss": "l"}}, 1)
    assert names(tmp_path / "run") == []
    train(World(0, 1), str(tmp_path / "run"), {"csv": True}, 1)
    assert names(tmp_path / "run") == ["metrics.csv"]


def rows(world: World, folder: str) -> None:
    train(world, folder, {"csv": True, "tensorboard": True, "axis": "samples"}, 3)


def test_one_row_a_step_from_rank_0_with_its_seconds(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(rows, str(tmp_path))
    found = read(tmp_path / "metrics.csv")
    assert [row.step for row in found] == [1, 2, 3]
    assert [row.step_s is None for row in found] == [True, False, False]
    for row in found:
        assert row.lr == 1e-3 and row.grad_norm and row.loss > 0
        assert row.forward_s > 0 and row.backward_s > 0 and row.update_s > 0
        assert row.step_s is None or row.forward_s + row.backward_s + row.update_s <= row.step_s
        assert row.exposed_s and row.exposed_dp_s == row.exposed_s, "the mesh has no other axis"
        assert row.exposed_tp_s is row.exposed_pp_s is row.exposed_ep_s is None
        assert row.step_s is None or row.exposed_s < row.step_s
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss/train")] == [8, 16, 24]
    assert [(event.step, event.value) for event in events.Scalars("mine")] == [(24, 1.5)]


def test_a_run_that_is_resumed_goes_on_in_its_file(tmp_path: Path) -> None:
    world, config = World(0, 1), {"monitor": {"csv": True}, "output_dir": str(tmp_path)}

    def steps(engine: Any, count: int) -> None:
        for _ in range(count):
            engine.backward(engine(ones(2, 3)))
            engine.step()

    engine = shardwise.initialize(Net(), config, world=world)
    steps(engine, 2)
    engine.save(tmp_path / "saved", asynchronous=False)
    steps(engine, 2)
    engine.load(tmp_path / "saved")
    steps(engine, 1)
    assert [row.step for row in read(tmp_path / "metrics.csv")] == [1, 2, 3]
    engine.close()
    engine = shardwise.initialize(Net(), config, world=world)
    engine.load(tmp_path / "saved")
    steps(engine, 3)
    engine.close()
    found = read(tmp_path / "metrics.csv")
    assert [row.step for row in found] == [1, 2, 3, 4, 5]
    assert [row.resumed_from for row in found] == [None, None, 2, None, None]


def test_lines_every_few_steps_with_a_breakdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(World(0, 1), str(tmp_path / "run"), {"print_every": 2, "breakdown": True}, 5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4"]
    assert all(word in lines[0] for word in ("lr 0.001", "loss ", "forward ", "backward ", "update "))
    assert names(tmp_path / "run") == []


@pytest.mark.parametrize("given", [{"progress": 3}, {"progress": True}], ids=str)
def test_progress_prints_the_time_left_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any]
) -> None:
    train(World(0, 1), str(tmp_path / "run"), {**given, "print_every": 2}, 4, train={"steps": 3})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3", "step 4/3"]
    assert [line.endswith(" left") for line in lines] == [False, True, True, True]
    assert lines[-1].endswith("  0:00:00 left"), "a loop may go on beyond its steps"
    assert names(tmp_path / "run") == []


def test_progress_is_a_bar_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(monitor, "Console", lambda: Console(force_terminal=True, width=100))
    train(World(0, 1), str(tmp_path / "run"), {"progress": 3}, 3)
    shown = capsys.readouterr().out
    assert "step 3/3" in shown and "\u2501" in shown and "left" in shown


def test_a_range_test_draws_its_picture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schedule = {"type": "range_test", "interval_steps": 2, "min_lr": 0.01}
    with caplog.at_level("INFO", logger="shardwise"):
        train(World(0, 1), str(tmp_path), {"picture": True}, 12, schedule=schedule)
    assert names(tmp_path) == ["loss.png", "lr_range.png"]
    assert "range test: the loss falls fastest at lr " in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"monitor": {"tags": {"los": "x"}}}, "no column 'los'; did you mean 'loss'"),
        ({"monitor": {"axis": "samples"}}, "give batch.global_size"),
        ({"monitor": {"print_every": 0}}, "print_every"),
        ({"monitor": {"progress": True}}, "give train.steps, or the number of steps"),
    ],
    ids=str,
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shardwise.initialize(Net(), config, world=World(0, 1))
