"""Every example runs, with two steps, and prints what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISES = {
    "01_one_process": "gradient norm",
    "02_more_ranks": "model state on this rank",
    "03_larger_than_a_rank": "gathered to look at",
    "04_resume_anywhere": "saved",
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", list(PROMISES))
def test_example(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", "2"]
    if name == "04_resume_anywhere":
        command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout


def test_examples_run_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardwise.cli.main", "launch", "--ranks", "2"]
    command += [
        str(EXAMPLES / "04_resume_anywhere.py"),
        "--stage",
        "3",
        "--steps",
        "2",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    alone = [
        sys.executable,
        str(EXAMPLES / "04_resume_anywhere.py"),
        "--steps",
        "3",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(alone, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "going on after step 2: saved by 2 ranks at stage 3" in done.stdout, done.stdout + done.stderr
