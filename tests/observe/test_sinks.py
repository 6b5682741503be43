import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.base.errors import ConfigError
from shardwise.observe.metrics import ClickRecord, StepRecord, read
from shardwise.observe.sinks import AllSinks, MetricNames, MonitorPolicy, TensorBoardEvents, open_sinks


class Kept:
    """Sink that keeps what it is given, and breaks where told."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.records: list[StepRecord] = []
        self.is_closed = False
        self._breaks_at = breaks_at

    def write(self, record: StepRecord) -> None:
        if record.step == self._breaks_at:
            raise OSError("no space left on device")
        self.records.append(record)

    def close(self) -> None:
        self.is_closed = True


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)]


def test_a_run_folder_gets_metrics_events_and_picture(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, MonitorPolicy())
    sinks.write(StepRecord(1, 3.5, lr=0.25))
    sinks.write(StepRecord(2, 3.0, val_loss=3.25))
    sinks.close()
    assert [r.step for r in read(tmp_path / "metrics.csv")] == [1, 2]
    assert scalars(tmp_path / "tensorboard", "loss/train") == [(1, 3.5), (2, 3.0)]
    assert scalars(tmp_path / "tensorboard", "loss/validation") == [(2, 3.25)]
    assert scalars(tmp_path / "tensorboard", "step/lr") == [(1, 0.25)]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_click_through_model_gets_its_auc_as_events_and_picture(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, MonitorPolicy(), kind=ClickRecord, best_auc=0.8)
    sinks.write(ClickRecord(1, 0.5))
    sinks.write(ClickRecord(2, 0.4, log_loss=0.75, auc=0.5, rows=7))
    sinks.close()
    assert [r.step for r in read(tmp_path / "metrics.csv")] == [1, 2]
    assert scalars(tmp_path / "tensorboard", "auc/validation") == [(2, 0.5)]
    assert scalars(tmp_path / "tensorboard", "loss/validation") == [(2, 0.75)]
    assert scalars(tmp_path / "tensorboard", "tables/rows") == [(2, 7)]
    assert (tmp_path / "auc.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, MonitorPolicy(tensorboard=False, picture=False))
    sinks.write(StepRecord(1, 3.5))
    sinks.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("resume_step", [0, 4])
def test_readers_of_the_events_see_each_step_once_after_a_resume(tmp_path: Path, resume_step: int) -> None:
    first = TensorBoardEvents(tmp_path)
    for step in range(1, 7):
        first.write(StepRecord(step, 1.0))
    first.close()
    second = TensorBoardEvents(tmp_path, resume_step)
    for step in range(resume_step + 1, 8):
        second.write(StepRecord(step, 2.0))
    second.close()
    assert scalars(tmp_path, "loss/train") == [(s, 1.0 if s <= resume_step else 2.0) for s in range(1, 8)]


def test_an_optional_sink_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    certain, broken, fine = Kept(), Kept(breaks_at=2), Kept()
    sinks = AllSinks([certain], [broken, fine])
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        for step in (1, 2, 3):
            sinks.write(StepRecord(step, 0.0))
    assert [len(s.records) for s in (certain, broken, fine)] == [3, 1, 3]
    assert [r.getMessage() for r in caplog.records] == ["Kept failed and is switched off for this run"]


def test_the_run_ends_when_its_own_record_cannot_be_kept() -> None:
    with pytest.raises(OSError, match="no space"):
        AllSinks([Kept(breaks_at=1)], []).write(StepRecord(1, 0.0))


def test_closing_goes_on_after_one_failed() -> None:
    class Stuck(Kept):
        def close(self) -> None:
            raise OSError("gone")

    certain, after = Kept(), Kept()
    AllSinks([certain], [Stuck(), after]).close()
    assert certain.is_closed and after.is_closed


def test_a_missing_wandb_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"monitor.wandb.*pip install wandb"):
        open_sinks(tmp_path, MonitorPolicy(wandb="p", picture=False, tensorboard=False))


def test_tags_and_samples(tmp_path: Path) -> None:
    policy = MonitorPolicy(csv=False, picture=False, tensorboard=str(tmp_path / "events"))
    naming = MetricNames({"loss": "Train/Samples/train_loss", "loss_scale": "scale"}, samples_per_step=8)
    sinks = open_sinks(tmp_path / "run", policy, naming=naming)
    sinks.write(StepRecord(1, 3.5, lr=0.25))
    sinks.write(StepRecord(2, 3.0, loss_scale=4.0))
    sinks.send({"mine": 7.0}, 12)
    sinks.close()
    assert scalars(tmp_path / "events", "Train/Samples/train_loss") == [(8, 3.5), (16, 3.0)]
    assert scalars(tmp_path / "events", "scale") == [(16, 4.0)]
    assert scalars(tmp_path / "events", "mine") == [(12, 7.0)]
    assert set(EventAccumulator(str(tmp_path / "events")).Reload().Tags()["scalars"]) == {
        "Train/Samples/train_loss",
        "scale",
        "mine",
    }
    assert not (tmp_path / "run").exists()


def test_a_file_for_each_number(tmp_path: Path) -> None:
    """Laid out as DeepSpeed's are; a run that goes on after step 2 drops what stands for later ones."""
    policy = MonitorPolicy(csv=False, picture=False, tensorboard=False, csv_per_tag=str(tmp_path / "job"))
    naming = MetricNames({"lr": "Train/Samples/lr"}, samples_per_step=4)
    for resumed, steps in ((0, (1, 2, 3)), (2, (3,))):
        sinks = open_sinks(tmp_path / "run", policy, resumed, naming=naming)
        for step in steps:
            sinks.write(StepRecord(step, 3.5, lr=0.25 / (1 + resumed)))
        sinks.send({"Train/own thing": 0.5}, 12)
        sinks.close()
    assert {path.name: path.read_text() for path in (tmp_path / "job").iterdir()} == {
        "Train_Samples_lr.csv": "step,lr\n4,0.25\n8,0.25\n12,0.08333333333333333\n",
        "Train_own_thing.csv": "step,own thing\n12,0.5\n",
    }
    assert not (tmp_path / "run").exists()


