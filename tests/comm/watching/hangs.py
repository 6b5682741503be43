"""Ranks that hang on purpose, for tests of the doctor: ways to hang, and a job of which one rank hangs that way."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import shardwise
from shardwise.base.errors import CommError
from shardwise.comm.rendezvous.handshake import identity
from shardwise.comm.watching import watch
from shardwise.comm.watching.inquiry import inquire
from shardwise.comm.watching.verdict import JobVerdict
from shardwise.comm.world import World
from tests.ranks import RankPool

HANGS_AT = 5
"""Step in which the rank hangs."""
_FOREVER_S = 600


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def holding_the_interpreter() -> None:
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def asleep() -> None:
    time.sleep(_FOREVER_S)


class Layer(nn.Linear):
    """A layer that calls ``hang`` in its forward pass."""

    hang: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hang is not None:
            self.hang()
        return super().forward(x)


class Numbers(Dataset[torch.Tensor]):
    """Rows of ones, whose reader calls ``hang``."""

    hang: Callable[[], None] | None = None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.hang is not None:
            self.hang()
        return torch.ones(4)


IN_FORWARD = {"stopped": stopped, "gil": holding_the_interpreter, "lock": in_a_lock}
WAYS = (*IN_FORWARD, "reader", "skipped", "shape")
CONFIGS: dict[str, dict[str, Any]] = {
    "gloo": {"comm": {"transport": "torch"}},
    "shared": {"comm": {"transport": "shared_memory"}},
    "zero3": {"comm": {"transport": "torch"}, "zero": {"stage": 3}},
    "pipeline": {"mesh": {"pp": 2}, "batch": {"accumulation": 2}},
}


def hanging(world: World, way: str, who: int, config: dict[str, Any], folder: str, silent_s: float) -> None:
    """Train until rank ``who`` hangs, with the rings in ``folder``."""
    watch.SILENT_S = silent_s
    os.environ["SHARDWISE_FLIGHT"] = folder
    torch.manual_seed(0)
    net = nn.Sequential(Layer(4, 4), nn.Tanh(), Layer(4, 4), nn.Tanh(), Layer(4, 1))
    engine = shardwise.initialize(net, config, loss=lambda net, x: net(x).square().mean())
    data, count = Numbers(), engine.config.batch.accumulation or 1
    batches: Iterator[Any] = iter([])
    for step in range(1, HANGS_AT + 3):
        if step == HANGS_AT and world.rank == who:
            if way in IN_FORWARD:
                for layer in net:
                    layer.hang = IN_FORWARD[way]
            elif way == "reader":
                data.hang = asleep
        batches = (torch.stack([data[0], data[1]]) for _ in range(count))
        given = list(batches)
        try:
            is_odd = step == HANGS_AT and world.rank == who
            if way == "shape" or (way == "skipped" and not is_odd):
                probe = torch.ones(4 if is_odd else 3)
                engine._parts.site.groups["world"].all_reduce(probe, "a user's sum").wait()
            engine.train_step(given)
        except CommError:
            os._exit(1)
    time.sleep(_FOREVER_S)


def trial(
    pool: RankPool,
    way: str,
    who: int,
    config: dict[str, Any],
    folder: Path,
    after_s: float,
    silent_s: float = watch.SILENT_S,
) -> tuple[JobVerdict, JobVerdict]:
    """Return the verdicts on the job while it hangs and after all of its ranks are killed; the pool is lost."""
    caller = threading.Thread(
        target=lambda: _ignored(pool, way, who, config, str(folder), silent_s), daemon=True
    )
    caller.start()
    host = identity("").host
    end = time.monotonic() + after_s
    while time.monotonic() < end:
        time.sleep(0.2)
    alive = inquire(folder, host, {})
    while alive.state in ("running", "slow") and time.monotonic() < end + 30 - after_s:
        alive = inquire(folder, host, {})  # on a busy machine the ranks may hang later than asked
    for pid in pool.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in pool.pids if pid):
            break
        time.sleep(0.05)
    caller.join(10)
    return alive, inquire(folder, host, {})


def _ignored(pool: RankPool, *given: Any) -> None:
    try:
        pool.run(hanging, *given)
    except Exception:
        return


def is_right(found: JobVerdict, way: str, who: int) -> bool:
    """Return whether a verdict names the rank and the place."""
    if way in ("skipped", "shape"):
        return found.state == "mismatch" and found.rank == who and "hangs.py" in (found.where or "")
    if found.state != "hung" or found.rank != who:
        return False
    if way == "stopped":
        return found.step == HANGS_AT and (found.action or "").startswith("F(")
    name = {"gil": "holding_the_interpreter", "lock": "in_a_lock", "reader": "asleep"}[way]
    return name in (found.where or "") and found.phase == ("reading" if way == "reader" else "computing")
