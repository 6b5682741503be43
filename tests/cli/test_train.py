"""Runs from start to end: on one rank in this process, and on two as a user starts them."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from shardwise.base.errors import CheckpointError, ConfigError, MismatchError, ShardwiseError, UsageError
from shardwise.base.words import printable
from shardwise.checkpoint.files import FileSystem
from shardwise.cli.check import check
from shardwise.cli.rank import train
from shardwise.cli.request import CommandRequest
from shardwise.comm.world import World
from shardwise.observe import metrics
from shardwise.observe.metrics import StepRecord

COMPARED = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens", "flops", "pf_days")


class Runs:
    """Writes configurations and trains by them; every run reads the same little text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(400)))

    def config(self, **changes: Any) -> Path:
        content: dict[str, Any] = {
            "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
            "data": {"source": str(self.folder / "text.txt"), "validation_samples": 4},
            "batch": {"global_size": 4, "micro_size": 2},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 6, "eval_every": 3, "sample_tokens": 8},
            "checkpoint": {"every": 2, "keep_last": None},
            "monitor": {"picture": False},
            "output_dir": str(self.folder / "run"),
        }
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return path

    def train(
        self,
        *overrides: str,
        resume: str = "auto",
        profile_steps: int = 0,
        memory_snapshot: str | None = None,
        **changes: Any,
    ) -> int:
        path = str(self.config(**changes))
        return train(CommandRequest(path, overrides, resume, profile_steps, memory_snapshot=memory_snapshot))

    def rows(self, name: str = "run") -> list[StepRecord]:
        return metrics.read(self.folder / name / "metrics.csv")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def compared(rows: list[StepRecord]) -> list[list[float | None]]:
    return [[getattr(row, name) for name in COMPARED] for row in rows]


def test_a_run_leaves_everything_in_its_folder(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train(profile_steps=2, monitor={}) == 0
    run = runs.folder / "run"
    rows = runs.rows()
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.val_loss is not None for row in rows] == [False, False, True, False, False, True]
    assert all(row.tokens == 4 * 16 and row.lr == 1e-3 and row.memory for row in rows)
    assert rows[-1].pf_days == pytest.approx(sum(row.flops or 0 for row in rows) / 8.64e19)
    assert all(row.mfu and row.mfu > 0 for row in rows), "of a product that was measured, on a processor"
    assert abs(rows[0].loss - math.log(256)) < 0.2
    steps = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert steps == ["step_00000002", "step_00000004", "step_00000006"]
    for name in ("loss.png", "step.png", "config.yaml", "logs/rank_00000.log", "sample.txt", "tensorboard"):
        assert (run / name).exists(), name
    assert json.loads((run / "profile" / "rank_00000.json").read_text())["traceEvents"]
    out = capsys.readouterr().out
    assert "step 6/6" in out and f"validation loss {rows[-1].val_loss:.4f}" in out
    assert out.rstrip().endswith(f"run folder: {run}")
    sample = (run / "sample.txt").read_text()
    assert sample and printable(sample) in out


