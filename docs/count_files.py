"""How many files of the package a ZeRO-3 step passes through:  python docs/count_files.py

The third step of a 4-block GPT on 2 ranks of this host, counted on rank 0's main thread by ``sys.setprofile``. A file
counts if one of its functions is called; of the model and its kernels, which are not what a reader of the engine looks
for, the second number leaves out ``models/`` and ``kernels/``. What a step does beyond its own files belongs to the
collectives' transport, which is counted too.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import shardwise
from shardwise.config.run import RunConfig
from shardwise.models.gpt import Gpt

PACKAGE = f"{Path(shardwise.__file__).parent}{os.sep}"
CONFIG = {"zero": {"stage": 3}, "max_grad_norm": 1.0}
MODEL = {"model": {"layers": 4, "width": 16, "heads": 4, "vocab": 32, "context": 16}}
OUTSIDE = ("models/", "kernels/")


class Counted:
    """Calls by (file, function) of this package, and changes from one file to another."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.changes = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """For ``sys.setprofile``."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        self.calls[file, code.co_qualname] += 1
        self.changes += file != self._last
        self._last = file

    @property
    def files(self) -> set[str]:
        """Relative to the package."""
        return {file for file, _ in self.calls}


def third_step() -> dict[str, Counted]:
    """By phase, of this rank."""
    engine = shardwise.initialize(Gpt(RunConfig.parse(MODEL, "count_files").model), CONFIG)
    torch.manual_seed(engine.world.rank)
    phases = {name: Counted() for name in ("forward", "backward", "step")}
    for number in range(3):
        tokens = torch.randint(32, (2, 9))
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        watch = phases if number == 2 else dict.fromkeys(phases)
        sys.setprofile(watch["forward"])
        loss = engine(batch)
        sys.setprofile(watch["backward"])
        engine.backward(loss)
        sys.setprofile(watch["step"])
        engine.step()
        sys.setprofile(None)
    engine.close(whole=False)
    return phases


def rows(phases: dict[str, Counted]) -> list[str]:
    """A line for each phase, then one for each file."""
    lines = [f"{'':<10} {'files':>6} {'functions':>10} {'calls':>6} {'changes of file':>16}"]
    for name, counted in phases.items():
        lines.append(
            f"{name:<10} {len(counted.files):>6} {len(counted.calls):>10} {counted.calls.total():>6} "
            f"{counted.changes:>16}"
        )
    files = set().union(*(counted.files for counted in phases.values()))
    inner = [file for file in files if not file.startswith(OUTSIDE)]
    lines += [f"{'together':<10} {len(files):>6}   ({len(inner)} without {' and '.join(OUTSIDE)})", ""]
    for file in sorted(files):
        calls = [sum(n for (of, _), n in counted.calls.items() if of == file) for counted in phases.values()]
        lines.append(f"  {file:<36}" + "".join(f"{n or '':>9}" for n in calls))
    return lines


if __name__ == "__main__":
    print("\n".join(shardwise.launch(lambda: rows(third_step()), ranks=2)))
