"""Lesson 2: the same loop on any number of ranks. What changes is who draws which samples.

Run:  shardwise launch --ranks 2 examples/02_more_ranks.py
      torchrun --nproc-per-node 2 examples/02_more_ranks.py

The losses are those of lesson 1: the mean over the global batch does not depend on how it is cut.
"""

import argparse
import importlib

import torch

import shardwise

lesson_1 = importlib.import_module("01_one_process")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--stage", type=int, default=1, help="what is cut: 1 optimizer, 2 gradients, 3 weights"
    )
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = {
        "zero": {"stage": arguments.stage},
        "optimizer": {"type": "adamw", "lr": 3e-3},
        "max_grad_norm": 1.0,
    }
    engine = shardwise.initialize(lesson_1.Model(), config)
    rank, ranks = engine.world.rank, engine.world.size
    if rank == 0:
        print(engine.plan)
    for step in range(arguments.steps):
        loss = engine(lesson_1.batch(step, rank, ranks))
        engine.backward(loss)
        result = engine.step()
        if rank == 0 and (step % 50 == 0 or step == arguments.steps - 1):
            print(f"step {result.step:4}  loss {result.loss:.5f}  gradient norm {result.grad_norm:.3f}")
    if rank == 0:
        sent = engine.traffic.total("weights", "gradients")
        print(f"this rank sent {sent.elements:,} elements in {sent.calls} collectives")
        print(f"model state on this rank: {sum(engine.state_bytes().values()) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
