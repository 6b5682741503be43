"""Lesson 1: a plain PyTorch loop, handed to the engine.

Run:  python examples/01_one_process.py

Three lines differ from a loop without Shardwise: ``initialize``, ``engine.backward``, ``engine.step``.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Learns y = sin(3x): a stack of residual blocks."""

    def __init__(self, width: int = 32, blocks: int = 4):
        super().__init__()
        self.inward = nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.outward = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.inward(x)
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(self.outward(hidden), y)


def batch(step: int, rank: int = 0, ranks: int = 1, size: int = 64) -> tuple[Tensor, Tensor]:
    """This rank's part of the global batch of ``step``: the same samples on any number of ranks."""
    x = torch.rand(size, 1, generator=torch.Generator().manual_seed(step)) * 4 - 2
    x = x.chunk(ranks)[rank]
    return x, torch.sin(3 * x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    engine = shardwise.initialize(Model(), {"optimizer": {"type": "adamw", "lr": 3e-3}, "max_grad_norm": 1.0})
    for step in range(steps):
        loss = engine(batch(step))
        engine.backward(loss)
        result = engine.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {result.step:4}  loss {result.loss:.5f}  gradient norm {result.grad_norm:.3f}")


if __name__ == "__main__":
    main()
