"""Hung and dead ranks under the default configuration: after how many seconds is the rank named, and with its stack?

Two ranks of their own processes, with the store that rank 0 serves. One of them stops, is killed, sleeps, raises, or
holds the interpreter's lock, asleep or busy, before a call that the other one makes; the other one writes down when a
log line or an error first named it.

    python -m tests.engine.hung_campaign OUT [--tries N] [--only PART_OF_A_NAME] [--at_once N]
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import shardwise

LIMIT_S = 30.0
_PATIENCE_S = 150.0
_PORTS = itertools.count(20_000 + os.getpid() % 8_000)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps() -> None:
    time.sleep(_PATIENCE_S)


def raises() -> None:
    raise ValueError("a mistake of the user's")


def sleeps_with_the_lock() -> None:
    nothing_comes, _ = os.pipe()
    ctypes.PyDLL(None).read(nothing_comes, ctypes.create_string_buffer(1), ctypes.c_size_t(1))


def computes_with_the_lock() -> None:
    re.match("(a+)+$", "a" * 60 + "b")


def trains(engine: shardwise.Engine, folder: str) -> None:
    engine.train_step([torch.ones(2, 4)])


def saves(engine: shardwise.Engine, folder: str) -> None:
    engine.save(folder, asynchronous=False)


def saves_behind(engine: shardwise.Engine, folder: str) -> None:
    engine.save(folder, asynchronous=True)
    engine.wait_for_save()


def loads(engine: shardwise.Engine, folder: str) -> None:
    engine.load(folder)


class Case(NamedTuple):
    """One fault of one rank while the other one makes a call."""

    call: Callable[[shardwise.Engine, str], None]
    how: Callable[[], None]
    who: int

    def __str__(self) -> str:
        return f"{self.call.__name__}-{self.how.__name__}-{self.who}"

    @property
    def words(self) -> list[str]:
        """The words that one line of the other rank must hold."""
        if self.how is stops:
            return [f"rank {self.who} does not answer", "is stopped"]
        if self.how in (is_killed, raises):
            return [f"rank {self.who}", "ended"]
        if self.how is sleeps:
            return [f"rank {self.who} has not moved", "in sleeps"]
        return [f"rank {self.who} does not answer", f"in {self.how.__name__}"]


class Found(NamedTuple):
    """The time and the words in which a rank was named."""

    seconds: float | None
    said: str


CASES = [
    *(
        Case(call, how, who)
        for call in (saves, saves_behind, loads)
        for how in (stops, is_killed, sleeps, raises)
        for who in (0, 1)
    ),
    *(
        Case(call, how, who)
        for how in (sleeps_with_the_lock, computes_with_the_lock)
        for call in (trains, saves, saves_behind, loads)
        for who in (0, 1)
    ),
]


def be_rank(case: Case, rank: int, folder: Path) -> None:
    """One rank of the job, which ends with this call at the latest."""
    says: list[str] = []

    def heard(line: str) -> None:
        says.append(line)
        if rank != case.who and all(word in line for word in case.words):
            began_s = float((folder / "began").read_text())
            (folder / "found").write_text(json.dumps([time.monotonic() - began_s, line]))
            os._exit(0)

    handler = logging.Handler()
    handler.emit = lambda record: heard(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    engine = shardwise.initialize(net, {}, loss=lambda net, x: net(x).square().mean())
    for _ in range(2):
        trains(engine, "")
    saves(engine, str(folder / "run"))
    trains(engine, "")
    if rank == case.who:
        (folder / "began").write_text(str(time.monotonic()))
        case.how()
    try:
        case.call(engine, str(folder / "run"))
    except Exception as error:
        heard(str(error))
    (folder / "unnamed").write_text("\n".join(says))


def one(case: Case) -> Found:
    """Run one case."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), _free_port()
        pids = [_forked(case, rank, folder, port) for rank in (0, 1)]
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s and not os.waitpid(pids[1 - case.who], os.WNOHANG)[0]:
            time.sleep(0.1)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if (folder / "found").exists():
            return Found(*json.loads((folder / "found").read_text()))
        said = [path.read_text() for path in sorted(folder.glob("*")) if path.is_file()]
        return Found(None, "\n".join(said))


def _free_port() -> int:
    """Return a port that no other case of this campaign takes.

    The ports lie below those that the system gives out: another case's connections never take one in between.
    """
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as listening:
            listening.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the numbers never end")


def _forked(case: Case, rank: int, folder: Path, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    code = 1
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        be_rank(case, rank, folder)
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def main() -> None:
    """Run the campaign; a line for each case, and each failure, in OUT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--at_once", type=int, default=4)
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in str(case)]
    jobs: list[Case] = [case for _ in range(given.tries) for case in cases]
    bad = 0
    with given.out.open("a") as out, ThreadPoolExecutor(given.at_once) as pool:
        found: dict[str, list[float]] = {}
        for case, result in zip(jobs, pool.map(one, jobs), strict=True):
            is_good = result.seconds is not None and result.seconds <= LIMIT_S
            bad += not is_good
            found.setdefault(str(case), []).append(-1.0 if result.seconds is None else result.seconds)
            if is_good:
                out.write(f"{case} {result.seconds:.1f}\n")
            else:
                out.write(f"BAD {case} {result.seconds}\n{result.said}\n")
            out.flush()
        for name, seconds in found.items():
            out.write(f"{name}: {' '.join(f'{each:.1f}' for each in seconds)}\n")
        out.write(f"{len(jobs) - bad} of {len(jobs)} named within {LIMIT_S:.0f} s\n")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
