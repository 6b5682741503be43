"""``make gpu`` up to the device: the page says what was measured, and the tests that need a real one."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shardwise
from shardwise.memory.device_clock import clock_of
from shardwise.models.generate import generate
from shardwise.observe.memory import taken
from tests.accelerator import budget

RUN = Path(__file__).parents[2] / "benchmarks" / "accelerator" / "run.py"
WHERE = {"machine": "8 cores", "commit": "abc", "versions": {"torch": "2"}, "date": "today"}
FOUND = {
    "ranks": 2, "step_s": 0.5, "tokens_per_s": 81234.5, "mfu": 0.512, "exposed": 0.031, "syncs": 1,
    "memory": 3 << 30, "reserved": 4 << 30,
}  # fmt: skip


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_run", RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_no_figure_that_no_device_gave(run: ModuleType) -> None:
    rows = {name: run.Outcome(name, 2, FOUND) for name in run.CONTENDERS}
    rows["deepspeed"] = run.Outcome("deepspeed", 2, None, "not installed")
    checks = [run.Outcome("resume", 1, {"found": "loss 4.2"}), run.Outcome("pp 4", 4, None, "FAILED: late")]
    page = run.written(checks, rows, WHERE, is_device=True)
    assert "| FSDP2 | 2 | 81,234 | 0.512 | 3.1% | 1 | 3.00 | 4.00 |" in page
    assert "| DeepSpeed, stage 3 | 2 | not installed |" in page
    assert "| pp 4 | 4 | FAILED: late |" in page
    without = run.written(checks, rows, WHERE, is_device=False)
    assert without.count(run.NOT_MEASURED) == 1 + len(checks) - 1 + len(rows)
    assert "| pp 4 | 4 | FAILED: late |" in without, "what fails is named all the same"
    assert "81,234" not in without and "4.2" not in without


def test_a_contender_that_fails_is_named_and_the_others_go_on(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python is not there; the others are asked for nothing."""
    page = tmp_path / "page.md"
    words = [
        "run.py",
        "--device",
        "cpu",
        "--tiny",
        "--page",
        str(page),
        "--only",
        "row:deepspeed",
        "row:fsdp2",
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--python", f"deepspeed={tmp_path}/none"])
    started = run.run
    monkeypatch.setattr(
        run, "run", lambda job, *more: run.Outcome(job, 2, FOUND) if "fsdp2" in job else started(job, *more)
    )
    with pytest.raises(SystemExit) as caught:
        run.main()
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert "| DeepSpeed, stage 3 | 2 | FAILED: " in printed and "none" in printed
    assert "| FSDP2 | 2 | 81,234 |" in printed
    assert "| DeepSpeed, stage 3 | 2 | FAILED: " in page.read_text() and "81,234" not in page.read_text()


def test_a_cut_model_that_computes_other_losses_fails(run: ModuleType) -> None:
    one, near, far = [4.0, 3.0], [4.00001, 3.0], [4.0, 3.5]
    assert not run.compared(run.Outcome("tp 2", 2, {"losses": near}), one, 1e-4).said
    assert "FAILED" in run.compared(run.Outcome("tp 2", 2, {"losses": far}), one, 1e-4).said


@pytest.mark.soak
def test_it_runs_from_end_to_end_without_a_device(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = [sys.executable, str(RUN), "--device", "cpu", "--tiny", "--page", str(page)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not yet measured on a device" in page.read_text()
    for title in ("shardwise, stage 0", "shardwise, stage 3", "torch alone (DDP over several)", "FSDP2"):
        (line,) = [each for each in done.stdout.splitlines() if each.startswith(f"| {title} |")]
        ranks, tokens, _mfu, exposed, _syncs, memory, _ = (each.strip() for each in line.split("|")[2:-1])
        assert ranks == "2" and tokens and memory and (exposed != "") == title.startswith("shardwise")


@pytest.mark.gpu
def test_times_memory_and_tokens_of_a_device() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    clock = clock_of(device)
    a = torch.randn(2048, 2048, device=device)
    marks = [clock.mark()]
    for _ in range(3):
        a = a @ a / 2048
        marks.append(clock.mark())
    times = clock.seconds(marks)
    assert clock.runs_behind
    assert all(later > earlier for earlier, later in zip(times, times[1:], strict=False))
    peak = taken(device)
    assert peak.memory is not None and peak.memory_reserved is not None
    assert 0 < peak.memory <= peak.memory_reserved
    model = budget.gpt()().to(device)
    tokens = torch.zeros(2, 3, dtype=torch.long, device=device)
    first, second = (generate(model, tokens, 5, top_k=9, top_p=0.9, seed=4) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
def test_a_step_waits_for_the_device_once() -> None:
    engine = shardwise.initialize(budget.gpt()(), {"optimizer": {"type": "adamw"}, "zero": {"stage": 3}})
    for step in range(3):
        engine.train_step([budget.tokens(step)])
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as found:
            engine.train_step([budget.tokens(4)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()
    assert len([each for each in found if "synchronizing" in str(each.message)]) == 1
