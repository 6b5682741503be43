"""Lesson 7: activations that are computed again instead of being kept.

Run:  python examples/07_recompute.py

``full`` keeps a block's input alone and runs its forward pass a second time; ``selective`` runs only attention again,
which keeps most bytes for the fewest operations. The losses do not change by a bit.
"""

import argparse
import time

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import shardwise
from shardwise.models.gpt import Gpt, GptPolicy

SHAPE = GptPolicy(layers=4, width=128, heads=4, context=128, vocab=64)


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (4, SHAPE.context + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def run(scope: str, steps: int) -> tuple[float, int, float]:
    """The last loss, bytes that autograd keeps for one backward pass, and seconds a step."""
    engine = shardwise.initialize(
        Gpt(SHAPE), {"recompute": scope, "optimizer": {"type": "adamw", "lr": 1e-3}}
    )
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()  # views of one tensor count once
        kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    started = time.perf_counter()
    for step in range(steps):
        kept.clear()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = engine(batch(step))
        engine.backward(loss)
        result = engine.step()
    seconds = (time.perf_counter() - started) / steps
    for parameter in engine.module.parameters():  # they are there anyway
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return result.loss, sum(kept.values()), seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    print("recompute    kept for backward   seconds a step   loss")
    for scope in ("none", "selective", "full"):
        loss, kept, seconds = run(scope, steps)
        print(f"{scope:<12} {kept / 2**20:13.1f} MiB {seconds:16.3f}   {loss:.6f}")


if __name__ == "__main__":
    main()
