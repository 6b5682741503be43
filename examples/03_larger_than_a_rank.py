"""Lesson 3: a model that no single rank ever holds: built on ``meta``, started shard by shard, in bf16, at stage 3.

Run:  shardwise launch --ranks 2 examples/03_larger_than_a_rank.py

Start weights are a function of (seed, name, element), so every number of ranks starts from the same model.
"""

import argparse

import torch

import shardwise
from shardwise.models.gpt import Gpt, GptPolicy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps

    with torch.device("meta"):
        model = Gpt(GptPolicy(layers=4, width=64, heads=4, context=32, vocab=64))
    config = {
        "zero": {"stage": 3},
        "precision": "bf16",  # fp32 masters and fp32 gradient sums beside bf16 weights
        "optimizer": {"type": "adamw", "lr": 1e-3, "groups": [{"match": "*norm*", "weight_decay": 0.0}]},
        "schedule": {"type": "cosine", "warmup_steps": 5, "total_steps": max(steps, 6)},
        "batch": {"global_size": 16, "micro_size": 4},  # accumulation follows
        "max_grad_norm": 1.0,
    }
    engine = shardwise.initialize(model, config)
    rank, ranks = engine.world.rank, engine.world.size
    for step in range(steps):
        start = torch.randint(0, 64, (16, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + torch.arange(33)) % 64  # counting: what comes next is never in doubt
        mine = tokens.chunk(ranks)[rank].split(4)
        result = engine.train_step([{"tokens": part[:, :-1], "targets": part[:, 1:]} for part in mine])
        if rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {result.step:4}  loss {result.loss:.4f}  learning rate {result.lr:.2e}")
    with engine.full_parameters() as parameters:  # collective: every rank enters
        if rank == 0:
            print(f"{sum(p.numel() for p in parameters.values()):,} parameters, gathered to look at")
    if rank == 0:
        for row, size in engine.state_bytes().items():
            print(f"  {row:9} {size / 1024:7.0f} KiB on this rank")


if __name__ == "__main__":
    main()
