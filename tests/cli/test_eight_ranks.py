"""The main job on pp 2 × dp 2 × tp 2: the same model, the same numbers as one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.observe import metrics
from shardwise.observe.metrics import StepRecord

JOB = Path(__file__).parents[2] / "examples" / "gpt_stdlib.yaml"
STEPS = 20
REDUCED = (
    "precision=fp64",  # in a narrower dtype twenty steps carry the rounding of sums further than a part in 10^5
    "batch={global_size: 16, micro_size: 2}",
    f"train={{steps: {STEPS}, eval_every: 0, sample_tokens: 40}}",
    "data.validation_samples=4",
    "checkpoint.every=null",
)


def trained(folder: Path, ranks: int, mesh: str) -> tuple[list[StepRecord], str]:
    """Records of the run, and what the model writes at its end."""
    command = [sys.executable, "-m", "shardwise.cli.main", "train", str(JOB), "--ranks", str(ranks)]
    out = folder / str(ranks)
    for override in (*REDUCED, f"mesh={mesh}", f"data.cache={folder / 'cache'}", f"output_dir={out}"):
        command += ["--set", override]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "schedule.png").exists() == (ranks > 1)
    return metrics.read(out / "metrics.csv"), (out / "sample.txt").read_text()


@pytest.mark.soak
def test_eight_ranks_train_the_main_job_as_one_process_does(tmp_path: Path) -> None:
    alone, text = trained(tmp_path, 1, "{}")
    rows, same = trained(tmp_path, 8, "{pp: 2, dp: 2, tp: 2}")
    assert len(rows) == len(alone) == STEPS
    for got, wanted in zip(rows, alone, strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert got.tokens == wanted.tokens and got.flops == wanted.flops
    assert same == text
