"""State on a disk beside what else a model and its loop may be: the bits of a run in memory, step for step."""

import copy
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from shardwise.models import Gpt, GptPolicy
from tests.engine import tables_net
from tests.engine.test_offload import state_of

Found = tuple[list[str], dict[str, Tensor]]
UNITS = ["blocks.*"]


class Net(nn.Module):
    """Blocks, one of which data may go round, and a layer that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)
        self.extra, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, skips: bool = False, uses: bool = False) -> Tensor:
        for place, block in enumerate(self.blocks):
            if place != 1 or not skips:
                x = x + block(x)
        x = x + self.extra(x) if uses else x
        return self.out(x).square().mean()


class Twice(nn.Sequential):
    """A block that does not run its forward."""

    def twice(self, x: Tensor) -> Tensor:
        return x + self(x) + self[0](x)


class Methods(Net):
    """A model that calls it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(Twice(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor, skips: bool = False, uses: bool = False) -> Tensor:
        for block in self.blocks:
            x = block.twice(x)  # type: ignore[operator]
        return self.out(x).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def piece(world: World, step: int) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(7 * step + world.rank))


def ended(engine: Any) -> dict[str, Tensor]:
    """Its state, and no engine any more."""
    found = state_of(engine)
    engine.close()
    return found


def frozen_parts(world: World, offload: dict[str, Any], folder: str) -> Found:
    """A frozen block, and a frozen layer of another."""
    model = net()
    model.blocks[1].requires_grad_(False)
    model.blocks[2][0].requires_grad_(False)
    config = {"zero": {"stage": 3, "units": UNITS}, **offload}
    engine = shardwise.initialize(model, config, loss=lambda model, x: model(x), world=world)
    losses = [engine.train_step([piece(world, step)]).loss.hex() for step in range(3)]
    return losses, ended(engine)


def unused_parts(world: World, offload: dict[str, Any], folder: str) -> Found:
    """Parameters without a gradient split the moments; a save and a load in between."""
    config = {"zero": {"stage": 3, "units": UNITS}, "optimizer": {"type": "adamw", "lr": 0.1}, **offload}
    engine = shardwise.initialize(net(), config, loss=lambda model, given: model(*given), world=world)

    def steps(first: int) -> list[str]:
        given = [(piece(world, step), step % 2 == 1, step == 2) for step in range(first, first + 4)]
        return [engine.train_step([each]).loss.hex() for each in given]

    losses = steps(0)
    engine.save(f"{folder}/{len(offload)}{len(offload.get('offload', {}))}")
    engine.load(f"{folder}/{len(offload)}{len(offload.get('offload', {}))}")
    return [*losses, *steps(4)], ended(engine)


def own_loop(world: World, offload: dict[str, Any], folder: str) -> Found:
    """torch's optimizer with groups and a scheduler; evaluations and reads between steps."""
    model = net()
    rest = [*model.out.parameters(), *model.extra.parameters()]
    groups = [{"params": model.blocks.parameters(), "lr": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    config = {"zero": {"stage": 3, "units": UNITS}, "batch": {"accumulation": 2}, **offload}
    engine = shardwise.initialize(model, config, optimizer=optimizer, world=world)
    seen = []
    for number in range(6):
        loss = engine(piece(world, number))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item().hex())
        if number % 2:
            scheduler.step()
        with torch.no_grad():
            seen.append(engine(piece(world, 100 + number)).item().hex())
        with engine.full_parameters() as whole:
            seen.append(whole["out.weight"].sum().item().hex())
    return seen, ended(engine)


def methods(world: World, offload: dict[str, Any], folder: str) -> Found:
    """Weights that are used by way of another method than forward, where nothing but a tier gives them windows."""
    config = {"zero": {"stage": 0, "units": UNITS, "forward_methods": ["blocks.*.twice"]}, **offload}
    engine = shardwise.initialize(Methods(), config, loss=lambda model, x: model(x), world=world)
    return [engine.train_step([piece(world, step)]).loss.hex() for step in range(3)], ended(engine)


def experts(world: World, offload: dict[str, Any], folder: str) -> Found:
    torch.manual_seed(0)
    policy = GptPolicy(layers=2, width=8, heads=2, hidden=8, context=6, vocab=11, experts={"count": 4})
    config = {"mesh": {"ep": world.size}, "zero": {"stage": 3}, "check_first_step": "off", **offload}
    engine = shardwise.initialize(Gpt(policy), config, world=world)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(3 * step + world.rank)
        tokens = torch.randint(0, 11, (2, 7), generator=generator)
        losses.append(engine.train_step([{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}]).loss.hex())
    return losses, ended(engine)


def tables(world: World, offload: dict[str, Any], folder: str) -> Found:
    torch.manual_seed(0)
    engine = shardwise.initialize(tables_net.Net({}), {"zero": {"stage": 3}, **offload}, world=world)
    steps = range(world.rank, 3 * world.size, world.size)
    return [engine.train_step([tables_net.batch(step)]).loss.hex() for step in steps], ended(engine)


STORIES: list[Callable[[World, dict[str, Any], str], Found]] = [
    frozen_parts,
    unused_parts,
    own_loop,
    methods,
    experts,
    tables,
]


def unlike(world: World, folder: str) -> dict[str, list[str]]:
    """Of each story what differs from the run in memory."""
    disk = {"optimizer": "disk", "disk_path": f"{folder}/disk"}
    found: dict[str, list[str]] = {}
    for story in STORIES:
        losses, plain = story(world, {}, folder)
        for offload in (disk, {**disk, "parameters": "disk"}):
            again, moved = story(world, {"offload": offload}, folder)
            others = [name for name, tensor in plain.items() if not torch.equal(tensor, moved[name])]
            others += ["losses"] * (again != losses)
            found[f"{story.__name__} {len(offload)}"] = others
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_the_same_bits(ranks: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "disk").mkdir()
    for found in ranks(size).run(unlike, str(tmp_path)):
        assert found == {name: [] for name in found} and len(found) == 2 * len(STORIES)


def test_a_weight_elsewhere_is_named(tmp_path: Path) -> None:
    """What one rank keeps on a disk was said to lie in pieces on all ranks at stage 3."""
    offload = {"optimizer": "disk", "parameters": "disk", "disk_path": str(tmp_path)}
    engine = shardwise.initialize(net(), {"offload": offload}, loss=lambda model, x: model(x))
    for habit in (engine.module.state_dict, lambda: copy.deepcopy(engine.module)):
        with pytest.raises(UsageError, match="with offload.parameters: disk the weights lie there"):
            habit()
    with pytest.raises(
        UsageError, match=r"with offload.parameters weights .* edit them, inside engine.full_para"
    ):
        engine.module.out.weight.data = torch.zeros(1, 8)
    engine.close()


def test_an_engine_that_nobody_closed(tmp_path: Path) -> None:
    """It stayed to the end of the process, with all its memory, threads and files: no collector looks into hooks on
    parameters."""
    offload = {"optimizer": "disk", "parameters": "disk", "disk_path": str(tmp_path)}
    for config in ({}, {"offload": offload}):
        engine = shardwise.initialize(net(), config, loss=lambda model, x: model(x))
        engine.train_step([torch.ones(3, 8)])
        gone = weakref.ref(engine), weakref.ref(engine._parts), weakref.ref(engine.module)
        del engine
        gc.collect()
        assert [each() for each in gone] == [None] * 3
    until = time.monotonic() + 60
    while any(tmp_path.iterdir()):  # the threads have what is under way in hand
        assert time.monotonic() < until, list(tmp_path.iterdir())
        time.sleep(0.01)
        gc.collect()
