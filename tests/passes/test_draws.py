"""A model that draws random numbers of its own: the ranks that share it draw alike, however they were seeded."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.base.errors import PlanError, UsageError
from shardwise.comm.world import World
from tests.engine.nets import LLAMA, seeded
from tests.engine.test_model_parallel import Layout, config_of, model_of


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


def along_tp(world: World) -> None:
    """Noise on whole tensors is right; noise on slices is refused with a text that names random numbers."""
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))
    layout = Layout(tp=2)

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(*batch)
        return loss * (1 + torch.rand(()))

    seed(100 + world.rank)
    engine = shardwise.initialize(model_of(layout), config_of(layout), world=world, loss=noisy)
    for _ in range(3):
        engine.train_step([(tokens, tokens)])
    engine.close()
    for check in ("auto", "off"):
        model = model_of(layout)
        model.blocks[1].attention_norm.register_forward_hook(
            lambda *a: a[2] * torch.rand(a[2].shape[:2])[..., None]
        )
        engine = shardwise.initialize(model, config_of(layout, check), world=world)
        if check == "auto":
            with pytest.raises(PlanError, match="draws random numbers"):
                engine.train_step([(tokens, tokens)])
        engine.close()


def functional_dropout(world: World) -> None:
    """A mask that is drawn in the shape of a rank's tokens is no slice of the whole mask: refused by that name."""
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))
    layout = Layout(tp=2)
    model = model_of(layout)
    model.blocks[1].attention_norm.register_forward_hook(lambda *a: functional.dropout(a[2], 0.5))
    seed(100 + world.rank)
    engine = shardwise.initialize(model, config_of(layout), world=world)
    with pytest.raises(
        PlanError, match=r"draws random numbers .* use nn.Dropout, or draw in the shape of the"
    ):
        engine.train_step([(tokens, tokens)])
    engine.close()


class HeadFirst(Denoiser):
    """Registers its head in front of its blocks, so that the first stage has what the last one needs."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.head = nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block(False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def absent_at_the_top(world: World) -> None:
    """The error named a line of this package, not the one of the model or the loss."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(x)
        return result + 1.0 if result > 0 else result

    for function in (None, loss):
        config = {"mesh": {"pp": 2}, "pipeline": {"partition": ["blocks.2"]}}
        with pytest.raises((PlanError, UsageError)) as error:
            engine = shardwise.initialize(seeded(HeadFirst), config, world=world, loss=function)
            engine.train_step([torch.ones(2, 6, dtype=torch.float64)])
        said = str(error.value)
        assert "head" in said and "shardwise/plan/" not in said and "test_draws.py:" in said, said


class Chain(Denoiser):
    """Uses its input at the beginning alone."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gradient_penalty(world: World) -> None:
    """It is with respect to the input, which the first stage alone uses."""

    def penalized(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss: Tensor = model(x)
        return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()

    engine = shardwise.initialize(
        seeded(Chain, torch.zeros_like), {"mesh": {"pp": 2}}, world=world, loss=penalized
    )
    with pytest.raises(
        (PlanError, UsageError), match="Inputs of the model are used on the first stage alone"
    ):
        engine.train_step([torch.ones(2, 6, dtype=torch.float64)])
    engine.close()


def rounds_to_fp32(world: World) -> None:
    """An fp64 LLaMA, which rounds to fp32 inside, with unlike numbers of labels in the microbatches: not refused."""
    config = transformers.LlamaConfig(vocab_size=19, use_cache=False, **LLAMA)
    model = seeded(transformers.LlamaForCausalLM, config)
    tokens = torch.randint(0, 19, (2, 2, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :, 2:] = -100
    engine = shardwise.initialize(model, {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}, world=world)
    engine.train_step([{"input_ids": tokens[i], "labels": labels[i]} for i in range(2)])
    engine.close()


@pytest.mark.parametrize(
    "story",
    [in_a_pipeline, along_tp, functional_dropout, absent_at_the_top, gradient_penalty, rounds_to_fp32],
    ids=lambda story: story.__name__,
)
def test_two_ranks(ranks: Any, story: Any) -> None:
    ranks(2).run(story)
