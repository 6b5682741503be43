"""``make gpu`` up to the device: the page says what was measured, and the tests that need a real one."""

import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shardwise
from shardwise.memory.device_clock import clock_of
from shardwise.models.generate import generate
from shardwise.observe.memory import taken
from tests.accelerator import budget

FOLDER = Path(__file__).parents[2] / "benchmarks" / "accelerator"
RUN = FOLDER / "run.py"
WHERE = {"machine": "8 cores", "commit": "abc", "versions": {"torch": "2"}, "date": "today"}
FOUND = {
    "ranks": 2, "step_s": 0.5, "per_s": 81234.5, "unit": "tokens", "mfu": 0.512, "syncs": 1,
    "exposed_s": {"dp": 0.010, "dp_shard": 0.002, "tp": 0.001, "model": 0.0025},
    "memory": 3 << 30, "foreseen": 2 << 30, "reserved": 4 << 30,
}  # fmt: skip
THEIRS = {**FOUND, "exposed_s": None, "foreseen": None}


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_run", RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_no_figure_that_no_device_gave(run: ModuleType) -> None:
    rows = {name: run.Outcome(name, 2, THEIRS if name in run.THEIRS else FOUND) for name in run.CONTENDERS}
    rows["deepspeed"] = run.Outcome("deepspeed", 2, None, "not installed")
    checks = [run.Outcome("resume", 1, {"found": "loss 4.2"}), run.Outcome("pp 4", 4, None, "FAILED: late")]
    page = run.written(checks, rows, WHERE, is_device=True)
    by_axis = "3.1% | dp 12.00 ms, tp 1.00 ms, several 2.50 ms"
    assert (
        f"| shardwise, tp, sequence cut | 2 | 500.0 | 81,234 | 0.512 | {by_axis} | 1 | 3.00 | 2.00 | 1.50 | 4.00 |"
        in page
    )
    assert "| FSDP2 | 2 | 500.0 | 81,234 | 0.512 |  |  | 1 | 3.00 |  |  | 4.00 |" in page
    assert "| DeepSpeed, stage 3 | 2 | not installed |" in page
    assert "| pp 4 | 4 | FAILED: late |" in page
    lines = [line for line in page.splitlines() if line.startswith("|") and "resume" not in line]
    assert len({line.count("|") for line in lines if "ranks | step" in line or "shardwise, " in line}) == 1
    without = run.written(checks, rows, WHERE, is_device=False)
    assert without.count(run.NOT_MEASURED) == 1 + len(checks) - 1 + len(rows)
    assert "| pp 4 | 4 | FAILED: late |" in without, "a failure is named in any case"
    assert "81,234" not in without and "4.2" not in without


def test_a_contender_that_fails_is_named_and_the_others_go_on(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python of one contender does not exist; those that nobody asked for are not run."""
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
        run, "run", lambda job, *more: run.Outcome(job, 2, THEIRS) if "fsdp2" in job else started(job, *more)
    )
    with pytest.raises(SystemExit) as caught:
        run.main()
    assert caught.value.code == "run.py: failed: row:deepspeed"
    printed = capsys.readouterr().out
    assert "| DeepSpeed, stage 3 | 2 | FAILED: " in printed and "none" in printed
    assert "| FSDP2 | 2 | 500.0 | 81,234 |" in printed
    assert "| DeepSpeed, stage 3 | 2 | FAILED: " in page.read_text() and "81,234" not in page.read_text()
    results = json.loads(page.with_suffix(".json").read_text())
    assert results["rows"]["fsdp2"]["found"] == THEIRS and not results["is_device"]
    assert results["rows"]["deepspeed"]["said"].startswith("FAILED: ")


def test_a_job_that_does_not_end_is_ended_with_its_ranks(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job's process starts another one, which writes its id and sleeps."""
    script = tmp_path / "jobs.py"
    inner = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])\n")
    monkeypatch.setattr(run, "HERE", tmp_path)
    found = run.run("resume", 1, run.Setting("cpu", True, limit_s=4.0))
    assert found.said == "FAILED: not over after 4 s"
    pid = int((tmp_path / "pid").read_text())
    assert is_gone(pid)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended within a while; its parent may still have to collect it."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_no_job_begins_when_the_time_is_over(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", "--tiny", "--minutes", "0"])
    session = run.Session(run._arguments(), is_device=False, devices=4)
    rows = session.rows()
    assert "left out: 0 minutes were over" in rows["stage-3"].said
    assert all("left out: 0 minutes were over" in each.said for each in session.checks())


