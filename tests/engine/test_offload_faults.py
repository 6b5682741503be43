"""A disk that fails, somebody who empties its folder, signals: a job ends by itself and names the file, and its last
checkpoint resumes with the losses of a run that nothing happened to. Most places are those of ``fault_campaign``; here
is what jobs of ``shardwise launch`` print, too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.fault_campaign import ROWS, SEEDS, one_place

PROGRAM = """
import errno, os, sys
from pathlib import Path

import torch
from torch import nn

import shardwise
from shardwise.memory.direct_io import DirectFile

folder, fault, kind, at = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
config = {
    "zero": {"stage": 3},
    "precision": "bf16",
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "offload": {"optimizer": "disk", "parameters": "disk", "disk_path": str(folder / "disk")},
}
engine = shardwise.initialize(nn.Sequential(*blocks), config, loss=lambda model, x: (model(x) - x).square().mean())
if (folder / "steps").exists():
    engine.load(folder / "steps")

def plant():
    (file,) = (folder / "disk").glob(f"*rank1*.{kind}")
    if fault == "flip":
        engine._parts.site.tiers.settle()
        with open(file, "r+b") as content:
            content.seek(at * 97 % 800)
            byte = content.read(1)
            content.seek(-1, 1)
            content.write(bytes([byte[0] ^ 16]))
    elif fault == "cut":
        engine._parts.site.tiers.settle()
        os.truncate(file, at * 97 % 800)
    else:
        operation, number = ("_read", errno.EIO) if fault == "EIO" else ("_write", errno.ENOSPC)
        real, calls = getattr(DirectFile, operation), [0]
        def fails(self, parts, offset):
            calls[0] += self.path == file
            if self.path == file and calls[0] > at % 4:
                raise OSError(number, os.strerror(number))
            return real(self, parts, offset)
        setattr(DirectFile, operation, fails)

for step in range(engine.step_count, 6):
    if fault != "none" and step == 3 and engine.world.rank == 1:
        plant()
    generator = torch.Generator().manual_seed(10 * step + engine.world.rank)
    result = engine.train_step([torch.randn(4, 16, generator=generator)])
    if engine.is_main:
        print("LOSS", step, result.loss.hex(), flush=True)
    engine.save(folder / "steps")
engine.close()
"""


def run(folder: Path, *fault: str) -> tuple[int, dict[str, str], str]:
    """(exit code, losses by step, all that was printed)."""
    (folder / "disk").mkdir(parents=True, exist_ok=True)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "shardwise", "launch", "--ranks", "2", str(program), str(folder), *fault]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = done.stdout + done.stderr
    return done.returncode, dict(re.findall(r"LOSS (\d+) (\S+)", text)), text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    code, losses, text = run(tmp_path_factory.mktemp("plain"), "none", "-", "0")
    assert code == 0 and len(losses) == 6, text
    return losses


FAULTS = [
    (fault, kind, at)
    for at, fault in enumerate(("flip", "cut", "EIO", "ENOSPC"))
    for kind in ("weight", "exp_avg_sq")
]


@pytest.mark.soak
@pytest.mark.parametrize(("fault", "kind", "at"), FAULTS)
def test_a_job_ends_by_itself_and_resumes(
    plain: dict[str, str], tmp_path: Path, fault: str, kind: str, at: int
) -> None:
    code, before, text = run(tmp_path, fault, kind, str(at))
    assert code != 0 and f"rank1.{kind}" in text, text
    assert 3 <= len(before) <= 5, "the run ends within a step or two of the fault"
    code, after, text = run(tmp_path, "none", "-", "0")
    assert code == 0, text
    assert "5" in after and before | after == plain
    assert all(after[step] == plain[step] for step in after)
    assert not [path for path in (tmp_path / "disk").iterdir() if path.name != "shardwise.lock"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lives")


@pytest.mark.parametrize(("seed", "strike"), [(4, "EIO write"), (9, "ENOSPC save"), (16, "emptied")])
def test_a_life_that_is_struck(home: Path, seed: int, strike: str) -> None:
    found = one_place("one rank", seed, home)
    assert found["struck"] and found["strike"] == strike


@pytest.mark.soak
@pytest.mark.parametrize("row", ROWS)
def test_every_place(home: Path, row: str) -> None:
    for seed in range(SEEDS):
        assert one_place(row, seed, home)["struck"], seed
