"""Every example runs, with two steps, and prints what it promises."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.launch.local import RankProgram
from tests import forked

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
    "10_optimizers": "ALL_TO_ALL",
    "11_pipeline_as_deepspeed": "of what was loaded",
    "12_cifar_as_deepspeed": "of pictures held out",
    "13_experts": "step 2  loss",
    "14_state_on_disk": "on disk",
    "15_cut_sequences": "step 1  loss",
    "16_tables_on_disk": "rows needed",
}


@pytest.fixture(autouse=True)
def _deepspeed_is_this(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ranks, which are forks: ``--as-deepspeed`` of the launcher."""
    first, *others = sys.path  # whose place a script's folder takes
    monkeypatch.setattr(sys, "path", [first, str(EXAMPLES.parent / "compat/deepspeed"), *others])


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PROMISES)


def said(capfd: pytest.CaptureFixture[str], name: str, *arguments: str, ranks: int = 1) -> str:
    """What an example prints with two steps."""
    program = RankProgram("script", str(EXAMPLES / f"{name}.py"), ("--steps", "2", *arguments))
    assert forked.run(program, ranks) == 0
    return capfd.readouterr().out


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What an example prints on one rank, by its name; each example runs once."""
    return {}


@pytest.fixture
def alone(
    printed: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[[str], str]:
    """``alone(name)`` returns what an example prints on one rank. The test has an empty folder as its own."""
    monkeypatch.chdir(tmp_path)

    def get(name: str) -> str:
        if name not in printed:
            printed[name] = said(capfd, name)
        return printed[name]

    return get


@pytest.mark.parametrize("name", list(PROMISES))
def test_example(name: str, alone: Callable[[str], str]) -> None:
    assert PROMISES[name] in alone(name)


def test_examples_run_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Started as a user does."""
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
    text = said(capfd, "04_resume_anywhere", "--steps", "3", "--folder", str(tmp_path))
    assert "going on after step 2: saved by 2 ranks at stage 3" in text, text


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


@pytest.mark.parametrize(
    ("name", "ranks", "arguments", "promise"),
    [
        ("05_cut_matrices", 2, (), "blocks.0.up.weight: [64, 32] on this rank, [128, 32] in all"),
        ("06_pipeline_of_layers", 2, (), "pp 1   "),
        ("09_tables_of_keys", 2, (), "tables.item: 200 rows in use"),
        ("11_pipeline_as_deepspeed", 2, (), "logits "),
        ("12_cifar_as_deepspeed", 2, (), "right: "),
        ("13_experts", 2, ("--ep", "2"), "blocks.1.mlp.experts"),
        ("08_change_the_mesh", 4, ("--mesh", "pp=2,tp=2"), "step (pp 0 ranks)"),
    ],
)
def test_more_ranks_lose_what_one_process_does(
    name: str,
    ranks: int,
    arguments: tuple[str, ...],
    promise: str,
    alone: Callable[[str], str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    of_one = losses(alone(name))
    text = said(capfd, name, *arguments, ranks=ranks)
    assert promise in text, text
    assert len(losses(text)) == 2
    assert losses(text) == pytest.approx(of_one, rel=1e-4)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param((), marks=pytest.mark.soak),
        ("--num-experts", "2", "4", "--mlp-type", "residual", "--moe-param-group", "--stage", "3"),
    ],
    ids=["one layer", "two layers"],
)
def test_experts_in_a_script_of_deepspeeds(kind: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    """On two ranks with half of the experts each as with all on both: a layer alone, and two that share a dense one.

    With ``--stage 3``, at which DeepSpeed has none.
    """
    found = [
        losses(said(capfd, "12_cifar_as_deepspeed", "--moe", "--ep-world-size", str(ep), *kind, ranks=2))
        for ep in (1, 2)
    ]
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=1e-5)