def test_rows_that_make_no_sense_on_one_device_say_why(run: ModuleType) -> None:
    said = {name: run.left_out(row, 1) for name, row in run.ROWS.items()}
    assert [name for name in run.ROWS if not said[name]] == [
        "stage-0", "stage-3", "compile", "host-optimizer", "host-activations", "experts", "tables",
    ]  # fmt: skip
    assert all(each.startswith("left out: ") for each in said.values() if each)
    assert run.left_out(run.ROWS["hsdp"], 5).startswith("left out: it needs an even number")
    assert not any(run.left_out(row, 8) for row in run.ROWS.values())


def test_a_fault_is_judged_by_what_the_other_ranks_say(run: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    (tmp_path / "log.1").write_text("ValueError: no")
    assert "ValueError: no" in run._judged("killed", 3, out, [1.0] * 3).said, "the fault did not come"
    (tmp_path / "found.at").write_text("100.0")
    (tmp_path / "found.0").write_text(json.dumps({"found": "step 3: rank 1 ended. Its main thread is at x"}))
    (tmp_path / "found.2").write_text(json.dumps({"found": "rank 1 ended"}))
    good = run._judged("killed", 3, out, [105.0, 100.1, 107.4])
    assert good.found == {"found": "all others named it and ended within 7 s: step 3: rank 1 ended."}
    assert "rank 2 has not ended" in run._judged("killed", 3, out, [105.0, 100.1, math.inf]).said
    late = run._judged("killed", 3, out, [105.0, 100.1, 101.0 + run.BOUND_S])
    assert late.has_failed and "rank 2 has not ended" in late.said
    (tmp_path / "found.2").write_text(json.dumps({"found": "rank 10 ended"}))
    assert "rank 2 did not name rank 1" in run._judged("killed", 3, out, [105.0, 100.1, 107.4]).said
    (tmp_path / "found.2").unlink()
    (tmp_path / "log.2").write_text("AssertionError: the ranks went on without rank 1")
    assert "went on without rank 1" in run._judged("killed", 3, out, [105.0, 100.1, 107.4]).said


def test_a_cut_model_that_computes_other_losses_fails(run: ModuleType) -> None:
    one, near, far = [4.0, 3.0], [4.00001, 3.0], [4.0, 3.5]
    assert not run.compared(run.Outcome("tp 2", 2, {"losses": near}), one, 1e-4).said
    assert "FAILED" in run.compared(run.Outcome("tp 2", 2, {"losses": far}), one, 1e-4).said


@pytest.mark.soak
def test_it_runs_from_end_to_end_without_a_device(run: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = [sys.executable, str(RUN), "--device", "cpu", "--tiny", "--page", str(page), "--minutes", "40"]
    done = subprocess.run([*words, "--limit", "400"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not yet measured on a device" in page.read_text()
    results = json.loads(page.with_suffix(".json").read_text())
    checks = {each["name"]: each["found"] for each in results["checks"]}
    assert (
        all(checks.values())
        and "named it" in checks["killed"]["found"]
        and "rank 1" in checks["late"]["found"]
    )
    axes = {
        "tp": {"tp"},
        "pp": {"pp"},
        "pp-interleaved": {"pp"},
        "ep": {"ep"},
        "hsdp": {"dp_replicate", "dp_shard"},
    }
    for name, row in run.ROWS.items():
        found = results["rows"][name]["found"]
        assert found["ranks"] == max(2, row.fewest) and found["per_s"] and found["memory"], name
        assert (found["foreseen"] is None) == (name == "tables"), name
        assert set(found["exposed_s"]) >= axes.get(name, {"dp"}), name
    for name in ("torch", "fsdp2"):
        assert results["rows"][name]["found"]["exposed_s"] is None


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
