"""Lesson 10: optimizers that look at whole tensors, on shards.

Run:  python examples/10_optimizers.py
      shardwise launch --ranks 2 examples/10_optimizers.py

AdamW updates each element by itself. LAMB needs the norm of every tensor, Muon every matrix as a whole, and a rank has
pieces. What they need travels between the two halves of the update, and the step's list says so.
"""

import argparse

import torch
from torch import Tensor

import shardwise
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.plan.action import Kind

SHAPE = GptPolicy(layers=2, width=64, heads=4, context=32, vocab=32)
OPTIMIZERS = {
    "adamw": {"type": "adamw", "lr": 3e-3, "weight_decay": 0.1},
    "lion": {"type": "lion", "lr": 1e-3, "weight_decay": 0.1},
    "lamb": {"type": "lamb", "lr": 3e-2, "groups": [{"match": "*norm*", "trust": False, "lr": 3e-3}]},
    "muon": {"type": "muon", "lr": 3e-3, "weight_decay": 0.1},
}


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """Sequences that count up, each from a start of its own."""
    starts = torch.randint(0, 32, (8, 1), generator=torch.Generator().manual_seed(2 * step + rank))
    tokens = (starts + torch.arange(SHAPE.context + 1)) % 32
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def run(optimizer: dict[str, object], steps: int) -> None:
    engine = shardwise.initialize(Gpt(SHAPE), {"optimizer": optimizer, "zero": {"stage": 2}})
    for step in range(steps):
        engine.backward(engine(batch(step, engine.dp_index)))
        result = engine.step()
    if engine.is_main:
        looks = [
            str(action)
            for action in engine.plan.own.actions
            if action.kind in (Kind.TRUST_RATIO, Kind.ALL_TO_ALL)
        ]
        moments = engine.state_bytes().get("moments", 0) / 2**10
        print(
            f"{optimizer['type']:<6} loss {result.loss:.4f}   moments here {moments:6.1f} KiB   {' '.join(looks)}"
        )
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    for optimizer in OPTIMIZERS.values():
        run(optimizer, steps)


if __name__ == "__main__":
    main()
