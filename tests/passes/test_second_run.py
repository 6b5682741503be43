"""What a recomputed block keeps outside of its buffers: put back where it is a generator, else refused by name."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import join
from tests.engine.nets import seeded


class Block(nn.Module):
    """A tanh of something that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6), kind
        self.calls, self.kept = 0, None
        self.own = torch.Generator().manual_seed(3)
        self.numpys = np.random.default_rng(3)
        self.pythons = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor: Any = 1.0
        if self.kind == "in place":
            x = x.mul_(1.5)
        elif self.kind == "counter":
            factor = float(self.calls)
        elif self.kind == "tensor":
            factor = 1.0 if self.kept is None else self.kept
            self.kept = x.detach()
        elif self.kind == "branch":
            x = torch.tanh(self.linear(x)) if self.calls % 2 else x
        elif self.kind == "random":
            factor = random.random() if random.random() < 0.9 else torch.exp(x)
        elif self.kind == "numpy":
            factor = np.random.rand()
        elif self.kind == "generators":
            noise = torch.rand(x.shape, generator=self.own, dtype=x.dtype)
            factor = noise + self.numpys.random() + self.pythons.random()
        return x + torch.tanh(torch.tanh(self.linear(x)) * factor)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def norms(kind: str, recompute: Any) -> list[float]:
    random.seed(5)
    np.random.seed(5)
    config = {"recompute": recompute, "optimizer": {"type": "sgd", "lr": 0.1}}
    engine = shardwise.initialize(seeded(Net, kind), config, world=join(quiet=True))
    x = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        return [engine.train_step([x]).grad_norm for _ in range(6)]
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["plain", "random", "numpy", "generators"])
def test_generators_are_put_back(kind: str) -> None:
    """Numbers of Python, numpy and of generators in attributes were drawn anew."""
    assert norms(kind, "full") == pytest.approx(norms(kind, "none"), rel=1e-12)
    selective = {"scope": "selective", "select": "operations"}
    assert norms(kind, selective) == pytest.approx(norms(kind, "none"), rel=1e-12)


@pytest.mark.parametrize("kind", ["counter", "tensor", "branch"])
def test_other_state_is_refused_by_name(kind: str) -> None:
    norms(kind, "none")
    with pytest.raises(UsageError, match=r"recompute: block blocks\.2 .* the second time.*register_buffer"):
        norms(kind, "full")


@pytest.mark.parametrize("recompute", ["full", {"scope": "selective", "select": "operations"}], ids=str)
def test_a_block_that_writes_over_its_input_is_named(recompute: Any) -> None:
    """torch said that a variable was modified by an inplace operation, in the backward pass, without the block."""
    with pytest.raises(
        UsageError, match=r"recompute: block blocks.0 writes over a tensor that it is given \(torch"
    ):
        norms("in place", recompute)
