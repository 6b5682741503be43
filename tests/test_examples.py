"""Every example runs, with two steps, and prints what it promises."""

import re
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
    "05_cut_matrices": "in all",
    "06_pipeline_of_layers": "after 7 8 9 comes",
    "07_recompute": "selective",
    "08_change_the_mesh": "model state on this rank",
    "09_tables_of_keys": "tables.user: ",
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


def launched(tmp_path: Path, ranks: int, name: str, *arguments: str) -> str:
    """What an example says on several ranks."""
    command = [sys.executable, "-m", "shardwise.cli.main", "launch", "--ranks", str(ranks)]
    command += [str(EXAMPLES / f"{name}.py"), "--steps", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


@pytest.mark.parametrize(
    ("name", "ranks", "arguments", "promise"),
    [
        ("05_cut_matrices", 2, (), "blocks.0.up.weight: [64, 32] on this rank, [128, 32] in all"),
        ("06_pipeline_of_layers", 2, (), "pp 1   "),
        ("09_tables_of_keys", 2, (), "tables.item: 200 rows in use"),
        ("08_change_the_mesh", 4, ("--mesh", "pp=2,tp=2"), "step (pp 0 ranks)"),
    ],
)
def test_more_ranks_lose_what_one_process_does(
    name: str, ranks: int, arguments: tuple[str, ...], promise: str, tmp_path: Path
) -> None:
    alone = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    text = launched(tmp_path, ranks, name, *arguments)
    assert promise in text, text
    assert len(losses(text)) == 2
    assert losses(text) == pytest.approx(losses(alone.stdout), rel=1e-4)
