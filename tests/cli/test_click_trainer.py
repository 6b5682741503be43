"""Click-through runs from start to end: on one rank in this process, on two in the pool, and killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.models.ctr.batches import criteo_file
from tests.ranks import RankPool
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, MismatchError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.cli.click_trainer import ClickTrainer, described
from shardwise.cli.rank import train
from shardwise.cli.request import CommandRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.comm.world import World
from shardwise.config.auto import resolve
from shardwise.config.run import load
from shardwise.data.clicks import ClickCorpus
from shardwise.observe import metrics
from shardwise.observe.auc import ClickScore
from shardwise.observe.metrics import ClickRecord
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.planner import plan_tables
from shardwise.parallel.embedding.policy import PLACEMENTS, RowOptimizerPolicy, TablePolicy

Ranks = Callable[[int], RankPool]
COMPARED = ("step", "loss", "log_loss", "auc", "grad_norm", "lr", "samples", "rows", "inserted", "evicted")
SAMPLES, ROWS = COMPARED.index("samples"), COMPARED.index("rows")


def content_of(folder: Path) -> dict[str, Any]:
    return {
        "model": {"name": "dlrm", "width": 4, "bottom": [8], "top": [8]},
        "data": {
            "synthetic": {
                "samples": 1000, "validation_samples": 150, "tables": 3, "rows": 40,
                "keys": "hashed", "fresh": 0.1, "dense": 2,
            }
        },
        "tables": {
            "defaults": {"dynamic": {"capacity": 48, "eviction": {"type": "lfu"}}},
            "optimizer": {"type": "adagrad", "lr": 0.1},
        },
        "batch": {"global_size": 32, "micro_size": 8},
        "optimizer": {"type": "adam", "lr": 0.01},
        "schedule": {"type": "linear", "total_steps": 8},
        "train": {"steps": 8, "eval_every": 4},
        "checkpoint": {"every": 2, "keep_last": None},
        "monitor": {"tensorboard": False, "picture": False},
        "output_dir": str(folder / "run"),
    }  # fmt: skip


class Runs:
    """Writes configurations and trains by them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, **changes: Any) -> Path:
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(content_of(self.folder) | changes))
        return path

    def train(self, *overrides: str, **changes: Any) -> int:
        return train(CommandRequest(str(self.config(**changes)), overrides))

    def rows(self, name: str = "run") -> list[ClickRecord]:
        return metrics.read(self.folder / name / "metrics.csv")  # type: ignore[return-value]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def compared(rows: list[ClickRecord]) -> list[list[float | None]]:
    return [[getattr(row, name) for name in COMPARED] for row in rows]


def same_tensors(a: Path, b: Path) -> bool:
    """Every safetensors file of two steps, byte by byte."""
    names = sorted(path.relative_to(a) for path in a.rglob("*.safetensors"))
    assert names == sorted(path.relative_to(b) for path in b.rglob("*.safetensors")) and names
    for name in names:
        left, right = load_file(a / name), load_file(b / name)
        if left.keys() != right.keys() or any(not torch.equal(left[key], right[key]) for key in left):
            return False
    return True


# From start to end -------------------------------------------------------------------------------------------------


