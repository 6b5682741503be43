"""Lesson 6: a pipeline from a list of layers, whose first and last share one matrix.

Run:  shardwise launch --ranks 2 examples/06_pipeline_of_layers.py

A ``LayerSpec`` is built on the rank that runs it and nowhere else. Two ``TiedSpec`` of one key are one parameter: where
they lie on two stages, its gradient is the sum of both. ``train_step`` runs the microbatches through the stages.
"""

import argparse
import importlib
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import Layers, LayerSpec, TiedSpec
from shardwise.observe.schedule_picture import draw_text

Block = importlib.import_module("01_one_process").Block
WIDTH, VOCABULARY = 64, 64


def logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T / WIDTH


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def microbatches(step: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    start = torch.randint(0, VOCABULARY, (16, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(33)) % VOCABULARY  # counting: what comes next is never in doubt
    return [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(count)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps

    first = TiedSpec("embedding", nn.Embedding, VOCABULARY, WIDTH)
    last = TiedSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward=logits)
    model = Layers([first, *(LayerSpec(Block, WIDTH) for _ in range(4)), last], loss=loss)
    config = {
        "mesh": {"pp": int(os.environ.get("WORLD_SIZE", "1"))},
        "pipeline": {"schedule": "1f1b"},
        "batch": {"accumulation": 4},  # the microbatches of a step
        "optimizer": {"type": "adamw", "lr": 3e-3},
    }
    engine = shardwise.initialize(model, config)
    for step in range(steps):
        result = engine.train_step(microbatches(step))
        if engine.world.rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {result.step:4}  loss {result.loss:.4f}")
    timelines = engine.timeline()  # collective; None on one rank
    (output,) = engine.predict([torch.tensor([[7, 8, 9]])])  # on every rank what the last stage computes
    if engine.world.rank == 0:
        if timelines is not None:
            print(draw_text(timelines[0], row="pp"))
        print(f"after 7 8 9 comes {int(output[0, -1].argmax())}")


if __name__ == "__main__":
    main()
