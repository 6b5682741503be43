"""Gradients' memory stays between steps where activations are small, and no number of the step before is seen again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World
from shardwise.memory import gradient_memory
from shardwise.memory.gradient_memory import GradientMemory
from tests.ranks import RankPool

F32 = torch.float32


def step(memory: GradientMemory, resident: list[int], between: int, backward: int) -> list[int]:
    """Addresses of two buffers of 800 bytes together, with so many bytes resident at each look."""
    resident[0] = backward
    first, second = (memory.take(name, 100, F32) for name in "ab")
    found = [first.data_ptr(), second.data_ptr()]
    del first, second
    memory.give("a")
    resident[0] = between
    memory.give("b")
    return found


def test_kept_where_activations_take_an_eighth_or_less(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = [0]
    monkeypatch.setattr(gradient_memory, "resident_bytes", lambda: resident[0])
    memory = GradientMemory(torch.device("cpu"), mapped_bytes=0)
    step(memory, resident, 5000, 5000)
    assert memory.kept_bytes == 0, "nobody knows yet"
    kept = step(memory, resident, 5000, 5100)
    assert memory.kept_bytes == 800
    assert step(memory, resident, 5000, 5100) == kept
    step(memory, resident, 5000, 5101)
    assert memory.kept_bytes == 0
    step(memory, resident, 5000, 5100)
    assert memory.kept_bytes == 800
    memory.empty()
    assert memory.kept_bytes == 0


@pytest.mark.parametrize(
    "memory", [GradientMemory(torch.device("cpu")), GradientMemory(torch.device("meta"), mapped_bytes=0)]
)
def test_small_buffers_and_other_devices_are_left_to_their_allocators(memory: GradientMemory) -> None:
    for _ in range(3):
        memory.take("a", 100, F32)
        memory.give("a")
    assert memory.kept_bytes == 0


class Branches(nn.Module):
    """Its last part runs in every second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, is_long: bool) -> Tensor:
        for part in self.parts[: 3 if is_long else 2]:
            x = torch.tanh(part(x))
        return x.square().mean()


@contextmanager
def always_kept() -> Iterator[list[int]]:
    """... and full of NaN when they are taken again."""
    right, count = GradientMemory.give, [0]

    def give(self: GradientMemory, owner: Any) -> None:
        right(self, owner)
        if owner in self._kept:
            count[0] += 1
            self._kept[owner].fill_(torch.nan)

    with (
        patch.object(gradient_memory, "_MAPPED_BYTES", 0),
        patch.object(gradient_memory, "resident_bytes", lambda: 0),
        patch.object(GradientMemory, "give", give),
    ):
        yield count


def trained(world: World, config: dict[str, Any]) -> dict[str, Tensor]:
    model = Branches()
    shared = {"optimizer": {"type": "adamw", "lr": 0.01}, "max_grad_norm": 0.1}
    engine = shardwise.initialize(model, shared | config, world=world)
    rows = torch.randn(6, 2, 4, 5, generator=torch.Generator().manual_seed(world.rank))
    for number, batch in enumerate(rows):
        batches = [(each, number % 2 == 1) for each in batch]
        each = engine.config.batch.accumulation or 1
        engine.train_step(batches[:each])
    found = engine.state_dict()
    engine.close()
    return found


def both(world: World, configs: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    found = []
    for config in configs:
        with always_kept() as count:
            kept = trained(world, config)
        plain = trained(world, config)
        found.append((count[0], all(torch.equal(kept[name], plain[name]) for name in plain)))
    return found


ROWS: dict[int, list[tuple[int, int]]] = {1: [(0, 1), (0, 2)], 2: [(0, 2), (1, 1), (2, 2), (3, 2)]}
"""(stage, microbatches a step) by ranks."""


@pytest.mark.parametrize("size", ROWS)
def test_no_bit_changes(ranks: Callable[[int], RankPool], size: int) -> None:
    configs = [{"zero": {"stage": stage}, "batch": {"accumulation": count}} for stage, count in ROWS[size]]
    found = [both(World(0, 1), configs)] if size == 1 else ranks(size).run(both, configs)
    for rows in found:
        for config, (count, is_equal) in zip(configs, rows, strict=True):
            assert count > 0 and is_equal, (config, count)