def test_a_run_leaves_everything_in_its_folder(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train("monitor.picture=true") == 0
    run, rows = runs.folder / "run", runs.rows()
    assert [row.step for row in rows] == list(range(1, 9))
    assert [row.auc is not None for row in rows] == [step in (4, 8) for step in range(1, 9)]
    assert all(row.samples == 32 and row.samples_per_s and row.memory for row in rows)
    last = rows[-1]
    assert last.rows and last.inserted and last.evicted, "keys came, and tables of 48 rows were full"
    assert last.rows == last.inserted - last.evicted <= 3 * 48
    for name in ("loss.png", "auc.png", "lanes.png", "step.png", "config.yaml", "logs/rank_00000.log"):
        assert (run / name).exists(), name
    out = capsys.readouterr().out
    assert f"AUC {last.auc:.4f}, log loss {last.log_loss:.4f} over 150 samples held out" in out
    assert "best possible on them: AUC 0." in out
    assert f"tables: {last.rows} rows in use, {last.inserted} inserted, {last.evicted} evicted" in out
    assert "256 samples in" in out and "samples/s" in out
    assert "compute ms  keys ahead ms" in out
    assert "tables: C1 to C3 (up to 48 x 4, adagrad" in out
    assert out.rstrip().endswith(f"run folder: {run}")


def test_without_pictures_none_is_drawn(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train("monitor.picture=false", "train.steps=2", "schedule.total_steps=2") == 0
    assert not list((runs.folder / "run").glob("*.png"))
    assert "compute ms  keys ahead ms" in capsys.readouterr().out


def test_the_best_score_is_computed_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures and the last words both show it; it takes a pass over all rows held out."""
    found: list[ClickScore | None] = []
    compute = ClickCorpus.best_on_validation

    def counted(corpus: ClickCorpus, samples: int | None = None) -> ClickScore | None:
        found.append(compute(corpus, samples))
        return found[-1]

    monkeypatch.setattr(ClickCorpus, "best_on_validation", counted)
    assert runs.train("train.steps=2", "data.validation_samples=100") == 0
    assert [score and score.samples for score in found] == [100]


def test_keys_ahead_change_no_number(runs: Runs) -> None:
    for depth in (0, 3):
        folder = runs.folder / f"depth_{depth}"
        assert runs.train(f"tables.prefetch_steps={depth}", f"output_dir={folder}") == 0
    assert compared(runs.rows("depth_0")) == compared(runs.rows("depth_3"))
    assert same_tensors(*(runs.folder / f"depth_{depth}" / "checkpoints" for depth in (0, 3)))


@pytest.mark.parametrize("name", ["logistic_regression", "wide_deep", "deepfm", "dcn"])
def test_every_model_runs_by_its_name(runs: Runs, name: str) -> None:
    assert runs.train("train.steps=2", "schedule.total_steps=2", model={"name": name}) == 0
    assert runs.rows()[-1].auc is not None


def test_the_example_runs(runs: Runs) -> None:
    few = (
        "train.steps=4",
        "train.eval_every=2",
        "schedule.warmup_steps=1",
        "data.synthetic.samples=20000",
        "data.synthetic.validation_samples=500",
    )
    example = Path(__file__).parent.parent.parent / "examples" / "dlrm.yaml"
    assert train(CommandRequest(str(example), (*few, f"output_dir={runs.folder / 'run'}"))) == 0
    last = runs.rows()[-1]
    assert last.auc is not None and last.inserted and last.samples == 4096


def test_the_kept_configuration_starts_the_same_run(runs: Runs) -> None:
    runs.train()
    again = runs.folder / "again"
    assert train(CommandRequest(str(runs.folder / "run" / "config.yaml"), (f"output_dir={again}",))) == 0
    assert compared(runs.rows("again")) == compared(runs.rows())


def test_epochs_end_a_run_in_the_middle_of_a_step(runs: Runs) -> None:
    """70 samples twice, 32 a step: the fifth step has 12 left, in microbatches of 8, 4, 0 and 0."""
    changes = {"train.steps": 100, "data.epochs": 2, "data.synthetic.samples": 70}
    assert runs.train(*(f"{key}={value}" for key, value in changes.items()), schedule={"type": "linear"}) == 0
    rows = runs.rows()
    assert [row.samples for row in rows] == [32, 32, 32, 32, 12]
    assert rows[-1].auc is not None, "the last step evaluates"
    assert rows[-1].lr == pytest.approx(0.01 / 5), "the schedule ends with the epochs"
    assert runs.train(*(f"{key}={value}" for key, value in changes.items()), schedule={"type": "linear"}) == 0
    assert len(runs.rows()) == 5, "a run at its end has nothing left to do"


@pytest.mark.parametrize(
    "train", [{}, {"steps": 100}], ids=["epochs alone", "fewer steps than were asked for"]
)
def test_epochs_that_end_within_the_warm_up_are_refused(runs: Runs, train: dict[str, int]) -> None:
    """How many steps the epochs have is known only when the data is open: 64 samples are 2 steps."""
    schedule = {"type": "linear", "warmup_steps": 2}
    with pytest.raises(ConfigError, match="warmup_steps 2 must be less than total_steps 2"):
        runs.train("data.epochs=1", "data.synthetic.samples=64", train=train, schedule=schedule)


def test_epochs_alone_say_how_long(runs: Runs) -> None:
    assert (
        runs.train("data.epochs=1", "data.synthetic.samples=64", train={}, schedule={"type": "cosine"}) == 0
    )
    assert len(runs.rows()) == 2


def test_a_run_that_no_longer_gets_better_ends_early(runs: Runs) -> None:
    stop = {"steps": 50, "eval_every": 1, "early_stop": {"patience": 2, "min_delta": 0.9}}
    assert runs.train(train=stop, schedule={}) == 0
    assert [row.step for row in runs.rows()] == [1, 2, 3], "the first is the best; two are no better"
    steps = sorted(path.name for path in (runs.folder / "run" / "checkpoints").glob("step_*"))
    assert steps[-1] == "step_00000003"
    assert runs.train(train=stop, schedule={}) == 0
    assert len(runs.rows()) == 3, "it has ended, also for one who starts it again"


class Own(nn.Module):
    """A user's model over the same batches."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        dynamic = [TablePolicy(name=f"C{i}", width=width, dynamic={}) for i in (1, 2, 3)]  # type: ignore[arg-type]
        self.keys = EmbeddingCollection(dynamic)
        self.head = nn.Linear(width, 1)

    def forward(self, dense: Tensor, sparse: dict[str, Ragged], labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.keys.stacked(sparse).sum(1))[:, 0] + dense.sum(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return {"loss": loss / max(len(labels), 1), "logits": logits}


def test_a_model_of_the_users_own(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "their_module", sys.modules[__name__])
    data = content_of(runs.folder)["data"] | {"kind": "clicks"}
    assert runs.train(model={"target": "their_module:Own", "width": 6}, data=data, tables={}) == 0
    last = runs.rows()[-1]
    assert last.auc is not None and last.rows and last.evicted == 0


@pytest.mark.parametrize("kind", ["made", "real"])
def test_criteo_rows_by_path(runs: Runs, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """The same file of settings as for synthetic clicks: the path alone differs."""
    path = criteo_file(kind, runs.folder)
    assert runs.train(f"data.source={path}") == 0
    assert runs.rows()[-1].auc is not None
    out = capsys.readouterr().out
    assert "C1 to C26" in out and "best possible" not in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "dlmr"}}, "there is no model 'dlmr'; did you mean 'dlrm'"),
        ({"model": {"name": "dlrm", "botom": [8]}}, "model: unknown key 'botom'; did you mean 'bottom'"),
        ({"data": {"sorce": "x"}}, "data: unknown key 'sorce'; did you mean 'source'"),
        ({"data": {"kind": "text"}}, "a click-through model reads clicks"),
        ({"model": {"name": "gpt"}, "data": {"kind": "clicks"}, "tables": {}}, "which reads text"),
        ({"tables": {"named": {"C9": {"rows": 3}}}}, "the data has no feature 'C9'"),
        ({"tables": {"defualts": {}}}, "unknown key 'defualts'; did you mean 'defaults'"),
        ({"model": {"target": "m:f"}, "data": {"kind": "clicks"}}, "a model of your own says in its code"),
        ({"train": {"early_stop": {"patienc": 3}}}, "unknown key 'patienc'; did you mean 'patience'"),
    ],
    ids=str,
)
def test_what_is_refused(runs: Runs, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.train(**changes)


def test_a_folder_of_another_kind_of_run_is_refused(runs: Runs) -> None:
    runs.train()
    path = runs.folder / "run" / "metrics.csv"
    header = ",".join(metrics.StepRecord._fields)
    path.write_text(f"{header}\n1,2.0{',' * (header.count(',') - 1)}\n")
    with pytest.raises(metrics.DataError, match="choose another folder"):
        runs.train()


# The same on more ranks, and again -----------------------------------------------------------------------------------


def trained(world: World, config: str, goes_on: bool = False) -> list[list[float | None]]:
    """What a rank's records say, samples of all ranks included."""
    resolved = resolve(load(config), world.size, world.device.type)
    trainer = ClickTrainer(world, resolved, RunFolder(Path(resolved.config.output_dir)))
    if goes_on:
        trainer.go_on_from(trainer.folder.checkpoints)
    kept: list[ClickRecord] = []

    class Kept:
        def write(self, record: ClickRecord) -> None:
            kept.append(record)

        def close(self) -> None: ...

    assert trainer.run(Kept())  # type: ignore[arg-type]
    trainer.engine.wait_for_save()
    trainer.close()
    trainer.engine.close()
    return compared(kept)


def test_two_ranks_train_and_evaluate_as_one_does(runs: Runs, ranks: Ranks) -> None:
    """A full table evicts the same rows on any ranks, wherever it lies: a feature for each placement."""
    data = {"samples": 90, "validation_samples": 70, "tables": 4, "rows": 40, "dense": 2}
    dynamic = {"capacity": 24, "eviction": {"type": "lfu"}}
    placement = dict(zip(("C1", "C2", "C3", "C4"), PLACEMENTS, strict=True))
    changes = {
        "data": {"synthetic": data | {"keys": "hashed", "fresh": 0.2}, "epochs": 2},
        "tables": {
            "defaults": {"dynamic": dynamic},
            "placement": placement,
            "optimizer": {"type": "adagrad", "lr": 0.1},
        },
    }
    runs.config(**changes, output_dir=str(runs.folder / "one"))
    alone = trained(World(0, 1), str(runs.folder / "config.yaml"))
    assert [row[SAMPLES] for row in alone] == [32] * 5 + [20], "the last step leaves the second rank less"
    rows, _, evicted = alone[-1][ROWS:]
    assert rows and evicted and rows <= 4 * 24, "each table was full"
    runs.config(**changes, output_dir=str(runs.folder / "two"), mesh={"dp": 2}, zero={"stage": 2})
    for records in ranks(2).run(trained, str(runs.folder / "config.yaml")):
        for got, expected in zip(records, alone, strict=True):
            assert got[SAMPLES:] == expected[SAMPLES:]
            numbers = [value or 0.0 for value in expected]
            assert [value or 0.0 for value in got] == pytest.approx(numbers, rel=2e-6)


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(runs: Runs) -> None:
    undisturbed, resumed = f"output_dir={runs.folder / 'a'}", f"output_dir={runs.folder / 'b'}"
    runs.train(undisturbed)
    runs.train(resumed, "train.steps=6")
    runs.train(resumed)
    # The evaluation at the end of the first life is the only trace of the interruption.
    blank = {"log_loss": None, "auc": None, "rows": None, "inserted": None, "evicted": None}
    rows = [row if row.step != 6 else row._replace(**blank) for row in runs.rows("b")]  # type: ignore[arg-type]
    assert compared(rows) == compared(runs.rows("a"))
    a, b = (runs.folder / name / "checkpoints" / "step_00000008" for name in "ab")
    assert same_tensors(a, b)


def test_a_killed_run_loses_nothing_that_was_committed(runs: Runs, ranks: Ranks) -> None:
    """Two ranks, kill -9 in the middle; what goes on from the newest checkpoint ends in the same bits."""

    def config(name: str, steps: int) -> Path:
        train = {"steps": steps, "eval_every": 0}
        changes = {
            "mesh": {"dp": 2},
            "train": train,
            "schedule": {},
            "checkpoint": {"every": 3, "keep_last": None},
        }
        return runs.config(**changes, output_dir=str(runs.folder / name))

    command = [
        sys.executable,
        "-m",
        "shardwise.cli.main",
        "train",
        str(config("killed", 10**6)),
        "--ranks",
        "2",
    ]
    pipe = subprocess.PIPE
    job = subprocess.Popen(
        command,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    steps = runs.folder / "killed" / "checkpoints"
    end = time.monotonic() + 100
    while not (steps / "step_00000006" / "manifest.json").exists():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < end, "no checkpoint came"
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=60)
    newest = max(int(each.parent.name[-8:]) for each in steps.glob("step_*/manifest.json"))
    last = newest + 4
    calm = ranks(2).run(trained, str(config("calm", last)))[0]
    resumed = ranks(2).run(trained, str(config("killed", last)), True)[0]
    assert resumed == calm[newest:], "the steps after the newest checkpoint, to the bit"
    name = f"step_{last:08d}"
    assert same_tensors(steps / name, runs.folder / "calm" / "checkpoints" / name)


def test_tables_that_lie_alike_are_one_line() -> None:
    tables = [TablePolicy(name=f"C{i}", width=4, rows=100 if i < 3 else 9) for i in range(4)]
    choices = plan_tables(tables, RowOptimizerPolicy(type="sgd"), 1, 8, torch.float32)
    assert [line.split(":")[0] for line in described(choices)] == [
        "C0 to C2 (100 x 4, sgd, 1.6 KiB)",
        "C3 (9 x 4, sgd, 144 B)",
    ]


def test_a_model_without_logits_is_told_so() -> None:
    from shardwise.cli.click_trainer import logits_in

    with pytest.raises(UsageError, match="one logit for each sample"):
        logits_in({"loss": torch.zeros(())})


# From the weights of another run -------------------------------------------------------------------------------------


def test_a_model_with_a_feature_more_begins_with_yesterdays_weights_and_the_best_step_is_kept(
    runs: Runs,
) -> None:
    every = {"every": 1, "keep_last": 1, "keep_best": True}
    assert runs.train("train.eval_every=1", "train.steps=5", checkpoint=every) == 0
    yesterday = runs.folder / "run"
    best = max(runs.rows(), key=lambda row: row.auc or 0.0).step
    kept = sorted(path.name for path in (yesterday / "checkpoints").glob("step_*"))
    assert kept == [f"step_{best:08d}", "step_00000005"], "and with another last step it would show nothing"
    today = content_of(runs.folder)["data"]
    today["synthetic"]["tables"] = 4
    overrides = (
        "output_dir=" + str(runs.folder / "today"),
        "train.steps=2",
        "optimizer.lr=1e-20",
        "schedule.type=constant",
    )
    with pytest.raises(
        MismatchError, match=r"'top.0.weight' is .*'tables.C4' is not in the checkpoint.*missing="
    ):
        runs.train(*overrides, data=today, init_from=str(yesterday))
    start = {"path": str(yesterday), "missing": ["top.0.weight", "*.C4"]}
    assert runs.train(*overrides, data=today, init_from=start) == 0
    assert [row.step for row in runs.rows("today")] == [1, 2]
    before = load_file(yesterday / "checkpoints/step_00000005/model/model.safetensors")
    after = load_file(runs.folder / "today/checkpoints/step_00000002/model/model.safetensors")
    differ = {
        name
        for name in before
        if before[name].shape != after[name].shape or not before[name].allclose(after[name], atol=1e-12)
    }
    assert differ == {"top.0.weight"} and before.keys() == after.keys()
    log = (runs.folder / "today/logs/rank_00000.log").read_text()
    assert "top.0.weight (is (8, 10) in the checkpoint and (8, 14) in this model), tables.C4" in log
    yesterday.rename(runs.folder / "gone")
    assert runs.train(*overrides, "train.steps=3", data=today, init_from=start) == 0, "it goes on without it"
