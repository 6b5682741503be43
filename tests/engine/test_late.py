"""The parity layouts with late collectives: every bit as without, so no wait is missing and nothing is used in flight.

``pytest --late`` runs any test so; here are a few of each kind.
"""

import copy
import hashlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World
from shardwise.passes.absent import ExpectedParameter
from tests.comm import late
from tests.engine import test_experts, test_model_parallel, test_parity, test_tables_model_parallel

Row = tuple[Callable[[Any, Any], Any], Any]
Case = test_parity.Case
Model, Experts, Tables = test_model_parallel.Layout, test_experts.Layout, test_tables_model_parallel.Layout


def rows(size: int) -> list[Row]:
    """What is trained on ``size`` ranks, and how."""
    if size == 2:
        cases = [Case(stage, 1, 3, "adamw", "fp64") for stage in range(4)]
        cases += [Case(stage, 1, 1, "sgd", "fp32", "torch") for stage in (1, 3)]
        cases += [Case(stage, 1, 3, "adamw", "fp64", "torch", ahead=2) for stage in (1, 2, 3)]
        models = [
            Model(tp=2),
            Model(tp=2, overlap=7, microbatches=2),
            Model(pp=2, microbatches=2, schedule="interleaved_1f1b", virtual_stages=2),
        ]
        experts = [Experts(dp=2, ep=2, stage=3, recompute="full")]
        tables = [Tables(2, {"tp": 2})]
    else:
        cases = [Case(stage, 2, 3, "adamw", "fp64") for stage in (1, 3)]
        models = [Model(pp=4, microbatches=5, transport="torch")]
        experts = []
        tables = [Tables(4, {"dp": 2, "tp": 2}, "row", stage=3)]
    found: list[Row] = [(test_parity.measure, each) for each in cases]
    found += [(test_model_parallel.measure, each) for each in models]
    found += [(test_experts.measure, each) for each in experts]
    return found + [(test_tables_model_parallel.run, each) for each in tables]


def bits(world: World, row: Row) -> list[str]:
    """Of every step, and of what the run found."""
    measure, layout = row
    lines: list[str] = []

    def after(engine: Any, result: Any) -> None:
        digest = hashlib.sha256()
        for name, tensor in sorted(engine.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        lines.append(f"{result.loss.hex()} {result.grad_norm.hex()} {digest.hexdigest()}")

    def initialize(*args: Any, **keys: Any) -> Any:
        engine = initialized(*args, **keys)
        engine.on_step.append(after)
        return engine

    initialized = shardwise.initialize
    with patch.object(shardwise, "initialize", initialize):
        found = measure(world, layout)
    return [*lines, repr(found)]


def plain_and_late(world: World, size: int) -> list[tuple[str, list[str], list[str]]]:
    part, found = world.among(range(size)), []  # with transports of its own
    for row in rows(size):
        plain = bits(world, row)
        with late.installed():
            found.append((f"{row[0].__module__} {row[1]}", plain, bits(part, row)))
    part.release()
    return found


@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.soak)))
def test_every_bit_is_that_of_the_plain_run(ranks: Any, size: int) -> None:
    for found in ranks(size).run(plain_and_late, size):
        for name, plain, delayed in found:
            assert len(plain) > 2 and plain == delayed, name


def reads_between_steps(world: World, ahead: int) -> list[Tensor]:
    """A weight, read in every manner while its last update is on its way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    engine = shardwise.initialize(
        model,
        {"zero": {"stage": 2, "prefetch_bytes": ahead}, "optimizer": {"type": "sgd", "lr": 0.5}},
        loss=lambda model, x: model(x).square().mean(),
        world=world,
    )
    mean, seen = model[0].weight.detach().clone(), []
    readers: list[Callable[[nn.Parameter], Tensor]] = [
        lambda weight: weight.detach().clone(),
        lambda weight: weight.data.clone(),
        lambda weight: torch.from_numpy(weight.detach().numpy().copy()),
        lambda weight: torch.tensor(weight.tolist()),
        lambda weight: copy.deepcopy(weight).detach(),
        lambda weight: mean.lerp_(weight.detach(), 0.5).clone(),
        lambda weight: torch._foreach_mul([weight.detach()], 2.0)[0],
        lambda weight: engine.state_dict()["0.weight"],
    ]
    generator = torch.Generator().manual_seed(world.rank)
    for read in readers:
        engine.train_step([torch.randn(3, 4, generator=generator)])
        assert model[2].weight.shape == (2, 6)  # is no number
        assert isinstance(model[2].weight, ExpectedParameter) == bool(ahead)
        seen.append(read(model[0].weight))
        assert not isinstance(model[0].weight, ExpectedParameter)
    engine.close()
    assert type(model[2].weight) is nn.Parameter
    return [*seen, model[2].weight.detach().clone()]


def alike_between_steps(world: World) -> list[bool]:
    """With updates waited for, and on their way and late."""
    part = world.among(range(2))
    with late.installed():
        found = [reads_between_steps(part, ahead) for ahead in (0, 1)]
    part.release()
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


def test_whoever_looks_at_an_update_on_its_way_waits_for_it(ranks: Any) -> None:
    for equal in ranks(2).run(alike_between_steps):
        assert all(equal), equal


class Skips(nn.Module):
    """A block in the middle that data may go round."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        for place, block in enumerate(self.blocks):
            if place != 1 or not skips:
                x = torch.tanh(block(x))
        return x.square().mean()


def trained_with_skips(world: World, ahead: int, stage: int) -> list[Tensor]:
    """Rank 1 goes round the second block in every other step."""
    torch.manual_seed(0)
    config = {
        "zero": {"stage": stage, "prefetch_bytes": ahead, "units": ["blocks.*"]},
        "optimizer": {"type": "adamw", "lr": 0.1},
        "comm": {"transport": "torch"},
    }
    engine = shardwise.initialize(Skips(), config, loss=lambda model, given: model(*given), world=world)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(4):
        engine.train_step([(torch.randn(3, 4, generator=generator), bool(world.rank and step % 2))])
    found = list(engine.state_dict().values())
    engine.close()
    return found


def alike_with_skips(world: World, stage: int) -> list[bool]:
    """Updates that the next step's forward pass does not wait for on one rank."""
    part = world.among(range(2))
    with late.installed():
        found = [trained_with_skips(part, ahead, stage) for ahead in (0, 1)]
    part.release()
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize("stage", (1, 2))
def test_a_unit_that_data_skips_is_gathered_before_its_next_update(ranks: Any, stage: int) -> None:
    for equal in ranks(2).run(alike_with_skips, stage):
        assert all(equal), equal
