"""Hostile and damaged files of every kind: the numbers of the good file, or an answer; see trial.py.

To add a kind: a module beside this one with a ``KIND``, and its name in ``KINDS``.
"""

from collections import Counter
from pathlib import Path

import pytest

from . import (
    clicks_files,
    configurations,
    csv_files,
    deepspeed_folders,
    folders,
    launcher_files,
    pictures,
    run_folders,
    safetensors_files,
    steps,
    table_files,
    token_files,
    torch_files,
)
from .trial import Case, Kind, Trials

KINDS: tuple[Kind, ...] = (
    safetensors_files.KIND,
    torch_files.KIND,
    token_files.KIND,
    configurations.KIND,
    steps.KIND,
    *folders.KINDS,
    clicks_files.KIND,
    table_files.KIND,
    csv_files.KIND,
    *launcher_files.KINDS,
    run_folders.KIND,
    pictures.KIND,
    *deepspeed_folders.KINDS,
)
SAMPLE, SOAK = 7, 120
"""Cases of each kind."""


def campaign(kind: Kind, folder: Path, count: int) -> Counter[str]:
    """Outcomes of ``count`` cases, evenly spread over all there are; fails with every bad one."""
    trials = Trials(kind, folder)
    cases: list[Case] = [*trials.special_cases(), *kind.cases(max(count, SOAK))]
    stride = max(1, len(cases) // count)
    outcomes: Counter[str] = Counter()
    bad = []
    for case in cases[::stride]:
        verdict = trials.run(case)
        outcomes[verdict.outcome] += 1
        if verdict.is_bad:
            bad.append(f"{kind.name}, {case.name}: {verdict.outcome}: {verdict.said[-1500:]}")
    assert not bad, f"{len(bad)} of {sum(outcomes.values())}\n" + "\n\n".join(bad)
    return outcomes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_sample(kind: Kind, tmp_path: Path) -> None:
    outcomes = campaign(kind, tmp_path, SAMPLE)
    assert sum(outcomes.values()) >= SAMPLE and outcomes["answer"] > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_all(kind: Kind, tmp_path: Path) -> None:
    outcomes = campaign(kind, tmp_path, SOAK)
    print(f"{kind.name}: {dict(outcomes)}")
    assert sum(outcomes.values()) >= SOAK


def test_the_trial_sees_what_it_is_for(tmp_path: Path) -> None:
    """Each bad outcome, made on purpose."""

    def make(folder: Path) -> Path:
        (folder / "x").write_text("good")
        return folder / "x"

    def read(path: Path) -> str:
        text = path.read_text()
        if text == "raise":
            raise KeyError(text)
        if text == "large":
            return str(len(b"x" * (400 << 20)))
        if text == "huge":
            return str(len(bytes(4 << 30)))
        if text == "spin":
            while True:
                pass
        return text

    trials = Trials(Kind("toy", make, read, lambda count: ()), tmp_path / "toy")
    expected = {"good": "same", "other": "other", "raise": "traceback", "large": "large", "huge": "traceback"}
    for text, outcome in expected.items():
        assert trials.run(Case(text, lambda path, text=text: path.write_text(text))).outcome == outcome, text


@pytest.mark.soak
def test_the_trial_ends_what_spins(tmp_path: Path) -> None:
    def make(folder: Path) -> Path:
        (folder / "x").write_text("good")
        return folder / "x"

    def read(path: Path) -> str:
        while path.read_text() != "good":
            pass
        return "good"

    verdict = Trials(Kind("toy", make, read, lambda count: ()), tmp_path / "toy").run(
        Case("spin", lambda path: path.write_text("spin") and None)
    )
    assert verdict.outcome in ("killed", "slow"), "by its own clock or by ours"
