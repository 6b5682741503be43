"""Environment variables between launcher and ranks, the only variables that Shardwise's launcher reads or sets.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT    as torchrun sets them
    SHARDWISE_LAUNCHER=1       the ranks were started by this launcher
    SHARDWISE_STORE_FD         rank 0: a socket that is bound to MASTER_ADDR:MASTER_PORT, for the store's gate
    SHARDWISE_SECRET           random, of the job: the ranks seal their messages to one another with it
    NCCL_LAUNCH_ORDER_IMPLICIT=1   unless it is set: kernels of several communicators start in the order of the calls
                               (several of ours run at once; not measured yet)
    SHARDWISE_JOB              one random word per job; every descendant of a rank inherits it
    SHARDWISE_LAUNCHER_PID     process with which the rank ends
    SHARDWISE_FAILURE          file to which the rank writes its failure
    SHARDWISE_CORES            processor cores that the rank binds itself to
    SHARDWISE_INTERFACE        the interface that the launcher chose on several hosts; comm.interface overrides it
    SHARDWISE_FLIGHT           folder of the ranks' records, beside their logs
    CUDA_VISIBLE_DEVICES       the host's chosen slots, if slots were chosen

On one host all traffic stays on the loopback interface: gloo and NCCL otherwise pick the first interface that the
host's name resolves to, and are then reachable from outside. On several hosts the interface is that of the route to the
store, unless ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names another.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.launch.hosts import HostRanks, visible_devices

JOB = "SHARDWISE_JOB"
STORE_FD = "SHARDWISE_STORE_FD"
_LAUNCHER = "SHARDWISE_LAUNCHER"
_LAUNCHER_PID = "SHARDWISE_LAUNCHER_PID"
_FAILURE = "SHARDWISE_FAILURE"
SECRET = "SHARDWISE_SECRET"
_CORES = "SHARDWISE_CORES"
_INTERFACE = "SHARDWISE_INTERFACE"
FLIGHT = "SHARDWISE_FLIGHT"
_DEVICES = "CUDA_VISIBLE_DEVICES"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that set torch's allocator of devices, which reads them at its first allocation."""
_OURS = frozenset({JOB, STORE_FD, _LAUNCHER, _LAUNCHER_PID, _FAILURE, SECRET, _CORES, _INTERFACE, FLIGHT})


class LaunchJob(NamedTuple):
    """Data that the ranks of one launch on this host share."""

    word: str
    """Random word; marks every process of this job on this host."""
    here: HostRanks
    failures: Path
    """Folder to which ranks write their failures."""
    secret: str
    """Secret of the whole job.

    It is only in the environment of the ranks, which only this user can read. Several hosts use the secret that the
    user exports; empty without it.
    """
    cores: Sequence[Sequence[int]] = ()
    """Cores that each rank binds itself to, by local rank; empty: any."""
    exports: Mapping[str, str] = {}
    """More variables for every rank."""

    @property
    def ranks(self) -> range:
        """Ranks of this host."""
        return range(self.here.first, self.here.first + self.here.local)

    def failure_path(self, rank: int) -> Path:
        """Return the file to which one rank writes its failure."""
        return self.failures / f"rank_{rank:05d}.json"


class RankEnvironment(NamedTuple):
    """Values that a rank process finds in its environment."""

    rank: int
    launcher_pid: int | None
    store_fd: int | None
    failure_path: Path | None
    cores: tuple[int, ...] = ()


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def of_rank(
    job: LaunchJob, rank: int, store_fd: int | None, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the whole environment of one rank.

    Args:
        job: The job.
        rank: The rank.
        store_fd: Descriptor of the store's socket, for rank 0.
        base: Environment to start from.
    """
    # Variables of an outer launcher would contradict ours: torch obeys TORCHELASTIC_USE_AGENT_STORE above all.
    kept = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_") and k not in _OURS} | dict(
        job.exports
    )
    here, place = job.here, rank - job.here.first
    ours = {
        "RANK": rank,
        "WORLD_SIZE": here.world,
        "LOCAL_RANK": place,
        "LOCAL_WORLD_SIZE": here.local,
        "MASTER_ADDR": here.address,
        "MASTER_PORT": here.port,
        _LAUNCHER: 1,
        _LAUNCHER_PID: os.getpid(),
        _FAILURE: job.failure_path(rank),
        JOB: job.word,
    }
    interfaces = dict.fromkeys(_INTERFACES, here.interface) if here.interface else {}
    if here.is_one_host:
        ours |= interfaces
    elif interfaces:
        ours[_INTERFACE] = here.interface
    if job.secret:
        ours[SECRET] = job.secret
    if store_fd is not None:
        ours[STORE_FD] = store_fd
    if here.slots is not None:
        ours[_DEVICES] = visible_devices(here.slots, kept.get(_DEVICES))
    threads = max(1, cores() // here.local)
    if job.cores:
        threads = len(job.cores[place])
        ours[_CORES] = ",".join(map(str, job.cores[place]))
    # Otherwise every rank would start a thread per core, and N ranks N times as many as there are cores.
    defaults = {"OMP_NUM_THREADS": str(threads), "NCCL_LAUNCH_ORDER_IMPLICIT": "1"} | interfaces
    if kept.keys().isdisjoint(_ALLOCATOR):
        # Otherwise the pieces of a CUDA device that blocks of unlike sizes leave behind are lost until the run ends.
        defaults |= {_ALLOCATOR[0]: "expandable_segments:True"}
    return defaults | kept | {name: str(value) for name, value in ours.items()}


def seat(environment: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Return the launcher's variables in the environment of this process, with None for those that are not set."""

    def number(name: str) -> int | None:
        return int(environment[name]) if name in environment else None

    failure = environment.get(_FAILURE)
    return RankEnvironment(
        rank=number("RANK") or 0,
        launcher_pid=number(_LAUNCHER_PID),
        store_fd=number(STORE_FD),
        failure_path=Path(failure) if failure else None,
        cores=tuple(int(core) for core in environment.get(_CORES, "").split(",") if core),
    )


def is_in_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a rank that Shardwise's launcher started."""
    return environment.get(_LAUNCHER) == "1"
