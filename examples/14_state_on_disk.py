"""Lesson 14: masters, moments and weights in files instead of in memory.

Run:  python examples/14_state_on_disk.py
      shardwise launch --ranks 2 examples/14_state_on_disk.py

A disk keeps what a step touches once; a Unit's weights are in memory while it computes, and its update runs while the
next forward pass computes the Units before it. The losses do not change by a bit.
"""

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor

import shardwise
from shardwise.models.gpt import Gpt, GptPolicy

SHAPE = GptPolicy(layers=8, width=128, heads=4, context=64, vocab=64)
DISK = {"optimizer": "disk", "parameters": "disk"}


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (4, SHAPE.context + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def run(offload: dict[str, Any], steps: int) -> tuple[float, dict[str, int], bool]:
    """The last loss, the bytes that this rank holds between steps by row of the ledger, and whether it is to print."""
    torch.manual_seed(0)
    config = {"zero": {"stage": 3}, "optimizer": {"type": "adamw", "lr": 1e-3}, "offload": offload}
    engine = shardwise.initialize(Gpt(SHAPE), config)
    for step in range(steps):
        result = engine.train_step([batch(step * engine.world.size + engine.world.rank)])
    held = dict(engine.held_bytes())
    engine.close()
    return result.loss, held, engine.is_main


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    in_memory, before, is_main = run({}, steps)
    with tempfile.TemporaryDirectory() as folder:
        on_disk, after, _ = run({**DISK, "disk_path": folder}, steps)
    assert in_memory == on_disk, "state on a disk changes no bit"
    if not is_main:
        return
    rows = ["weights", "moments", "gathered", "loaded", "disk"]
    print(f"{'':<10} " + " ".join(f"{row:>12}" for row in rows) + "   loss")
    for name, held, loss in (("in memory", before, in_memory), ("on disk", after, on_disk)):
        sizes = " ".join(f"{held.get(row, 0) / 2**20:8.1f} MiB" for row in rows)
        print(f"{name:<10} {sizes}   {loss:.6f}")


if __name__ == "__main__":
    main()
