"""A rank that hangs or dies where the others wait for its word over the store (save, wait_for_save, load) is named with
its stack, and a call that one rank makes alone is said to be collective, on all ranks.

Each waited 900 s without a word before. Times are scaled here; ``make soak`` has the default ones.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import ShardwiseError
from shardwise.checkpoint.files import FileSystem
from shardwise.comm import step_clock
from shardwise.comm.watching import questions, verdict, waits, watch
from shardwise.comm.world import World
from tests.engine import hung_campaign
from tests.ranks import RankPool, RanksError


@contextlib.contextmanager
def quickly(patience_s: float = 1.0) -> Iterator[None]:
    """The watch of this process in scaled time.

    Engines of earlier tests are collected first, with their threads.
    """
    gc.collect()
    patch = pytest.MonkeyPatch()
    patch.setattr(step_clock, "PATIENCE_S", patience_s)
    patch.setattr(step_clock, "FIRST_STEP_S", patience_s)
    for module, name, value in (
        (watch, "_TICK_S", 0.1),
        (waits, "SOON_S", 0.4),
        (verdict, "SOON_S", 0.4),
        (watch, "ANSWER_S", 0.7),
        (questions, "ANSWER_S", 0.7),
        (watch, "_AGAIN_S", 0.2),
    ):
        patch.setattr(module, name, value)
    try:
        yield
    finally:
        patch.undo()


def in_a_read(fifo: str) -> None:
    with open(fifo) as nobody_writes:
        nobody_writes.read()


def stopped(fifo: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def asleep_with_the_lock(fifo: str) -> None:
    """No thread of Python runs in this process meanwhile."""
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    held = os.open(fifo, os.O_WRONLY)  # else a read finds the end at once
    ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), ctypes.c_size_t(1))
    os.close(held)
    os.close(descriptor)


def wake(fifo: str, pid: int) -> None:
    """Let the hung rank go on."""
    with contextlib.suppress(OSError):
        end = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        os.write(end, b".")
        os.close(end)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def build(stage: int = 0, **config: Any) -> shardwise.Engine:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return shardwise.initialize(
        net, {"zero": {"stage": stage}, **config}, loss=lambda net, x: net(x).square().mean()
    )


def another(world: World, config: dict[str, Any]) -> shardwise.Engine:
    return shardwise.initialize(
        nn.Linear(4, 1), config, loss=lambda net, x: net(x).square().mean(), world=world
    )


def step(engine: shardwise.Engine) -> None:
    engine.train_step([torch.ones(2, 4)])


def save_in_front(engine: shardwise.Engine, folder: str) -> None:
    engine.save(folder, asynchronous=False)


def save_behind_and_wait(engine: shardwise.Engine, folder: str) -> None:
    engine.save(folder, asynchronous=True)
    engine.wait_for_save()


def load(engine: shardwise.Engine, folder: str) -> None:
    engine.load(folder)


def hung(
    world: World,
    call: Callable[..., None],
    how: Callable[..., None],
    who: int,
    folder: str,
    fifo: str,
    pids: list[int],
) -> str:
    """Return what this rank's ``call`` raised while rank ``who`` did ``how`` before its own.

    A call is limited by its own engine, and not by another one on the same World that allows more. A background save
    may belong to any of them.
    """
    with quickly():
        engine = build()
        given = {"comm": {"timeout_s": 600.0}}
        other = None if call is save_behind_and_wait else another(engine.world, given)
        step(engine)
        engine.save(folder, asynchronous=False)
        step(engine)
        said = ""
        try:
            if world.rank == who:
                how(fifo)
            call(engine, folder)
        except ShardwiseError as error:
            said = f"{type(error).__name__}: {error}"
            Path(folder, f"said-{world.rank}").write_text(said)
        finally:
            if world.rank != who:
                wake(fifo, pids[who])
            engine.world.release()
            del other
    return said


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


@pytest.mark.parametrize("call", [save_in_front, save_behind_and_wait, load], ids=lambda call: call.__name__)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_hangs_is_named_with_its_stack(
    ranks: Callable[[int], RankPool], fifo: str, tmp_path: Path, call: Callable[..., None], who: int
) -> None:
    pool = ranks(2)
    said = pool.run(hung, call, in_a_read, who, str(tmp_path / "run"), fifo, pool.pids)[1 - who]
    assert (
        f"rank {who} has not moved for" in said and "in in_a_read" in said and "test_hung_saving.py" in said
    )


@pytest.mark.parametrize("who", [0, 1])
def test_a_stopped_rank_is_named(
    ranks: Callable[[int], RankPool], fifo: str, tmp_path: Path, who: int
) -> None:
    pool = ranks(2)
    said = pool.run(hung, save_in_front, stopped, who, str(tmp_path / "run"), fifo, pool.pids)[1 - who]
    assert f"rank {who} does not answer: its process {pool.pids[who]} is stopped" in said


@pytest.mark.parametrize("call", [save_in_front, load], ids=lambda call: call.__name__)
def test_a_rank_that_holds_the_interpreters_lock_is_named_with_its_stack(
    ranks: Callable[[int], RankPool], fifo: str, tmp_path: Path, call: Callable[..., None]
) -> None:
    pool = ranks(2)
    said = pool.run(hung, call, asleep_with_the_lock, 1, str(tmp_path / "run"), fifo, pool.pids)[0]
    assert "rank 1 does not answer: its process" in said and "sleeps (state S)" in said
    assert "in asleep_with_the_lock" in said and "PyDLL(None).read" in said


def killed(fifo: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("call", [save_in_front, save_behind_and_wait, load], ids=lambda call: call.__name__)
def test_a_rank_that_is_killed_is_named_at_once(fifo: str, tmp_path: Path, call: Callable[..., None]) -> None:
    pool = RankPool(2)
    with pytest.raises(RanksError, match="rank 1: the process ended"):
        pool.run(hung, call, killed, 1, str(tmp_path / "run"), fifo, pool.pids)
    said = (tmp_path / "run" / "said-0").read_text()
    assert "rank 1 ended and will not come" in said or "has ended" in said


class SlowFiles(FileSystem):
    """A disk of which one rank waits for the first write until another rank has said so."""

    fifo = ""

    def write_at(self, *args: Any) -> None:
        if self.fifo:
            fifo, self.fifo = self.fifo, ""
            in_a_read(fifo)
        super().write_at(*args)


def slow(world: World, folder: str, fifo: str, asynchronous: bool) -> list[str]:
    """Return what this rank logged while rank 1 was writing."""
    lines: list[str] = []
    told = threading.Event()
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if "in in_a_read" in lines[-1] and not told.is_set():
            told.set()
            wake(fifo, os.getpid())

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    try:
        with quickly(0.5):
            engine = build(3)
            step(engine)
            files = SlowFiles()
            engine._parts.folders.at(Path(folder))._files = files
            files.fifo = fifo if world.rank else ""
            engine.save(folder, asynchronous=asynchronous)
            engine.wait_for_save()
            engine.world.release()
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    return lines


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in front", "behind"])
def test_a_slow_disk_is_no_hang(
    ranks: Callable[[int], RankPool], fifo: str, tmp_path: Path, asynchronous: bool
) -> None:
    lines, _ = ranks(2).run(slow, str(tmp_path / "run"), fifo, asynchronous)
    assert any(
        "rank 1 is at work on its own" in line and "phase 'write'" in line and "in_a_read" in line
        for line in lines
    )
    assert (tmp_path / "run" / "step_00000001" / "manifest.json").exists()


def alone(world: World, name: str, folder: str, config: dict[str, Any]) -> str:
    """Return what this rank raised when rank 0 alone made a call and the others trained on."""
    with quickly():
        engine = build(3, **config)
        step(engine)
        engine.save(folder, asynchronous=False)
        try:
            if engine.is_main:
                if name == "full_parameters":
                    with engine.full_parameters():
                        pass
                elif name in ("save", "load"):
                    getattr(engine, name)(folder)
                elif name == "evaluate":
                    engine.evaluate([(torch.ones(2, 4), None)])
                else:
                    getattr(engine, name)()
            else:
                while True:
                    step(engine)
        except ShardwiseError as error:
            return str(error)
        finally:
            engine.world.release()
    return ""


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
@pytest.mark.parametrize("name", ["save", "load", "state_dict", "full_parameters", "close", "evaluate"])
def test_a_call_of_one_rank_alone_is_said_to_be_collective_on_both(
    ranks: Callable[[int], RankPool], tmp_path: Path, name: str, transport: str
) -> None:
    told = ranks(2).run(alone, name, str(tmp_path / "run"), {"comm": {"transport": transport}})
    for said in told:
        assert f"engine.{name}() is collective: call it on all ranks" in said, told


def ends(world: World, folder: str) -> None:
    """Rank 0 saves alone, and the others end."""
    engine = build()
    step(engine)
    if world.rank:
        os._exit(0)
    try:
        engine.save(folder)
    except ShardwiseError as error:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "said").write_text(str(error))


def test_a_save_of_one_rank_alone_ends_when_the_others_have_ended(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="rank 1: the process ended"):
        RankPool(2).run(ends, str(tmp_path / "run"))
    said = (tmp_path / "run" / "said").read_text()
    assert "rank 1 ended" in said and "engine.save() is collective: call it on all ranks" in said


def loaded_and_gone(world: World, folder: str) -> None:
    """Rank 0, which serves the store, ends at once after a load."""
    engine = build()
    step(engine)
    engine.save(folder, asynchronous=False)
    engine.load(folder)
    if world.rank:
        time.sleep(0.2)
        Path(folder, "loaded").touch()
    os._exit(0)


def test_rank_0_ends_after_a_load_when_the_others_have_loaded(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        with pytest.raises(RanksError, match="the process ended"):
            RankPool(2).run(loaded_and_gone, str(folder))
        assert (folder / "loaded").exists()


@pytest.mark.soak
@pytest.mark.parametrize("case", hung_campaign.CASES, ids=str)
def test_a_rank_is_named_within_half_a_minute(case: hung_campaign.Case) -> None:
    """The times are the default ones and rank 0 serves the store; ``hung_campaign`` repeats the cases."""
    found = hung_campaign.one(case)
    assert found.seconds is not None and found.seconds <= hung_campaign.LIMIT_S, found
