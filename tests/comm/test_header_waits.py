"""A rank that waits for the header of a message is woken by the watch's verdict, over gloo and over the strict backend.

The wait lies inside gloo, which knows nothing of the verdict: on a device too, where a header is a tensor of the host.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import DeadlineError
from shardwise.comm.world import World
from tests.accelerator import pretend
from tests.comm.test_strict import DEVICE
from tests.comm.watching.test_watch import quickly, stuck_in_a_read
from tests.ranks import RankPool

LIMIT_S = 35.0
"""From the beginning of the wait: the watch's patience of 20 s, two questions, and the time to tell everybody."""
TRIES, AT_ONCE = 50, 5
KINDS = [
    "gloo",
    pytest.param("strict", marks=pytest.mark.skipif(not pretend.IS_POSSIBLE, reason="torch < 2.13")),
]


class Ended(NamedTuple):
    """How the wait of a rank ended."""

    seconds: float
    said: str


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = net(x).square().mean()
    return loss


def waits(world: World, fifo: str, is_quick: bool) -> Ended:
    """The second stage waits for the header of the first, which is stuck before the third step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    config = {"mesh": {"pp": 2}, "batch": {"accumulation": 2}, "comm": {"transport": "torch"}}
    said, began_s = "", 0.0
    with quickly() if is_quick else nullcontext():
        engine = shardwise.initialize(
            net, config | {"pipeline": {"shapes": "described"}}, loss=loss_of, world=world
        )
        try:
            for step in range(3):
                if step == 2 and world.rank == 0:
                    stuck_in_a_read(fifo)
                began_s = time.monotonic()
                engine.train_step([torch.ones(2, 4)] * 2)
        except DeadlineError as error:
            said = str(error)
        ended = Ended(time.monotonic() - began_s, said)
        if world.rank == 1:
            os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))  # the other one goes on
        engine.world.release()
    return ended


def tried(folder: Path, kind: str, number: int, is_quick: bool) -> Ended:
    """The wait of one job of its own."""
    fifo = folder / f"{kind}-{number}"
    os.mkfifo(fifo)
    pool = RankPool(2, backend="strict", device=DEVICE) if kind == "strict" else RankPool(2)
    try:
        _, ended = pool.run(waits, str(fifo), is_quick)
    finally:
        pool.close()
    return ended  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_ends_a_wait_for_a_header(kind: str, tmp_path: Path) -> None:
    """In scaled time."""
    ended = tried(tmp_path, kind, 0, True)
    assert "rank 0 has not moved" in ended.said and "in stuck_in_a_read" in ended.said


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_ends_every_wait_for_a_header(kind: str, tmp_path: Path) -> None:
    """Fifty of fifty, with the patience that users have."""
    with ThreadPoolExecutor(AT_ONCE) as jobs:
        found = list(jobs.map(lambda number: tried(tmp_path, kind, number, False), range(TRIES)))
    wrong = [each for each in found if "rank 0 has not moved" not in each.said or each.seconds > LIMIT_S]
    assert not wrong, f"{len(wrong)} of {TRIES}: {wrong[0]}"
