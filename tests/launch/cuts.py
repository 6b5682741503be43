"""Jobs on several hosts that lose their launcher, an ssh session or the cable, or of which a rank fails, as drawn.

One drawing and one judging for all back ends: after a cut no rank is left on any host within eight seconds; after a
failure the rank, its host and its traceback come first within ten seconds.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.namespaces import NamespaceHost

LIMIT_S = 8.0
"""Seconds from a cut until no rank is left."""
FAILURE_S = 10.0
"""Seconds from a failure until the launcher has shown it and has ended."""
WAITING = """
import json, os, resource, signal, sys, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(__file__).parent
(here / f"rank.{rank}").write_text(str(os.getpid()))
while len(list(here.glob("rank.*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)

def work():
    time.sleep(0.02)

"""
TRAINING = (
    WAITING
    + """
import torch
from torch import nn
import shardwise

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
config = {"zero": {"stage": 3}, "batch": {"duplicates": "allow"}, "comm": {"device": "cpu"}}
config["check_first_step"] = "off"
engine = shardwise.initialize(net, config, loss=lambda net, x: net(x).square().mean())

def work():
    engine.train_step([torch.ones(4, 64)])

"""
)
"""Ranks that train over the cable: the others are in a collective when one of them fails."""
FOREVER = """
for step in range(1_000_000):
    work()
    if step == 3:
        (here / f"step.{rank}").touch()
"""
FAILURES = {
    "raised": "raise ValueError('the cause')",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "memory, a limit of the process": (
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "most = pages * resource.getpagesize() + (200 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "held = []\n"
        "while True:\n"
        "    held.append(bytearray(1 << 20))"
    ),
    "memory, a limit of the host": "held = []\nwhile True:\n    held.append(b'x' * (1 << 20))",
}
"""What the rank that fails does, by kind."""


class HostsCluster(Protocol):
    """Hosts, a folder that all of them see, and a way to start a job there."""

    hosts: list[NamespaceHost]
    folder: Path


class DrawnCut(NamedTuple):
    """One drawn loss."""

    launcher: str
    way: str
    """What is lost: "launcher", "session", "server" or "cable"."""
    host: int
    """Host whose session, server or cable it is."""
    number: signal.Signals
    """Signal that ends what is lost."""
    moment: str
    """"start": the job starts; "wait": its ranks wait; "step": they train."""
    delay_s: float


def drawn_cuts(count: int, ways: dict[str, Sequence[str]]) -> Iterator[DrawnCut]:
    """Draw cuts; ``ways`` has what may be lost, by back end."""
    rng = random.Random(29)
    kinds = [(launcher, way) for launcher, each in ways.items() for way in each]
    for number in range(count):
        launcher, way = kinds[number % len(kinds)]
        moment = rng.choice(["start", "wait", "wait", "step"])
        ends = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        yield DrawnCut(launcher, way, rng.randrange(2), ends, moment, rng.uniform(0.0, 2.0))


def ranks_left(folder: Path) -> list[int]:
    """Return the ranks of programs in a folder on any host: namespaces of this machine share the list of processes."""
    mark, found = str(folder / "program.py").encode(), []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if mark in words and b"shardwise.launch.child" in words:
                    found.append(int(path.name))
    return found


def wait_for(folder: Path, pattern: str, count: int, job: "subprocess.Popen[str]") -> None:
    """Wait until ``count`` files of a job are there."""
    end = time.monotonic() + 90
    while len(list(folder.glob(pattern))) < count:
        assert job.poll() is None and time.monotonic() < end, job.communicate()
        time.sleep(0.02)


def write_program(cluster: HostsCluster, text: str) -> str:
    """Write the program of a job, remove the files of the job before, and return the path."""
    for pattern in ("rank.*", "step.*", "go"):
        for path in cluster.folder.glob(pattern):
            path.unlink()
    path = cluster.folder / "program.py"
    path.write_text(text)
    return str(path)


def seconds_until_gone(
    cluster: HostsCluster,
    cut: DrawnCut,
    start: Callable[[str], "subprocess.Popen[str]"],
    lose: Callable[[DrawnCut, "subprocess.Popen[str]"], None],
) -> float:
    """Return the seconds from a cut until no rank is left.

    Args:
        cluster: The hosts.
        cut: The cut.
        start: Function that starts the job of a program and returns its launcher.
        lose: Function that carries out the cut.
    """
    program = write_program(cluster, (TRAINING if cut.moment == "step" else WAITING) + FOREVER)
    job = start(program)
    if cut.moment != "start":
        wait_for(cluster.folder, "step.*" if cut.moment == "step" else "rank.*", 4, job)
    time.sleep(cut.delay_s)
    lose(cut, job)
    since = time.monotonic()
    try:
        if cut.moment == "start":
            time.sleep(LIMIT_S)  # ranks may still come, and have to go again
        while ranks_left(cluster.folder):
            assert time.monotonic() < since + LIMIT_S + 0.2, (cut, ranks_left(cluster.folder))
            time.sleep(0.02)
        return 0.0 if cut.moment == "start" else time.monotonic() - since
    finally:
        for host in cluster.hosts:
            host.ip("link", "set", host.interface, "up")
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=10)
        job.kill()
        job.communicate()


class DrawnFailure(NamedTuple):
    """One drawn failure of a rank of the second host."""

    launcher: str
    kind: str
    rank: int
    trains: bool
    delay_s: float


def drawn_failures(count: int, launchers: Sequence[str]) -> Iterator[DrawnFailure]:
    """Draw failures of every kind in turn."""
    rng = random.Random(29)
    for number in range(count):
        kind = list(FAILURES)[number % len(FAILURES)]
        trains = rng.random() < 0.5
        yield DrawnFailure(rng.choice(launchers), kind, rng.choice([2, 3]), trains, rng.uniform(0.0, 0.5))


def check_failure(
    cluster: HostsCluster,
    failure: DrawnFailure,
    start: Callable[[str], "subprocess.Popen[str]"],
    host_name: str,
) -> float:
    """Check that a failure is shown first, with its host and its traceback; return the seconds that this took."""
    fault = "".join(f"        {line}\n" for line in FAILURES[failure.kind].splitlines())
    text = (TRAINING if failure.trains else WAITING) + FOREVER
    text += f"    if rank == {failure.rank} and (here / 'go').exists():\n        time.sleep({failure.delay_s})\n{fault}"
    job = start(write_program(cluster, text))
    wait_for(cluster.folder, "step.*", 4, job)
    pid = int((cluster.folder / f"rank.{failure.rank}").read_text())
    with memory_limit(64 << 20) as group:
        if failure.kind == "memory, a limit of the host":
            (group / "cgroup.procs").write_text(str(pid))
        (cluster.folder / "go").touch()
        since = time.monotonic() + failure.delay_s
        _, said = job.communicate(timeout=60)
        took_s = time.monotonic() - since
    is_kill = failure.kind in ("killed", "memory, a limit of the host")
    assert job.returncode == (137 if is_kill else 1), (failure, job.returncode, said)
    first = next(line for line in said.splitlines() if "failed" in line)
    assert f"rank {failure.rank} on {host_name} failed" in first, (failure, said)
    words = {"raised": "ValueError: the cause", "memory, a limit of the process": "MemoryError"}
    assert words.get(failure.kind, "killed by SIGKILL") in first, (failure, said)
    assert is_kill or "Traceback" in said, (failure, said)
    assert took_s <= FAILURE_S, (failure, took_s)
    assert not ranks_left(cluster.folder), failure
    return took_s


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """Return the folder of a control group whose processes together take at most ``limit_bytes``; v1 or v2."""
    root = Path("/sys/fs/cgroup")
    is_second = (root / "cgroup.controllers").exists()
    group = (root if is_second else root / "memory") / f"shardwise_test_{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        yield group
    finally:
        for _ in range(100):  # the kernel keeps a group until its last process has gone
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def popen(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    """Start a launcher whose output is kept."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)
