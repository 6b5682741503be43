"""Data that ends earlier on one rank than on the others is said to, on all ranks, and loaders end with their users."""

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import shardwise
from shardwise.base.errors import CommError
from shardwise.comm.world import World
from tests.engine.state.test_hung_saving import quickly
from tests.ranks import RankPool


class Stream(IterableDataset[Tensor]):
    def __init__(self, items: int):
        self._items = items

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(4)] * self._items)


def build(world: World | None = None) -> shardwise.Engine:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    return shardwise.initialize(
        net, {"batch": {"micro_size": 2}}, loss=lambda net, x: net(x).square().mean(), world=world
    )


def epochs(world: World, kind: str, items: list[int], steps: bool) -> tuple[int, str]:
    """Return how many steps this rank made in two passes, and what it raised."""
    with quickly():
        engine = build()
        count = items[world.rank]
        loader = engine.loader(Stream(count) if kind == "stream" else [torch.ones(4)] * count)
        made = 0
        try:
            for _ in range(2):
                if steps:
                    for batches in loader.steps():
                        engine.train_step(batches)
                        made += 1
                else:
                    for batch in loader:
                        engine.backward(engine(batch))
                        engine.step()
                        made += 1
        except CommError as error:
            return made, str(error)
        finally:
            engine.world.release()
    return made, ""


@pytest.mark.parametrize("steps", [False, True], ids=["batches", "steps"])
@pytest.mark.parametrize("kind", ["stream", "dataset"])
def test_data_of_unlike_length_is_refused_on_all_ranks(
    ranks: Callable[[int], RankPool], kind: str, steps: bool
) -> None:
    """The shorter rank went on or ended well, and the other one said that a rank had left."""
    for _, said in ranks(2).run(epochs, kind, [16, 24], steps):
        assert "the end of a pass over engine.loader() after " in said
        assert "The data ends after unlike numbers of steps on the ranks" in said


def test_data_of_like_length_is_taken(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(epochs, "stream", [16, 16], False)
    assert first == second and first[1] == ""


def alone(world: World) -> int:
    """Return what rank 0 alone counts in a pass that trains nothing."""
    with quickly():
        engine = build()
        loader = engine.loader([torch.ones(4)] * 16)
        count = sum(1 for _ in loader) if world.rank == 0 else 4
        engine.world.release()
    return count


def test_a_pass_that_trains_nothing_is_one_ranks_own(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(alone) == [4, 4]


def test_a_loader_that_nobody_has_ends_its_workers() -> None:
    """A loop that made a loader for each epoch and broke out of it kept a worker of each."""
    engine = build(World(0, 1))
    before = len(multiprocessing.active_children())
    for _ in range(3):
        data: Any = DataLoader([torch.ones(4)] * 16, batch_size=2, num_workers=1)
        for batch in engine.loader(data):
            engine.backward(engine(batch))
            engine.step()
            break
        gc.collect()
        assert len(multiprocessing.active_children()) == before
    assert [each["step"] for each in engine._loaders.positions()] == [1, 1, 1]
    engine.close()
