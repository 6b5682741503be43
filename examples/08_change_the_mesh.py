"""Lesson 8: one configuration from one rank to pp × dp × tp. What changes is the ``mesh`` line.

Run:  python examples/08_change_the_mesh.py
      shardwise launch --ranks 2 examples/08_change_the_mesh.py --mesh tp=2
      shardwise launch --ranks 4 examples/08_change_the_mesh.py --mesh pp=2,tp=2
      shardwise launch --ranks 8 examples/08_change_the_mesh.py --mesh pp=2,dp=2,tp=2 --stage 3

Every line of losses is the same but for the rounding of sums.
"""

import argparse

import torch
from torch import Tensor

import shardwise
from shardwise.models.gpt import Gpt, GptPolicy


def mesh_of(text: str) -> dict[str, int]:
    """``pp=2,tp=2`` as a dictionary; dp, left out, becomes the ranks that remain."""
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(",") if part)}


def microbatches(step: int, dp_index: int, dp: int) -> list[dict[str, Tensor]]:
    """What the data-parallel rank ``dp_index`` computes of the global batch of 16 sequences, two at a time."""
    start = torch.randint(0, 64, (16, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(33)) % 64
    return [{"tokens": part[:, :-1], "targets": part[:, 1:]} for part in tokens.chunk(dp)[dp_index].split(2)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mesh", type=mesh_of, default={})
    parser.add_argument("--stage", type=int, default=1)
    arguments = parser.parse_args()

    with torch.device("meta"):
        model = Gpt(GptPolicy(layers=4, width=64, heads=4, context=32, vocab=64))
    config = {
        "mesh": arguments.mesh,
        "zero": {"stage": arguments.stage},
        "recompute": "selective",
        "batch": {
            "global_size": 16,
            "micro_size": 2,
        },  # accumulation follows: with stages, their microbatches
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "max_grad_norm": 1.0,
    }
    engine = shardwise.initialize(model, config)
    rank, mesh = engine.world.rank, engine.plan.mesh
    if rank == 0:
        print(engine.plan)
    for step in range(arguments.steps):
        result = engine.train_step(microbatches(step, mesh.index("dp", rank), mesh.size("dp")))
        if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {result.step:4}  loss {result.loss:.5f}  gradient norm {result.grad_norm:.4f}")
    if rank == 0:
        print(f"model state on this rank: {sum(engine.state_bytes().values()) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
