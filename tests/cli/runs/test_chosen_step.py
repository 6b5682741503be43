"""The best steps of a run: kept beside the newest one, through a kill and a resume, and named by ``--step best``."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.trained_run import call
from torch import Tensor

from shardwise.base.errors import CheckpointError, ConfigError, UsageError
from shardwise.cli.best_metric import BestMetric
from shardwise.cli.runs.chosen_step import step_at
from shardwise.cli.click_trainer import ClickTrainer
from shardwise.cli.image_trainer import ImageTrainer
from shardwise.cli.rank import train
from shardwise.cli.request import CommandRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.cli.text_trainer import TextTrainer
from shardwise.cli.trainer import Trainer
from shardwise.config.rules import check
from shardwise.config.run import RunConfig
from shardwise.observe import metrics

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

EVALUATIONS, KILLED_AT = 12, 8


def of_class_1(outputs: Tensor, labels: Tensor) -> Mapping[str, Any]:
    """A metric of a user's own: the hits among pictures of class 1."""
    return {"of_class_1": ((outputs.argmax(1) == labels)[labels == 1].sum(), (labels == 1).sum())}


TEXT = {
    "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
    "data": {"validation_samples": 4},
    "optimizer": {"lr": 0.3},
    "checkpoint": {},
}
PICTURES = {
    "model": {"name": "resnet", "depth": 18, "width": 2, "size": 8},
    "data": {"synthetic": {"samples": 64, "validation_samples": 22, "classes": 4}, "workers": 0},
    "checkpoint": {"best_metric": "of_class_1", "best_is": "higher"},
}
CLICKS = {
    "model": {"name": "deepfm", "width": 4, "hidden": [8]},
    "data": {
        "synthetic": {"samples": 400, "validation_samples": 150, "tables": 3, "rows": 40, "dense": 2},
    },
    "checkpoint": {"best_metric": "log_loss"},
}
KINDS: dict[str, tuple[type[Trainer], dict[str, Any], Callable[[Any], float]]] = {
    "text": (TextTrainer, TEXT, lambda row: row.val_loss),
    "pictures": (ImageTrainer, PICTURES, lambda row: -row.accuracy),
    "clicks": (ClickTrainer, CLICKS, lambda row: row.log_loss),
}


