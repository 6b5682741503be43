"""``shardwise inspect``: the steps of a run, the tensors of a step, and what is damaged."""

from pathlib import Path

import pytest
from tests.cli.trained_run import call, damaged


def test_inspect_lists_the_steps_of_a_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, "inspect", str(run))
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [(line[0], line[-1]) for line in lines[1:]] == [("4", "whole"), ("2", "whole")]


def test_inspect_shows_one_step_with_its_tensors(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = str(run / "checkpoints" / "step_00000004")
    code, out, _ = call(monkeypatch, capsys, "inspect", step, "--tensors")
    assert code == 0
    assert out.startswith(f"{step}: whole\n") and "ZeRO-0" in out
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert any(line.startswith(kind) and line.endswith("embed.weight") for line in out.splitlines()), kind
    assert "embed.weight" not in call(monkeypatch, capsys, "inspect", step)[1]


def test_inspect_names_the_damaged_file_and_tensor(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = str(damaged(run, tmp_path))
    code, out, _ = call(monkeypatch, capsys, "inspect", step)
    assert code == 1
    assert out.startswith(f"{step}: damaged\n") and "model/model.safetensors (tensor weight" in out
    code, out, _ = call(monkeypatch, capsys, "inspect", step, "--no-verify")
    assert code == 0 and "opens, not verified" in out
