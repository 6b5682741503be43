"""SIGKILL amid a save: the newest loadable step is whole, to the bit, and no older than what was told saved."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint import Checkpoints, verify

from .crew import assemble, assert_same, blank_items, make_state

_HERE = Path(__file__).parent
_PROGRAM = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("tests_checkpoint", {init!r}, submodule_search_locations=[{here!r}])
sys.modules["tests_checkpoint"] = importlib.util.module_from_spec(spec)
runpy.run_path({victim!r}, run_name="__main__")
"""


class Victim:
    """The program of ``victim.py``, ready to take orders."""

    def __init__(self) -> None:
        program = _PROGRAM.format(
            init=str(_HERE / "__init__.py"), here=str(_HERE), victim=str(_HERE / "victim.py")
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def order(self, root: Path, steps: list[int], **how: Any) -> dict[str, Any]:
        order = {
            "root": str(root),
            "steps": steps,
            "ranks": 1,
            "at": None,
            "torn": False,
            "after_s": None,
            "only": "",
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({**order, "behind": False, **how}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.close()


def newest(root: Path) -> int:
    """The newest loadable step, after it was found equal to the bit; -1 where there is none."""
    lines: list[str] = []
    items = blank_items()
    loaded = Checkpoints(root, warn=lines.append).load(items)
    assert lines == [], "a kill leaves nothing damaged under the name of a step"
    if loaded is None:
        return -1
    assert loaded.trainer == {"step": loaded.step}
    assert_same(assemble([items]), make_state(loaded.step))
    assert verify(loaded.path) == []
    return loaded.step


def kill_and_look(victim: Victim, root: Path, before: int, steps: list[int], **how: Any) -> tuple[int, bool]:
    """The newest step after a killing, and whether the fault fired."""
    answer = victim.order(root, steps, **how)
    assert answer["killed"] or answer["status"] == 0, answer
    found = newest(root)
    told = answer["steps"][-1] if answer["steps"] else before
    assert found in (told, *steps[len(answer["steps"]) : len(answer["steps"]) + 1]), (found, told, steps)
    return found, answer["killed"]


def calls_of_two_saves(victim: Victim, root: Path, ranks: int) -> int:
    return int(victim.order(root, [1, 2], ranks=ranks)["calls"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_at_a_sample_of_calls(tmp_path: Path, victim: Victim, ranks: int) -> None:
    """Kills follow one another in one folder, each writer finding what the dead one before it left."""
    total = calls_of_two_saves(victim, tmp_path, ranks)
    step = 2
    for number in range(ranks, total, 43):
        step, fired = kill_and_look(
            victim, tmp_path, step, [step + 1, step + 2], ranks=ranks, at=number, torn=number % 2 == 0
        )
        assert fired, f"call {number} of {total} never came"


def test_kill_while_a_step_is_replaced(tmp_path: Path, victim: Victim) -> None:
    """A run that went back saves a step that exists; at no moment is there none under that number."""
    assert victim.order(tmp_path, [1, 2])["steps"] == [1, 2]
    renames = 0
    while kill_and_look(victim, tmp_path, 2, [2], at=renames, only="rename")[1]:
        renames += 1
    assert renames >= 4  # manifest, the old step aside, the commit, the hint, and leftovers to the trash
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000001", "step_00000002"]


def test_kill_at_random_moments(tmp_path: Path, victim: Victim) -> None:
    campaign(victim, tmp_path, kills=6, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_hundred_kills(tmp_path: Path, victim: Victim) -> None:
    campaign(victim, tmp_path, kills=200, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_at_every_call(tmp_path: Path, victim: Victim, ranks: int) -> None:
    total = calls_of_two_saves(victim, tmp_path, ranks)
    step = 2
    for number in range(total):
        for torn in (False, True):
            step, _ = kill_and_look(
                victim, tmp_path, step, [step + 1, step + 2], ranks=ranks, at=number, torn=torn
            )
    print(f"{total} calls of {ranks} rank(s), each killed twice")


def campaign(victim: Victim, root: Path, kills: int, seed: int) -> None:
    """Half of the kills at a random call, half at a random time; on 1 or 2 ranks, behind training or not."""
    draws = random.Random(seed)
    total = calls_of_two_saves(victim, root, 1)
    step, fired, lost = 2, 0, 0
    while fired < kills:
        how: dict[str, Any] = {"ranks": draws.choice([1, 2]), "behind": draws.random() < 0.5}
        if fired % 2:
            how |= {"at": draws.randrange(total), "torn": draws.random() < 0.5}
        else:
            how |= {"after_s": draws.uniform(0.005, 0.3)}
        before = step
        step, killed = kill_and_look(victim, root, step, list(range(step + 1, step + 40)), **how)
        fired += killed
        lost += step == before
    print(
        f"{fired} kills: newest step whole and equal to the bit each time; {lost} before anything new was committed"
    )
    leftovers = [path.name for path in root.iterdir() if ".tmp-" in path.name or ".trash-" in path.name]
    assert len(leftovers) <= 2, "each writer removes what the one before it left"
