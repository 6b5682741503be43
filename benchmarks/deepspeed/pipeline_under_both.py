"""Runs examples/11_pipeline_as_deepspeed.py under DeepSpeed and under Shardwise, and compares what it prints.

    python benchmarks/deepspeed/pipeline_under_both.py --deepspeed /path/to/deepspeed/bin/python

``--deepspeed``: a Python that has deepspeed and not Shardwise; this Python has Shardwise. For the package's run the one
import of the script is replaced. Compared by their largest difference: the loss of each ``train_batch``; losses and
sums of logits after training, and after ``load_checkpoint(load_optimizer_states=False)`` into an engine with other
weights.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).parents[2] / "examples" / "11_pipeline_as_deepspeed.py"
OURS, THEIRS = "import shardwise.deepspeed as deepspeed", "import deepspeed"
LIMIT = 1e-4


class Printed(NamedTuple):
    """What one run said."""

    losses: list[float]
    """By step."""
    evaluated: list[float]
    """Trained, with other weights, loaded."""
    logits: list[tuple[float, float]]
    """Their sums on each rank of the last stage: trained, loaded."""


def run(command: list[str], **environment: str) -> Printed:
    """Errors: SystemExit with the end of what it said."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")
    text, number = done.stdout, r"(-?\d+\.\d+)"
    losses = [float(loss) for loss in re.findall(rf"step +\d+  loss {number}", text)]
    line = re.search(rf"evaluated: trained {number}, other weights {number}, loaded {number}", text)
    logits = re.findall(rf"logits {number}, of what was loaded {number}", text)
    if line is None or not losses or not logits:
        raise SystemExit(f"{' '.join(command)} printed\n{text[-3000:]}")
    return Printed(losses, [*map(float, line.groups())], sorted((float(a), float(b)) for a, b in logits))


def both(deepspeed: str, ranks: int, steps: int, port: int) -> tuple[Printed, Printed]:
    """(theirs, ours)."""
    with tempfile.TemporaryDirectory() as scratch:
        changed = Path(scratch) / "script.py"
        text = SCRIPT.read_text()
        assert text.count(OURS) == 1, "one import is another"
        changed.write_text(text.replace(OURS, THEIRS))
        options = ["--steps", str(steps), "--folder"]
        agent = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
        theirs = run(
            [deepspeed, *agent, str(changed), *options, f"{scratch}/theirs"],
            OMP_NUM_THREADS="1",
            DS_ACCELERATOR="cpu",
        )
        launch = [sys.executable, "-m", "shardwise", "launch", "--ranks", str(ranks), str(SCRIPT)]
        return theirs, run([*launch, *options, f"{scratch}/ours"], OMP_NUM_THREADS="1")


def main() -> None:
    """A row for each number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True, help="a Python with deepspeed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    print("| ranks | pp x dp | steps | first, last loss | losses | evaluated, loaded | logits |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for place, ranks in enumerate(args.ranks):
        theirs, ours = both(args.deepspeed, ranks, args.steps, 29750 + place)
        assert len(theirs.losses) == len(ours.losses) == args.steps, (theirs, ours)
        assert len(theirs.logits) == len(ours.logits) == ranks // 2, (theirs, ours)
        loss = max(abs(a - b) for a, b in zip(theirs.losses, ours.losses, strict=True))
        evaluated = max(abs(a - b) for a, b in zip(theirs.evaluated, ours.evaluated, strict=True))
        logits = max(
            abs(a - b)
            for one, other in zip(theirs.logits, ours.logits, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        print(
            f"| {ranks} | 2 x {ranks // 2} | {args.steps} | {ours.losses[0]:.4f}, {ours.losses[-1]:.4f} | {loss:.1e} | "
            f"{evaluated:.1e} | {logits:.1e} |",
            flush=True,
        )
        loads = ours.evaluated[0] == ours.evaluated[2] and all(a == b for a, b in ours.logits)
        if max(loss, evaluated) > LIMIT or not loads:
            missed.append(ranks)
    if missed:
        raise SystemExit(f"beyond {LIMIT} at {missed} ranks")


if __name__ == "__main__":
    main()
