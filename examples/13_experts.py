"""Lesson 13: a mixture of experts, on any layout the same.

Run:  python examples/13_experts.py
      shardwise launch --ranks 2 examples/13_experts.py
      shardwise launch --ranks 4 examples/13_experts.py --ep 2

Each token goes through 2 of 4 experts. With --ep 2 a rank holds half of them, and rows travel to their experts; the
losses are those of one process, whatever the layout, with room for a token counted by sequence.
"""

import argparse

import torch
from torch import Tensor

import shardwise
from shardwise.models.gpt import Gpt, GptPolicy

SHAPE = GptPolicy.model_validate(
    {
        "layers": 2,
        "width": 64,
        "heads": 4,
        "context": 32,
        "vocab": 32,
        "hidden": 128,
        "experts": {
            "count": 4,
            "hidden": 64,
            "first": 1,
            "router": {"top_k": 2, "capacity": 1.5, "balance": "loss"},
        },
    }
)
GLOBAL_BATCH = 16


def batch(step: int, engine: shardwise.Engine) -> dict[str, Tensor]:
    """This rank's part of the step's sequences, which count up, each from a start of its own."""
    starts = torch.randint(0, 32, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + torch.arange(SHAPE.context + 1)) % 32
    mine = tokens.chunk(engine.dp_size)[engine.dp_index]
    return {"tokens": mine[:, :-1], "targets": mine[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    config = {"mesh": {"ep": given.ep}, "zero": {"stage": 3}, "optimizer": {"lr": 3e-3}}
    engine = shardwise.initialize(Gpt(SHAPE, seed=0), config)
    for step in range(given.steps):
        engine.backward(engine(batch(step, engine)))
        result = engine.step()
        if engine.is_main and (step + 1) % max(given.steps // 4, 1) == 0:
            print(f"step {step + 1}  loss {result.loss:.6f}")
    if engine.is_main:
        print(engine.plan)
    engine.close()


if __name__ == "__main__":
    main()
