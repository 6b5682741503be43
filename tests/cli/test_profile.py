"""A trace of some steps, after those that allocate and compile."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from shardwise.base.errors import UsageError
from shardwise.cli import profile as module
from shardwise.cli.main import app
from shardwise.cli.profile import (
    ProfileRequest,
    StepProfile,
    StepWindow,
    activities_of,
    check_snapshot,
    device_type_of,
    step_windows,
)


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


def test_the_activities_are_those_of_the_device() -> None:
    found = {kind: activities_of(torch.device(kind)) for kind in ("cpu", "cuda", "xpu", "meta")}
    both = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    for kind, activities in found.items():
        assert activities == [ProfilerActivity.CPU, *([both[kind]] if kind in both else [])]


def test_names_are_installed_while_the_profiler_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Told(Recorder):
        def start(self) -> None:
            said.append("start")

        def stop(self) -> None:
            said.append("stop")

    @contextlib.contextmanager
    def names() -> Iterator[None]:
        said.append("names")
        yield
        said.append("no names")

    monkeypatch.setattr(module, "profile", Told)
    walk([StepProfile(tmp_path / "trace.json", 1, torch.device("cpu"), names)], 4, said)
    assert said == ["step 0", "step 1", "start", "names", "step 2", "no names", "stop", "step 3"]


def walk(windows: Sequence[StepWindow], steps: int, said: list[str]) -> None:
    for step in range(steps):
        for window in windows:
            window.before_step()
        said.append(f"step {step}")
        for window in windows:
            window.after_step()
    for window in windows:
        window.close()


@pytest.mark.parametrize(("profiled", "first", "last"), [(0, 0, 2), (2, 2, 3)])
def test_a_memory_snapshot_covers_the_profiled_or_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiled: int, first: int, last: int
) -> None:
    said = remember_memory_calls(monkeypatch)
    monkeypatch.setattr(module, "profile", Recorder)
    request = ProfileRequest(profiled, str(tmp_path / "new" / "memory.pickle"))
    windows = step_windows(request, tmp_path / "profile", 7, torch.device("cuda"), contextlib.nullcontext)
    walk(windows, 5, said)
    steps = [f"step {step}" for step in range(5)]
    begin, end = ["record all"], ["dump memory_rank_00007.pickle", "record None"]
    assert said == [*steps[:first], *begin, *steps[first : last + 1], *end, *steps[last + 1 :]]
    assert (tmp_path / "new").is_dir() and (tmp_path / "profile").exists() == bool(profiled)


def test_a_memory_snapshot_of_a_run_that_fails_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = remember_memory_calls(monkeypatch)
    request = ProfileRequest(memory_snapshot=str(tmp_path / "memory"))
    (window,) = step_windows(request, tmp_path, 0, torch.device("cuda"), contextlib.nullcontext)
    window.before_step()
    window.close()
    window.close()
    assert said == ["record all", "dump memory_rank_00000.pickle", "record None"]


def remember_memory_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's recorder of allocations by one that lists its calls."""
    said: list[str] = []

    def record(enabled: str | None = "all", **options: Any) -> None:
        said.append(f"record {enabled}")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: said.append(f"dump {Path(path).name}")
    )
    return said


def test_a_memory_snapshot_is_refused_where_there_is_no_cuda() -> None:
    check_snapshot(None, "cpu")
    check_snapshot("memory.pickle", device_type_of("cuda:1"))
    for wanted in ("cpu", "xpu:0"):
        with pytest.raises(UsageError, match="--memory-snapshot memory.pickle.*--check --memory"):
            check_snapshot("memory.pickle", device_type_of(wanted))
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert device_type_of("auto") == ("cpu" if found is None else found.type)


@pytest.mark.parametrize("more", [["--ranks", "2", "--set", "comm.device=cpu"], ["--check"]])
def test_the_command_refuses_a_memory_snapshot_before_ranks_start(tmp_path: Path, more: list[str]) -> None:
    out = f"output_dir={tmp_path / 'run'}"
    with pytest.raises(UsageError, match="--memory-snapshot"):
        app(
            ["train", "gpt_stdlib", "--memory-snapshot", "m.pickle", "--set", out, *more],
            standalone_mode=False,
        )
    assert not (tmp_path / "run").exists()
