"""In fp32 and bf16, with Triton's kernels, a layout on the pretended device is as near to fp64 as one process is."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.accelerator.precisions import FEW, LAYOUTS, MISTAKES, Outcome
from tests.accelerator.pretend import IS_POSSIBLE

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(not IS_POSSIBLE, reason="torch before 2.13 knows no devices in Python"),
]

ROOT = Path(__file__).parents[2]


def outcomes(which: str) -> list[Outcome]:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.accelerator.precisions", which],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.soak)])
def test_a_layout_is_as_near_as_one_process(which: str) -> None:
    found = outcomes(which)
    assert len(found) == (len(FEW) if which == "few" else 2 * len(LAYOUTS))
    assert not [each for each in found if not each.is_good]


@pytest.mark.soak
def test_a_mistake_is_seen() -> None:
    found = outcomes("mistakes")
    assert len(found) == len(MISTAKES)
    assert not [each for each in found if each.is_good]
