"""A trace of some steps, after those that allocate and compile."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli import profile as module
from shardwise.cli.profile import StepProfile


class Recorder:
    """A profiler that writes the steps between its start and its stop."""

    now = 0

    def __init__(self, **options: Any) -> None:
        self.first = self.last = -1
        self.activities = options["activities"]

    def start(self) -> None:
        self.first = Recorder.now

    def stop(self) -> None:
        self.last = Recorder.now

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(f"{self.first} to {self.last} on {len(self.activities)}")


def traced(path: Path, steps: int, ran: int, device: str = "cpu") -> str:
    """The steps in the trace; empty if there is none."""
    profile = StepProfile(path, steps, torch.device(device))
    for Recorder.now in range(ran):
        profile.before_step()
        profile.after_step()
    profile.close()
    return path.read_text() if path.exists() else ""


def test_steps_behind_the_warm_up_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "profile", Recorder)
    assert traced(tmp_path / "folder" / "trace.json", 2, 6) == "2 to 3 on 1"
    assert traced(tmp_path / "one.json", 1, 6, "cuda") == "2 to 2 on 2"


def test_a_run_that_ends_early_writes_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "profile", Recorder)
    assert traced(tmp_path / "trace.json", 5, 3) == "2 to 2 on 1"
    assert traced(tmp_path / "none.json", 0, 4) == "" and traced(tmp_path / "short.json", 3, 2) == ""
