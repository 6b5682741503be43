"""Lesson 5: tensor parallelism of a model of your own. A table says how each module's matrices are cut.

Run:  shardwise launch --ranks 2 examples/05_cut_matrices.py

``up`` is cut by columns and ``down`` by rows, so a block needs one sum over the ranks, after ``down``: what lies
between the two acts on features that one rank holds. The model of lesson 1 is untouched, and so are its losses.
"""

import argparse
import importlib
import os

import torch

import shardwise

lesson_1 = importlib.import_module("01_one_process")

TABLE = {
    "inward": "replicate",
    "blocks.*.norm": "replicate",
    "blocks.*.up": "column",  # its outputs are cut
    "blocks.*.down": "row",  # its inputs are cut; the sum over the ranks follows
    "outward": "replicate",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    config = {
        "mesh": {"tp": int(os.environ.get("WORLD_SIZE", "1"))},
        # A sequence could be cut too, between the cut matrices; this model has none.
        "tensor": {"table": TABLE, "sequence_parallel": False},
        "optimizer": {"type": "adamw", "lr": 3e-3},
        "max_grad_norm": 1.0,
    }
    engine = shardwise.initialize(lesson_1.Model(), config)
    rank = engine.world.rank
    for step in range(steps):
        loss = engine(lesson_1.batch(step))  # ranks that share a model are given the same samples
        engine.backward(loss)
        result = engine.step()
        if rank == 0 and (step % 50 == 0 or step == steps - 1):
            print(f"step {result.step:4}  loss {result.loss:.5f}  gradient norm {result.grad_norm:.3f}")
    up = engine.module.blocks[0].up.weight
    whole = engine.state_dict()["blocks.0.up.weight"]  # collective: put together from the ranks' pieces
    if rank == 0:
        print(f"blocks.0.up.weight: {list(up.shape)} on this rank, {list(whole.shape)} in all")
        sent = engine.traffic.total("activations")
        print(f"this rank sent {sent.elements:,} elements of activations in {sent.calls} collectives")


if __name__ == "__main__":
    main()
