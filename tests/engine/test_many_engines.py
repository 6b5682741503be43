"""Any number of engines in one job: overlapping lives, subsets of ranks, and nothing left behind.

A run with several models (actor and critic, teacher and student, folds of a sweep) calls ``initialize`` again and again
in one process. Meetings of the second and third once shared their keys in the store: ranks read each other's stale
offers, and hung, or one fell back to gloo and the other did not.
"""

import contextlib
import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.policy import CommPolicy
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.world import World
from tests.ranks import RankPool

LIVES = 4
ENGINES = 20


def build(world: World | None, seed: int, stage: int, **config: Any) -> shardwise.Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return shardwise.initialize(
        model,
        {"precision": "fp64", "zero": {"stage": stage}, **config},
        loss=lambda net, x: net(x).square().mean(),
        world=world,
    )


def stepped(engine: shardwise.Engine, rank: int, seed: int) -> float:
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    loss = engine(rows[rank :: engine.world.size])
    engine.backward(loss)
    result = engine.step()
    assert result is not None
    return result.loss


def alone(seed: int, steps: int, stage: int) -> list[float]:
    engine = build(World(0, 1), seed, stage)
    return [stepped(engine, 0, seed + step) for step in range(steps)]


def held() -> dict[str, Any]:
    """What this process holds that others, or the system, would miss."""
    return {
        "descriptors": sorted(kind for kind in map(target_of, os.listdir("/proc/self/fd")) if kind),
        "shared maps": Path("/proc/self/maps").read_text().count("/dev/shm"),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def target_of(descriptor: str) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0]
    except OSError:
        return ""  # the one that lists them
    written_down = f"{tempfile.gettempdir()}/#"  # stacks, in a file without a name
    looked_at = target.startswith(("/proc/", written_down)) or target.endswith("/store")
    return "" if looked_at else target  # by the watch of the pool's own world, at any time and not for long


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = held()
    yield
    gc.collect()
    after = held()
    # Engines of tests before this one may have been dropped: their descriptors go when the next engine is built.
    grown = Counter(after["descriptors"]) - Counter(before["descriptors"])
    assert not grown, f"{before} became {after}"
    assert after["threads"] == before["threads"] and after["shared maps"] <= before["shared maps"], after


def carriers(engine: shardwise.Engine) -> set[type]:
    return {type(each) for each in engine.world.links.transports.values()}


def many_lives(world: World) -> list[list[float]]:
    """Twenty engines, four of them alive at any time, each found in the environment as a user's would be."""
    living: list[tuple[int, shardwise.Engine]] = []
    losses: list[list[float]] = [[] for _ in range(ENGINES)]
    with nothing_left():
        for number in range(ENGINES):
            living.append((number, build(None, number, number % 4)))
            assert carriers(living[-1][1]) == {SharedMemoryTransport}
            for each, engine in living if number % 2 else reversed(living):
                losses[each].append(stepped(engine, world.rank, each + len(losses[each])))
            if len(living) == LIVES:
                living.pop(number % LIVES)[1].close()
        for _, engine in living:
            engine.close()
        del living, engine
    return losses


@pytest.mark.parametrize("size", [2, 4])
def test_twenty_engines_with_overlapping_lives(ranks: Callable[[int], RankPool], size: int) -> None:
    found = ranks(size).run(many_lives)
    assert all(each == found[0] for each in found)
    for number, losses in enumerate(found[0]):
        torch.testing.assert_close(losses, alone(number, len(losses), number % 4), rtol=1e-10, atol=0)


def on_subsets(world: World) -> dict[str, float]:
    """Engines on pairs, on three ranks and on all, alive together; no two ranks belong to the same of them."""
    losses = {}
    world.clock(CommPolicy())  # the watch is the job's, and goes on
    with nothing_left():
        whole = build(None, 1, 2)
        parts = {}
        for ranks in ((0, 1), (2, 3), (1, 2), (0, 2, 3), (0, 1), (1, 3)):
            if world.rank in ranks:
                part = world.among(ranks)
                name = "-".join(map(str, ranks)) + "'" * ("-".join(map(str, ranks)) in parts)
                parts[name] = build(part, 7, 3), part
                assert carriers(parts[name][0]) == {SharedMemoryTransport}
        for name in sorted(parts):
            engine, part = parts[name]
            losses[name] = stepped(engine, part.rank, 5)
        losses["all"] = stepped(whole, world.rank, 5)
        for engine, part in parts.values():
            engine.close()
            part.release()
        whole.close()
        del whole, parts, engine, part
    return losses


def test_engines_on_subsets_of_the_ranks(ranks: Callable[[int], RankPool]) -> None:
    found = ranks(4).run(on_subsets)
    engine = build(World(0, 1), 7, 0)
    seven = stepped(engine, 0, 5)
    engine = build(World(0, 1), 1, 0)
    one = stepped(engine, 0, 5)
    for losses in found:
        assert losses.pop("all") == pytest.approx(one, rel=1e-12)
        assert len(losses) >= 3
        # Three ranks have three, three and two rows, and a rank's mean counts as much as another's.
        three = losses.pop("0-2-3", None)
        assert three is None or three == pytest.approx(seven, rel=0.3)
        assert all(loss == pytest.approx(seven, rel=1e-12) for loss in losses.values())


def over_gloo(world: World) -> list[float]:
    """The same without shared memory: each engine has groups of its own, which end with it."""
    engines = [build(None, 3, stage, comm={"transport": "torch"}) for stage in (0, 1, 2, 3)]
    part = world.among(tuple(range(world.size))[:2]) if world.rank < 2 else None
    losses = [stepped(engine, world.rank, 5) for engine in engines]
    if part is not None:
        engines.append(build(part, 3, 3, comm={"transport": "torch"}))
        losses.append(stepped(engines[-1], part.rank, 5))
        engines.pop().close()  # before what it works over: at stage 3 closing gathers the weights
        part.release()
    for engine in engines:
        engine.close()
    return losses


def test_engines_over_gloo(ranks: Callable[[int], RankPool]) -> None:
    expected = stepped(build(World(0, 1), 3, 0), 0, 5)
    for losses in ranks(4).run(over_gloo):
        assert losses == pytest.approx([expected] * len(losses), rel=1e-12)
