"""A model that draws random numbers of its own: the ranks that share it draw alike, however they were seeded."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World
from tests.engine.nets import seeded


def normal(x: Tensor) -> Tensor:
    return torch.randn_like(x)


def numpys(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(*x.shape)).to(x)


def pythons(x: Tensor) -> Tensor:
    return torch.full_like(x, random.gauss(0, 1))


class Block(nn.Module):
    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.linear, self.drops = nn.Linear(6, 6), drops

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * 0
        if self.drops:
            y = y * torch.rand_like(y)
        return x + y


class Denoiser(nn.Module):
    """Adds noise at the beginning, wants it back at the end: the loss is 0 where both are the same."""

    def __init__(self, draw: Any, drops: bool = False, own: int | None = None) -> None:
        super().__init__()
        self.draw = draw
        self.own = None if own is None else torch.Generator().manual_seed(own)
        self.blocks = nn.ModuleList(Block(drops) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        own = self.own
        noise = self.draw(x) if own is None else torch.randn(x.shape, generator=own, dtype=x.dtype)
        h = x + noise
        for block in self.blocks:
            h = block(h)
        return (h - x - noise).square().mean()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def losses(world: World, model: nn.Module, microbatches: int = 1, **pipeline: Any) -> list[float]:
    seed(100 + world.rank)
    config = {"mesh": {"pp": 2}, "batch": {"accumulation": microbatches}, "pipeline": pipeline}
    engine = shardwise.initialize(model, config, world=world)
    x = torch.ones(2, 6, dtype=torch.float64)
    found = [engine.train_step([x] * microbatches).loss for _ in range(3)]
    found.append(engine.evaluate([(x * 2, 1.0)]))
    engine.close()
    return found


def in_a_pipeline(world: World) -> None:
    for draw in (normal, numpys, pythons):
        assert losses(world, seeded(Denoiser, draw)) == pytest.approx([0.0] * 4, abs=1e-12), draw
    assert losses(world, seeded(Denoiser, normal, True), 3) == pytest.approx([0.0] * 4, abs=1e-12)
    assert losses(world, seeded(Denoiser, None, False, 7 + world.rank), 2) == pytest.approx(
        [0.0] * 4, abs=1e-12
    )
    interleaved = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
    found = losses(world, seeded(Denoiser, normal, True), 4, **interleaved)
    assert found == pytest.approx([0.0] * 4, abs=1e-12)


@pytest.mark.parametrize("story", [in_a_pipeline], ids=lambda story: story.__name__)
def test_two_ranks(ranks: Any, story: Any) -> None:
    ranks(2).run(story)
