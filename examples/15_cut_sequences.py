"""Lesson 15: sequences that are cut over ranks.

Run:  shardwise launch --ranks 2 examples/15_cut_sequences.py

Every rank has other tokens of the same sequences. Attention alone needs keys of other ranks, and only those that one of
a rank's own tokens sees travel. The losses are those of one rank, and each rank keeps activations of its own tokens.
"""

import argparse

import torch
from torch import Tensor

import shardwise
from shardwise.comm.world import join
from shardwise.models.gpt import Gpt, GptPolicy

SHAPE = GptPolicy(layers=2, width=64, heads=4, kv_heads=2, context=256, vocab=64)


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (2, SHAPE.context + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    config = {"mesh": {"cp": join().size}, "zero": {"stage": 3}, "optimizer": {"type": "adamw", "lr": 1e-3}}
    engine = shardwise.initialize(Gpt(SHAPE), config)
    for step in range(steps):
        # All ranks along cp bring the same batch; the engine cuts it.
        result = engine.train_step([batch(step)])
        if engine.is_main:
            print(f"step {step}  loss {result.loss:.5f}  {result.weight:.0f} tokens")
    if engine.is_main:
        for (operation, _, axis), count in engine.traffic.counts.items():
            if axis == "cp":
                print(
                    f"{operation}: {count.elements} elements of keys, values and their gradients left this rank"
                )


if __name__ == "__main__":
    main()
