"""What the tests of trained models do with a run."""

import shutil
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import main


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def damaged(run: Path, tmp_path: Path) -> Path:
    """A copy of the newest step with one bit of a weight flipped."""
    step = tmp_path / "step_00000004"
    shutil.copytree(run / "checkpoints" / "step_00000004", step)
    file = step / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return step