def test_comet_is_said_to_be_missing_and_continues_the_same_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = MonitorPolicy(
        csv=False, picture=False, tensorboard=False, comet="project", comet_experiment="one"
    )
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match=r"monitor.comet.*pip install comet_ml"):
        open_sinks(tmp_path, policy)
    told: list[Any] = []

    class Experiment:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **named: told.append((name, *args, *named.items())) or "key1"

    class Module:
        @staticmethod
        def start(**arguments: Any) -> Experiment:
            told.append(arguments)
            return Experiment()

    monkeypatch.setitem(sys.modules, "comet_ml", Module)
    for resume_step in (0, 3):
        sinks = open_sinks(tmp_path, policy, resume_step)
        sinks.write(StepRecord(resume_step + 1, 2.0))
        sinks.close()
    started = [each["experiment_key"] for each in told if isinstance(each, dict)]
    assert started == [None, "key1"]
    assert ("log_metrics", {"loss/train": 2.0}, ("step", 4)) in told and told[-1] == ("end",)


def test_wandb_continues_the_same_page_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    sent: list[tuple[int, dict[str, float]]] = []

    class Page:
        id = "abc123"

        def log(self, values: dict[str, float], step: int) -> None:
            sent.append((step, values))

        def finish(self) -> None:
            pass

    class Module:
        @staticmethod
        def init(**arguments: Any) -> Page:
            started.append(arguments)
            return Page()

    monkeypatch.setitem(sys.modules, "wandb", Module)
    for resume_step in (0, 3):
        policy = MonitorPolicy(wandb="project", picture=False, tensorboard=False)
        sinks = open_sinks(tmp_path, policy, resume_step, {"output_dir": "x"})
        sinks.write(StepRecord(resume_step + 1, 2.0))
        sinks.close()
    assert [s["id"] for s in started] == [None, "abc123"]
    assert sent == [(1, {"loss/train": 2.0}), (4, {"loss/train": 2.0})]
