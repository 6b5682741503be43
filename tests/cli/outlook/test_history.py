"""The history holds what was foreseen and measured of each start of a run, the newest last, bounded in number."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.cli.outlook import history
from shardwise.cli.outlook.history import RunHistory, keep
from shardwise.cli.outlook.outcome import RunOutcome, outcome_of
from shardwise.cli.rank import train
from shardwise.cli.request import CommandRequest
from shardwise.config.run import RunConfig

CONFIG = RunConfig.parse(
    {"model": {"name": "gpt", "layers": 2}, "batch": {"global_size": 4}, "zero": {"stage": 3}}
)


def outcome(step_s: float = 2.0, foreseen_s: float | None = 1.0) -> RunOutcome:
    forecast = (
        None if foreseen_s is None else {"step_s": foreseen_s, "peak_bytes": 90, "rows": {}, "lanes": {}}
    )
    phases = [{"compute": step_s}]
    return outcome_of(
        ranks=2, device="cpu", forecast=forecast, held={}, peak_bytes=100, phases=phases, steps=3
    )


def begun(number: int) -> str:
    return f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z"


def test_a_start_of_a_run_has_one_entry_which_later_writes_replace(tmp_path: Path) -> None:
    keep(tmp_path / "run", CONFIG, outcome(4.0), begun(1), tmp_path / "kept")
    keep(tmp_path / "run", CONFIG, outcome(2.0), begun(1), tmp_path / "kept")
    keep(tmp_path / "run", CONFIG, outcome(3.0, None), begun(2), tmp_path / "kept")
    found = RunHistory.read(tmp_path / "kept")
    assert [run.step_s.actual for run in found.runs] == [2.0, 3.0]
    first = found.runs[0]
    assert first.step_s.foreseen == 1.0 and first.peak_bytes.foreseen == 90 and first.peak_bytes.actual == 100
    assert first.run == str(tmp_path / "run") and first.config["zero"] == {"stage": 3}
    assert RunConfig.parse(first.config).zero.stage == 3, "an entry says how to run it again"


def test_the_table_says_how_well_runs_were_foreseen(tmp_path: Path) -> None:
    keep(tmp_path / "run", CONFIG, outcome(2.0), begun(1), tmp_path / "kept")
    keep(tmp_path / "other", CONFIG, outcome(1.0), begun(2), tmp_path / "kept")
    keep(tmp_path / "third", CONFIG, outcome(1.0, None), begun(3), tmp_path / "kept")
    lines = RunHistory.read(tmp_path / "kept").lines()
    assert "0.50" in lines[1] and "gpt" in lines[1] and str(tmp_path / "run") in lines[1]
    assert " - " in lines[3], "nothing was foreseen of the third"
    assert lines[4].startswith("step: foreseen at 0.75") and "2 runs, 0.50 to 1.00" in lines[4]
    assert lines[5].startswith("peak: foreseen at 0.90")


def test_only_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST", 3)
    for number in range(5):
        keep(tmp_path / "run", CONFIG, outcome(number + 1.0), begun(number), tmp_path / "kept")
    assert [run.step_s.actual for run in RunHistory.read(tmp_path / "kept").runs] == [3.0, 4.0, 5.0]


def test_a_damaged_entry_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    keep(tmp_path / "run", CONFIG, outcome(), begun(1), tmp_path / "kept")
    (tmp_path / "kept" / "0.json").write_text('{"time": 3}')
    found = RunHistory.read(tmp_path / "kept")
    assert len(found.runs) == 1 and len(found.unreadable) == 1
    assert found.lines()[-1].startswith(str(tmp_path / "kept" / "0.json"))


def test_runs_in_the_folder_of_temporary_files_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "history_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    keep(tmp_path / "temporary" / "run", CONFIG, outcome(), begun(1))
    assert not RunHistory.read().runs and "no run" in RunHistory.read().lines()[0]
    keep(tmp_path / "run", CONFIG, outcome(), begun(1))
    assert len(RunHistory.read().runs) == 1


def test_a_run_enters_the_history_that_plan_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(history, "history_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "text.txt").write_text("abc " * 500)
    config = {
        "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
        "data": {"source": str(tmp_path / "text.txt"), "validation_samples": 4},
        "batch": {"global_size": 4},
        "train": {"steps": 4, "sample_tokens": 0},
        "monitor": {"tensorboard": False, "picture": False},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert train(CommandRequest(str(tmp_path / "config.json"))) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["shardwise", "plan", "--history", "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["run"] == str(tmp_path / "run") and run["step_s"]["foreseen"] and run["step_s"]["actual"]
    assert run["peak_bytes"]["foreseen"] and run["peak_bytes"]["actual"]
