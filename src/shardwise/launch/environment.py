"""The environment variables between launcher and ranks, the only ones that Shardwise's launcher reads or sets.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT    as torchrun sets them
    SHARDWISE_LAUNCHER=1       the ranks were started by this launcher
    SHARDWISE_STORE_FD         rank 0: a socket that is bound to MASTER_ADDR:MASTER_PORT, for the store to listen on
    SHARDWISE_SECRET           random, of the job: the ranks seal what they tell one another with it
    NCCL_LAUNCH_ORDER_IMPLICIT=1   unless it is set: kernels of several communicators start in the order of the calls
                               (several of ours run at once; not measured yet)
    SHARDWISE_JOB              one random word per job; every descendant of a rank inherits it
    SHARDWISE_LAUNCHER_PID     whom to die with
    SHARDWISE_FAILURE          file in which the rank leaves its failure

On one host everything stays on the loopback interface: gloo and NCCL otherwise pick the first interface that the
host's name resolves to, and are then reachable from outside.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
JOB = "SHARDWISE_JOB"
STORE_FD = "SHARDWISE_STORE_FD"
_LAUNCHER = "SHARDWISE_LAUNCHER"
_LAUNCHER_PID = "SHARDWISE_LAUNCHER_PID"
_FAILURE = "SHARDWISE_FAILURE"
_SECRET = "SHARDWISE_SECRET"
_OURS = frozenset({JOB, STORE_FD, _LAUNCHER, _LAUNCHER_PID, _FAILURE, _SECRET})


class Job(NamedTuple):
    """What all ranks of one launch share."""

    word: str
    """Random; marks every process of this job."""
    ranks: int
    port: int
    """Of the store, on the loopback interface."""
    failures: Path
    """Folder in which ranks leave their failures."""
    secret: str
    """Random; only the environment of the ranks has it, which this user alone can read."""

    def failure_path(self, rank: int) -> Path:
        """File in which one rank leaves its failure."""
        return self.failures / f"rank_{rank:05d}.json"


class RankEnvironment(NamedTuple):
    """What a rank process finds in its environment."""

    rank: int
    launcher_pid: int | None
    store_fd: int | None
    failure_path: Path | None


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def of_rank(
    job: Job, rank: int, store_fd: int | None, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The whole environment of one rank."""
    # What an outer launcher left would contradict ours: torch obeys TORCHELASTIC_USE_AGENT_STORE above all.
    kept = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_") and k not in _OURS}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    ours = {
        "RANK": rank,
        "WORLD_SIZE": job.ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": job.ranks,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": job.port,
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        _LAUNCHER: 1,
        _LAUNCHER_PID: os.getpid(),
        _FAILURE: job.failure_path(rank),
        JOB: job.word,
        _SECRET: job.secret,
    }
    if store_fd is not None:
        ours[STORE_FD] = store_fd
    # Every rank would otherwise start a thread per core, and N ranks N times as many as there are cores.
    defaults = {"OMP_NUM_THREADS": str(max(1, cores() // job.ranks)), "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    return defaults | kept | {name: str(value) for name, value in ours.items()}


def seat(environment: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Where this process sits, if a launcher started it."""

    def number(name: str) -> int | None:
        return int(environment[name]) if name in environment else None

    failure = environment.get(_FAILURE)
    return RankEnvironment(
        rank=number("RANK") or 0,
        launcher_pid=number(_LAUNCHER_PID),
        store_fd=number(STORE_FD),
        failure_path=Path(failure) if failure else None,
    )


def is_in_job(environment: Mapping[str, str] = os.environ) -> bool:
    """This process is already a rank that our launcher started."""
    return environment.get(_LAUNCHER) == "1"