def test_a_profile_names_the_actions_and_changes_no_number(runs: Runs) -> None:
    few = {"train": {"steps": 4, "sample_tokens": 0}, "zero": {"stage": 3}, "module_profile": {"step": 3}}
    assert runs.train(f"output_dir={runs.folder / 'plain'}", **few) == 0
    assert runs.train(profile_steps=1, **few) == 0
    assert [(row.loss, row.grad_norm) for row in runs.rows()] == [
        (row.loss, row.grad_norm) for row in runs.rows("plain")
    ]
    trace = json.loads((runs.folder / "run" / "profile" / "rank_00000.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    for name in (
        "F(0,0)",
        "B(0,1)",
        "F(u2,1) Unit 2 'blocks.0'",
        "REDUCE(u2,1) Unit 2 'blocks.0'",
        "STEP(u2) Unit 2 'blocks.0'",
        "NORM",
    ):
        assert name in names, name


def test_a_memory_snapshot_is_refused_on_a_processor_before_anything_is_made(runs: Runs) -> None:
    with pytest.raises(
        UsageError, match=r"--memory-snapshot memory.pickle .* computes on 'cpu'; leave it out"
    ):
        runs.train(memory_snapshot="memory.pickle", comm={"device": "cpu"})
    assert not (runs.folder / "run").exists()


def test_a_run_writes_the_gradient_norm_of_every_unit(runs: Runs) -> None:
    assert runs.train(monitor={"unit_norms": True}, train={"steps": 3}) == 0
    header, *rows = (runs.folder / "run" / "unit_norms.csv").read_text().splitlines()
    assert header == "step,(root),embed,blocks.0,head" and len(rows) == 3
    for row, record in zip(rows, runs.rows(), strict=True):
        step, *norms = row.split(",")
        assert int(step) == record.step
        assert math.hypot(*map(float, norms)) == pytest.approx(record.grad_norm, rel=1e-6)


def test_the_kept_configuration_starts_the_same_run(runs: Runs) -> None:
    runs.train()
    kept = runs.folder / "run" / "config.yaml"
    again = runs.folder / "again"
    assert train(CommandRequest(str(kept), (f"output_dir={again}",))) == 0
    assert compared(runs.rows("again")) == compared(runs.rows())


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(runs: Runs) -> None:
    undisturbed, resumed = f"output_dir={runs.folder / 'a'}", f"output_dir={runs.folder / 'b'}"
    runs.train(undisturbed)
    runs.train(resumed, "train.steps=4", "schedule.total_steps=6")
    metrics = runs.folder / "b" / "metrics.csv"
    commas = metrics.read_text().splitlines()[0].count(",")
    with metrics.open("a") as file:
        file.write("5,99.0" + "," * (commas - 1) + "\n")  # a step whose checkpoint the kill prevented
    runs.train(resumed, "schedule.total_steps=6")
    # The evaluation at the end of the first life is the only trace of the interruption.
    rows = [row if row.step != 4 else row._replace(val_loss=None) for row in runs.rows("b")]
    assert compared(rows) == compared(runs.rows("a"))
    a, b = (runs.folder / name / "checkpoints" / "step_00000006" for name in "ab")
    for part in ("model/model.safetensors", "state/exp_avg.safetensors"):
        left, right = load_file(a / part), load_file(b / part)
        assert all(torch.equal(left[name], right[name]) for name in left | right)


def test_a_finished_run_is_not_trained_further(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.train()
    manifest = runs.folder / "run" / "checkpoints" / "step_00000006" / "manifest.json"
    before = (runs.rows(), manifest.stat().st_mtime_ns)
    assert runs.train() == 0
    assert (runs.rows(), manifest.stat().st_mtime_ns) == before, "nothing is saved twice"
    assert "validation loss" in capsys.readouterr().out


def test_a_run_goes_on_in_another_folder(runs: Runs) -> None:
    runs.train("train.steps=4", "schedule.total_steps=6")
    new = runs.folder / "new"
    assert runs.train(f"output_dir={new}", resume=str(runs.folder / "run")) == 0
    assert [row.step for row in runs.rows("new")] == [5, 6]
    assert sorted(path.name for path in (new / "checkpoints").glob("step_*")) == ["step_00000006"]


def test_never_refuses_and_leaves_the_folder_as_it_was(runs: Runs) -> None:
    runs.train()
    before = (runs.folder / "run" / "config.yaml").read_text()
    with pytest.raises(UsageError, match="--resume never"):
        runs.train("optimizer.lr=5", resume="never")
    assert (runs.folder / "run" / "config.yaml").read_text() == before


def test_another_model_is_refused_and_leaves_the_folder_as_it_was(runs: Runs) -> None:
    runs.train()
    before = ((runs.folder / "run" / "config.yaml").read_text(), runs.rows())
    with pytest.raises(MismatchError, match="checkpoint of another model"):
        runs.train("model.width=32")
    assert ((runs.folder / "run" / "config.yaml").read_text(), runs.rows()) == before


def checked(runs: Runs, *overrides: str, **changes: Any) -> list[str]:
    """Return the lines of ``--check``."""
    return check(CommandRequest(str(runs.config(**changes)), overrides)).lines()


def test_a_check_compares_with_the_step_that_would_be_resumed(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.train()
    assert any(line.endswith("checkpoints, step 6") for line in checked(runs))
    assert "step 6 is at or beyond train.steps 6: nothing to train" in "\n".join(checked(runs))
    width = "model.width=32"
    for refuse in (lambda: checked(runs, width), lambda: runs.train(width)):
        with pytest.raises(MismatchError, match=r"is \(16, .* --set init_from.path=") as refused:
            refuse()
        assert "with missing=[" not in str(refused.value) and "--set output_dir=" in str(refused.value)
    momentum = ("optimizer.type=sgd", "optimizer.momentum=0.9")
    for refuse in (lambda: checked(runs, *momentum), lambda: runs.train(*momentum)):
        with pytest.raises(MismatchError, match="this optimizer keeps momentum_buffer. .*--set output_dir="):
            refuse()
    said = "\n".join(checked(runs, "optimizer.type=sgd", "train.steps=8"))
    assert "since the last start of this run: optimizer.type: adamw -> sgd" in said
    dropped = "step 6 holds the optimizer state exp_avg, exp_avg_sq; this optimizer keeps none: it is dropped"
    assert dropped in said
    capsys.readouterr()
    assert runs.train("optimizer.type=sgd", "train.steps=8") == 0
    assert dropped in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_resumed_at_its_end_says_so(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.train()
    capsys.readouterr()
    assert runs.train("train.steps=4") == 0
    assert "step 6 is at or beyond train.steps 4: nothing to train" in " ".join(
        capsys.readouterr().out.split()
    )


def test_keys_beyond_the_steps_of_a_run_are_told_at_its_start(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"steps": 6, "eval_every": 500, "early_stop": {"patience": 3}, "sample_tokens": 0}
    expected = [
        "train.eval_every is 500 and the run has 6 steps: it evaluates once, after the last one",
        "checkpoint.every is 1000 and the run has 6 steps: it saves once, after the last one",
        "train.early_stop waits for 3 evaluations that are no better, after the first, and the run has 6 steps with "
        "1 evaluation: it cannot act; lower train.eval_every",
    ]
    assert set(expected) <= set(checked(runs, train=train, checkpoint={"every": 1000}))
    assert runs.train("train.steps=1", train=train, checkpoint={"every": 1000}) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(line.replace("6 steps", "1 step") in said for line in expected)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_and_says_how_to_go_on(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    write = metrics.MetricsFile.write

    def write_and_signal(self: metrics.MetricsFile, record: StepRecord) -> None:
        write(self, record)
        if record.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(metrics.MetricsFile, "write", write_and_signal)
    assert runs.train("checkpoint.every=null") == code
    assert [row.step for row in runs.rows()] == [1, 2, 3, 4], (
        "it comes between two steps; the next one tells all"
    )
    assert (runs.folder / "run" / "checkpoints" / "step_00000004" / "manifest.json").exists()
    out = capsys.readouterr().out
    assert "stopped after step 4, which is saved" in out and "shardwise train" in out
    monkeypatch.undo()
    assert runs.train() == 0
    assert [row.step for row in runs.rows()] == [1, 2, 3, 4, 5, 6]


class Line(nn.Module):
    """A user's model: returns its loss."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.line = nn.Linear(size, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.line(x)[:, 0] - y) ** 2).mean()


def points(count: int = 64) -> list[dict[str, torch.Tensor]]:
    """A user's dataset."""
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "y": row.sum()} for row in x]


def test_a_model_and_data_of_the_users_own(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "their_module", sys.modules[__name__])
    code = runs.train(
        "optimizer.lr=0.1",
        "train.steps=20",
        model={"target": "their_module:Line"},
        data={"target": "their_module:points", "arguments": {"count": 32}},
    )
    assert code == 0
    rows = runs.rows()
    assert rows[-1].loss < 0.5 * rows[0].loss
    assert rows[0].tokens is None, "nobody told what a token of theirs is"
    # Forward and by the weight: 4 samples x 3 x 1, two operations each; the inputs want no gradient.
    assert [row.flops for row in rows] == [2 * 2 * 4 * 3] * 20
    assert not (runs.folder / "run" / "sample.txt").exists()


def test_text_for_a_model_that_does_not_say_its_context(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "their_module", sys.modules[__name__])
    with pytest.raises(ConfigError, match=r"samples of model\.context tokens"):
        runs.train(model={"target": "their_module:Line"})


def stopped(world: World, folder: str, other: int) -> int:
    """The signal reaches rank 1 alone, which is the process ``other``, after step 3."""
    write = metrics.MetricsFile.write
    runs = Runs(Path(folder))

    def write_and_signal(self: metrics.MetricsFile, record: StepRecord) -> None:
        write(self, record)
        if record.step == 3:
            os.kill(other, signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics.MetricsFile, "write", write_and_signal)
        return runs.train("zero.stage=3", "train.steps=100", "train.eval_every=0")


def test_two_ranks_stop_together_and_one_goes_on(runs: Runs, ranks: Any) -> None:
    pool = ranks(2)
    assert pool.run(stopped, str(runs.folder), pool.pids[1]) == [0, 0]
    last = runs.rows()[-1].step
    assert 3 < last < 100
    assert runs.train(f"train.steps={last + 2}", "train.eval_every=0") == 0
    assert [row.step for row in runs.rows()] == list(range(1, last + 3))


# As a user starts it -----------------------------------------------------------------------------------------------


def command(runs: Runs, *more: str) -> list[str]:
    return [sys.executable, "-m", "shardwise.cli.main", "train", str(runs.config()), "--ranks", "2", *more]


def wait_for_rows(runs: Runs, count: int, job: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 120
    while not (runs.folder / "run" / "metrics.csv").exists() or len(runs.rows()) < count:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < end, "training did not begin"
        time.sleep(0.02)


@pytest.mark.soak
def test_two_ranks_stop_on_ctrl_c_and_one_goes_on(runs: Runs) -> None:
    endless = ["--set", "train.steps=1000000", "--set", "zero.stage=3", "--set", "train.eval_every=0"]
    pipe = subprocess.PIPE
    job = subprocess.Popen(command(runs, *endless), stdout=pipe, stderr=pipe, text=True)
    wait_for_rows(runs, 3, job)
    job.send_signal(signal.SIGINT)
    out, error = job.communicate(timeout=120)
    assert job.returncode == 0, error
    last = runs.rows()[-1].step
    assert f"stopped after step {last}, which is saved" in out
    assert f"--ranks 2 --set train.steps={10**6}" in out
    logs = runs.folder / "run" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["rank_00000.log", "rank_00001.log"]
    stamped = [
        line for line in (logs / "rank_00000.log").read_text().splitlines() if line.endswith(" mesh dp=2")
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} rank 0 INFO mesh dp=2", *stamped), (
        "as on one rank"
    )
    assert runs.train(f"train.steps={last + 2}", "train.eval_every=0") == 0
    assert [row.step for row in runs.rows()] == list(range(1, last + 3))


def test_a_missing_text_is_named(runs: Runs) -> None:
    with pytest.raises(ShardwiseError, match="/no/such/file"):
        runs.train("data.source=/no/such/file")


@pytest.mark.soak
def test_a_missing_text_is_one_line_from_two_ranks(runs: Runs) -> None:
    done = subprocess.run(
        command(runs, "--set", "data.source=/no/such/file"), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "/no/such/file" in line


class FullDisk:
    """``FileSystem.free_bytes`` of a disk that is full during some saves, by number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *full: int) -> None:
        self.saves, self.full = 0, full
        real = FileSystem.free_bytes

        def free_bytes(files: FileSystem, path: Path) -> int:
            self.saves += 1
            return 0 if self.saves in self.full else real(files, path)

        monkeypatch.setattr(FileSystem, "free_bytes", free_bytes)


def steps_saved(runs: Runs) -> list[int]:
    return sorted(int(path.name[5:]) for path in (runs.folder / "run" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("asynchronous", [True, False], ids=["behind", "in front"])
def test_a_full_disk_in_between_does_not_end_the_run(
    runs: Runs, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FullDisk(monkeypatch, 1, 2)
    assert runs.train(f"checkpoint.asynchronous={str(asynchronous).lower()}") == 0
    assert steps_saved(runs) == [6] and len(runs.rows()) == 6
    assert capsys.readouterr().out.count("training continues and the next save tries again") == 2


@pytest.mark.parametrize("asynchronous", [True, False], ids=["behind", "in front"])
def test_the_last_save_of_a_run_is_tried_twice_and_must_succeed(
    runs: Runs, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = f"checkpoint.asynchronous={str(asynchronous).lower()}"
    FullDisk(monkeypatch, 3)
    assert runs.train(override, output_dir=str(runs.folder / "run")) == 0
    assert steps_saved(runs) == [2, 4, 6]
    FullDisk(monkeypatch, 1, 2, 3)
    with pytest.raises(CheckpointError, match="step 8 was not saved"):
        runs.train(override, "train.steps=8", "checkpoint.every=8")
    assert steps_saved(runs) == [2, 4, 6]


def test_too_many_failed_saves_in_a_row_end_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    FullDisk(monkeypatch, 1, 2)
    with pytest.raises(CheckpointError, match="step 4 was not saved"):
        runs.train("checkpoint.tolerate_failures=1")
    assert [row.step for row in runs.rows()] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]  # step 6 is where the third would have been