def written(folder: Path, kind: str, **checkpoint: Any) -> CommandRequest:
    content = dict(KINDS[kind][1])
    if kind == "text":
        (folder / "text.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(400)))
        content["data"] = content["data"] | {"source": str(folder / "text.txt")}
    train_keys: dict[str, Any] = {"steps": EVALUATIONS, "eval_every": 1}
    train_keys |= {"metrics": f"{__name__}:of_class_1"} if kind == "pictures" else {}
    train_keys |= {"sample_tokens": 0} if kind == "text" else {}
    given = {
        "batch": {"global_size": 4},
        "train": train_keys,
        "monitor": {"tensorboard": False, "picture": False},
        "output_dir": str(folder / "run"),
        **content,
        "checkpoint": {"every": 3, "keep_last": 1, "keep_best": 2, **content["checkpoint"], **checkpoint},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(given))
    return CommandRequest(str(folder / "config.yaml"))


def killed(trainer: type[Trainer], request: CommandRequest) -> None:
    """Run in a fork of this process, which kills itself when it is to evaluate step ``KILLED_AT``."""
    child = os.fork()
    if child == 0:
        try:
            evaluate = trainer.evaluate

            def or_die(self: Any) -> float:
                if self.engine.step_count == KILLED_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                return evaluate(self)

            trainer.evaluate = or_die  # type: ignore[method-assign]
            train(request)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def steps_in(folder: Path) -> list[int]:
    steps = (folder / "run/checkpoints").glob("step_" + 8 * "[0-9]")
    return sorted(int(path.name.split("_")[1]) for path in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_best_of_twelve_evaluations_survive_a_kill_and_a_resume(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, _, worth = KINDS[kind]
    request = written(tmp_path, kind)
    scores: dict[int, float] = {}
    results = trainer.results

    def noted(self: Any) -> dict[str, float]:
        found = results(self)
        sign = 1.0 if self._best_by.higher_is_better else -1.0
        scores[self.engine.step_count] = sign * found[self._best_by.name]
        return found

    killed(trainer, request)
    left = steps_in(tmp_path)
    assert left and max(left) < KILLED_AT
    monkeypatch.setattr(trainer, "results", noted)
    assert train(request) == 0
    rows = metrics.read(tmp_path / "run/metrics.csv")
    assert [row.step for row in rows] == list(range(1, EVALUATIONS + 1))
    if kind != "pictures":  # whose own metric is in no column
        scores = {row.step: -worth(row) for row in rows}
        best = sorted(scores, key=lambda step: (-scores[step], step))[:2]
        assert steps_in(tmp_path) == sorted({*best, EVALUATIONS})
        assert step_at(tmp_path / "run", "best").step == best[0]
    else:
        told = step_at(tmp_path / "run").trainer
        assert told is not None
        ranked = [(int(step), score) for step, score in told["engine"]["best"]]
        assert ranked == sorted(ranked, key=lambda each: (-each[1], each[0]))
        assert all(dict(ranked)[step] == score for step, score in scores.items() if step in dict(ranked))
        assert steps_in(tmp_path) == sorted({ranked[0][0], ranked[1][0], EVALUATIONS})
        best = [ranked[0][0]]
    code, out, _ = call(monkeypatch, capsys, "inspect", str(tmp_path / "run"), "--step", "best")
    assert code == 0 and f"step {best[0]} of run" in out
    assert RunFolder(tmp_path / "run").start_from("best") == tmp_path / f"run/checkpoints/step_{best[0]:08d}"


def test_a_run_goes_on_from_its_best_step(tmp_path: Path) -> None:
    request = written(tmp_path, "clicks", best_is="higher")  # the first evaluations are the worst
    assert train(request) == 0
    best = step_at(tmp_path / "run", "best").step
    first = metrics.read(tmp_path / "run/metrics.csv")
    again = CommandRequest(request.config, ("train.steps=13",), resume="best")
    assert train(again) == 0
    rows = metrics.read(tmp_path / "run/metrics.csv")
    assert [row.step for row in rows] == list(range(1, 14))
    assert [row.loss for row in rows[:EVALUATIONS]] == [row.loss for row in first], f"from step {best}"
    assert best in steps_in(tmp_path) and 13 in steps_in(tmp_path)


def test_no_step_is_the_best_by_an_auc_of_labels_that_are_all_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clicks.csv").write_text(
        "label,age,item\n" + "".join(f"0,{i % 7},{i % 5}\n" for i in range(60))
    )
    request = written(tmp_path, "clicks", best_metric="auc")
    given = yaml.safe_load(Path(request.config).read_text())
    given["data"] = {"source": str(tmp_path / "clicks.csv"), "kind": "clicks"}
    given["train"]["steps"] = 3
    Path(request.config).write_text(yaml.safe_dump(given))
    assert train(request) == 0
    out = capsys.readouterr()
    said = out.out + out.err
    assert "the AUC is undefined: all 6 samples held out have the same label" in " ".join(said.split())
    assert steps_in(tmp_path) == [3]
    code, _, err = call(monkeypatch, capsys, "inspect", str(tmp_path / "run"), "--step", "best")
    assert code and "no step of" in err and "was saved with a score" in err


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"checkpoint": {"best_metric": "loss"}}, "keep_best: 0 keeps none of them"),
        (
            {"checkpoint": {"keep_best": 1, "best_metric": "auc"}},
            "'auc' is not a metric of an evaluation on this data",
        ),
        (
            {
                "checkpoint": {"keep_best": 1, "best_metric": "top2"},
                "train": {"metrics": "a:b"},
                "data": {"kind": "images"},
            },
            "higher or lower values of it are better",
        ),
    ],
)
def test_what_a_configuration_may_not_say_of_the_best(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check(RunConfig.parse(given, "given"))


def test_steps_that_are_not_there_are_named(run: Path, tmp_path: Path) -> None:
    assert [step_at(run, which).step for which in ("newest", "2", "00000004")] == [4, 2, 4]
    for which, error, match in (
        ("worst", UsageError, "expected newest, best, or the number of a step"),
        ("3", CheckpointError, "has no such step; it has step_00000004, step_00000002"),
        ("best", CheckpointError, "no step of .* was saved with a score"),
    ):
        with pytest.raises(error, match=match):
            step_at(run, which)
    one = run / "checkpoints/step_00000002"
    assert step_at(one, "2").step == 2
    with pytest.raises(UsageError, match="is one step; give the run folder"):
        step_at(one, "4")
    with pytest.raises(UsageError, match="--step best: .* holds no checkpoint to begin from"):
        RunFolder(tmp_path / "new").start_from("auto", "best")
    with pytest.raises(UsageError, match=r"no metric 'aucc'.*it has auc, log_loss"):
        BestMetric("aucc", True).value_in({"auc": 1.0, "log_loss": 1.0}, 1)
