"""What a step waits for state on a disk: steps of one model with state in memory, and on the disk with updates that are
waited for at the step's end or where their Unit is used next, taking turns in one process.

    python waits.py FOLDER [--rounds 12]

Figures are ratios over the run in memory, medians over the rounds. One thread computes; the tiers' thread, and those
that read and write, have the other core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.models import Gpt, GptPolicy

POLICY = GptPolicy(layers=12, width=512, heads=8, context=256, vocab=256)
WAYS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "disk, at_end": {"optimizer": "disk", "step": "at_end"},
    "disk, before_use": {"optimizer": "disk", "step": "before_use"},
    "disk, before_use, half of the Units": {"optimizer": "disk", "step": "before_use", "fraction": 0.5},
    "disk, weights too": {"optimizer": "disk", "parameters": "disk", "step": "before_use"},
}


def stepper(offload: dict[str, Any], folder: Path) -> Callable[[int], None]:
    """Steps of an engine of its own."""
    torch.manual_seed(0)
    disk = {**offload, "disk_path": str(folder)} if offload else {}
    config = {
        "zero": {"stage": 3, "prefetch_bytes": 1 << 24},
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "offload": disk,
    }
    engine = shardwise.initialize(Gpt(POLICY), config)

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, POLICY.vocab, (2, POLICY.context + 1), generator=generator)
        engine.train_step([{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}])

    return step


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    steps = {name: stepper(offload, given.folder) for name, offload in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(given.rounds + 1):
        for name, step in steps.items():
            step(3 * number)  # what the last turn of another engine left in caches goes
            begin = time.perf_counter()
            step(3 * number + 1)
            step(3 * number + 2)
            if number:
                seconds[name].append((time.perf_counter() - begin) / 2)
    plain = seconds["in memory"]
    print("| state | ms | over the run in memory (quartiles) |\n|---|---|---|")
    for name, found in seconds.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(found, plain, strict=True)], n=4)
        print(f"| {name} | {1e3 * statistics.median(found):.0f} | {middle:.2f} ({low:.2f}-{high:.2f}) |")


if __name__ == "__main__":
    main()
