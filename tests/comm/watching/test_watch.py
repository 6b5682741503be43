"""A rank that keeps the others waiting is named, with its Python stack, by all that wait; one at work is not ended.

Times are scaled here: what takes 20 s in a run takes 1 s. ``make soak`` has the default ones.
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import CommError, DeadlineError
from shardwise.comm import step_clock
from shardwise.comm.rendezvous.handshake import RankIdentity
from shardwise.comm.watching import watch
from shardwise.comm.watching.recorder import Recorder, RingOwner, ring_path
from shardwise.comm.watching.rings import read_answer
from shardwise.comm.world import World, join
from tests.ranks import RankPool


@contextmanager
def quickly() -> Iterator[None]:
    """The watch of this process in scaled time."""
    before = step_clock.PATIENCE_S, step_clock.FIRST_STEP_S, watch._TICK_S
    step_clock.PATIENCE_S = step_clock.FIRST_STEP_S = 1.0
    watch._TICK_S = 0.1
    try:
        yield
    finally:
        step_clock.PATIENCE_S, step_clock.FIRST_STEP_S, watch._TICK_S = before


def stuck_in_a_read(fifo: str) -> None:
    """Until the others have had enough."""
    with open(fifo) as nobody_writes:
        nobody_writes.read()


def stuck_in_a_lock(fifo: str) -> None:
    waker = threading.Thread(target=stuck_in_a_read, args=(fifo,))
    waker.start()
    waker.join()


def at_work(fifo: str) -> None:
    """Until another rank has said so."""
    end, told = time.monotonic() + 30, os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while time.monotonic() < end and not select.select([told], [], [], 0)[0]:
            sum(range(1000))
    finally:
        os.close(told)


def tell(fifo: str) -> None:
    """One that is at work."""
    line = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    os.write(line, b".")
    os.close(line)


def stopped(fifo: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wake(fifo: str, pid: int) -> None:
    """Let the hung rank go on."""
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))
    os.kill(pid, signal.SIGCONT)


def hanging(
    world: World, how: Callable[..., None], who: int, config: dict[str, Any], pids: list[int], fifo: str
) -> tuple[str, list[str]]:
    """What this rank's step raised, and what it logged; rank ``who`` does ``how`` before its third step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    lines: list[str] = []
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if how is at_work and "at work" in lines[-1]:
            tell(fifo)

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    said = ""
    with quickly():
        engine = shardwise.initialize(net, config, loss=lambda net, x: net(x).square().mean())
        count = engine.config.batch.accumulation or 1
        try:
            for step in range(4):
                if step == 2 and world.rank == who:
                    how(fifo)
                engine.train_step([torch.ones(2, 4)] * count)
        except CommError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            if world.rank != who:
                wake(fifo, pids[who])
            engine.world.release()
            logging.getLogger("shardwise").removeHandler(handler)
    return said, lines


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


TORCH, SHARED = {"comm": {"transport": "torch"}}, {"comm": {"transport": "shared_memory"}}
PIPELINE = {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}


@pytest.mark.parametrize(
    ("how", "who", "config"),
    [
        (stuck_in_a_lock, 1, SHARED),
        (stuck_in_a_read, 0, TORCH),
        (stuck_in_a_lock, 1, TORCH | PIPELINE),
        (stuck_in_a_lock, 0, SHARED | PIPELINE),
    ],
    ids=["shared memory", "gloo", "pipeline over gloo", "pipeline"],
)
def test_a_hung_rank_is_named_with_its_stack(
    ranks: Callable[[int], RankPool], fifo: str, how: Callable[..., None], who: int, config: dict[str, Any]
) -> None:
    pool = ranks(2)
    told = pool.run(hanging, how, who, config, pool.pids, fifo)
    said, _ = told[1 - who]
    assert said.startswith(f"DeadlineError: rank {1 - who}: ")
    assert f"rank {who} has not moved for" in said and how.__name__ in said and "test_watch.py" in said


def test_a_stopped_rank_is_named_as_not_answering(ranks: Callable[[int], RankPool], fifo: str) -> None:
    pool = ranks(2)
    said, _ = pool.run(hanging, stopped, 1, SHARED, pool.pids, fifo)[0]
    assert "rank 1 does not answer: its process" in said and "is stopped" in said


@pytest.mark.parametrize("config", [SHARED, TORCH], ids=["shared memory", "gloo"])
def test_a_rank_at_work_is_named_and_waited_for(
    ranks: Callable[[int], RankPool], fifo: str, config: dict[str, Any]
) -> None:
    """From outside a long computation and an endless loop look alike: neither ends the job before its deadline."""
    pool = ranks(2)
    (said, lines), _ = pool.run(hanging, at_work, 1, config, pool.pids, fifo)
    assert said == ""
    assert any("rank 1 is alive and at work" in line and "in at_work" in line for line in lines)


def test_a_number_for_the_deadline_is_kept(ranks: Callable[[int], RankPool], fifo: str) -> None:
    """It ends the job then, and says what was found before."""
    pool = ranks(2)
    config = {"comm": {"transport": "torch", "timeout_s": 2.0}}
    said, _ = pool.run(hanging, stuck_in_a_lock, 1, config, pool.pids, fifo)[0]
    assert "did not arrive within 2 s" in said and "comm.timeout_s" in said
    assert "When last asked: rank 1 has not moved" in said and "stuck_in_a_lock" in said


def crossed(world: World) -> str:
    """Two engines, stepped in another order on each rank."""
    with quickly():
        whole = join(quiet=True)
        engines = [
            shardwise.initialize(
                nn.Linear(2, 1), SHARED, loss=lambda net, x: net(x).square().mean(), world=whole.among((0, 1))
            )
            for _ in range(2)
        ]
        try:
            for engine in engines:
                engine.train_step([torch.ones(2, 2)])
            for engine in engines if world.rank else reversed(engines):
                engine.train_step([torch.ones(2, 2)])
        except DeadlineError as error:
            return str(error)
        finally:
            for engine in engines:
                engine.world.release()
            whole.release()
    return ""


def test_ranks_that_wait_for_one_another_are_told_so(ranks: Callable[[int], RankPool]) -> None:
    for said in ranks(2).run(crossed):
        assert "all ranks wait for one another" in said
        assert "rank 0: all_reduce of" in said and "rank 1: all_reduce of" in said


def test_what_is_found_of_a_silent_rank_is_in_the_ring_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may be killed before the next look, and the doctor then has the stack from this ring alone."""
    monkeypatch.setattr(watch, "silent_seconds", lambda path: 9.0)
    owner = RingOwner(1, 2, "host 1 2")
    made = watch.Watchdog(
        1,
        [RankIdentity(owner.host, os.getpid(), "")] * 2,
        cast(Any, None),
        "watch",
        watch.FlightFolder(tmp_path, False),
    )
    made._doings.recorder = Recorder(ring_path(tmp_path, 1), owner)
    monkeypatch.setattr(made, "_seen_from_outside", lambda rank: (False, "its process 7 sleeps"))
    made._look_at_silent()
    answer = read_answer(ring_path(tmp_path, 1))
    assert answer is not None and answer.story == "rank 0 does not answer: its process 7 sleeps"
