"""Seat: the rank of this process, read from the environment of the program that started it.

The first of these that is set is used; rank 0 prints its name:
    1  arguments of ``join``
    2  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT   torchrun, our own launcher, Kubernetes
    3  JOB_COMPLETION_INDEX, WORLD_SIZE             an indexed Job of Kubernetes, one rank in each pod
    4  SLURM_PROCID inside an srun step             (a batch script outside srun is one process)
    5  OMPI_COMM_WORLD_RANK, PMI_RANK               Open MPI, MPICH, Intel MPI
    6  none: one process

Ranks whose store has a loopback address are all on this host, whatever else the environment leaves out. SLURM and MPI
give no port: rank 0 takes the first free one of a few that follow from the job's number and secret, and the other ranks
try these in the same order. MPI gives no address of the first host either; the ranks exchange it by mpi4py.
"""

import hashlib
import importlib.util
import re
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.base.errors import ConfigError

LOOPBACK = "127.0.0.1"


class JobSeat(NamedTuple):
    """Rank of a process in the job, and the address of the store."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    source: str
    gives_port: bool = True
    """False if ``port`` is a number that follows from the job, and not a port that somebody chose."""


def find_seat(environment: Mapping[str, str]) -> JobSeat:
    """Return the rank of this process from environment variables, in the order of the module's docstring.

    Raises:
        ConfigError: if the variables contradict themselves.
    """
    for reader in (_from_torchrun, _from_indexed_job, _from_slurm, _from_mpi):
        seat = reader(environment)
        if seat is not None:
            if not 0 <= seat.rank < seat.world_size:
                raise ConfigError(f"{seat.source}: rank {seat.rank} does not fit {seat.world_size} ranks")
            return seat
    return JobSeat(0, 1, 0, 1, LOOPBACK, 0, "none (one process)")


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"environment: {name}={text!r} is not a whole number")
    return int(text)


def _from_torchrun(env: Mapping[str, str]) -> JobSeat | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, size, address = _number(env, "RANK"), _number(env, "WORLD_SIZE"), env.get("MASTER_ADDR", LOOPBACK)
    local_size = _number(env, "LOCAL_WORLD_SIZE", size if is_loopback(address) else 1)
    return JobSeat(
        rank,
        size,
        # Kubernetes sets no local rank: if all ranks are on this host it is the rank, else each host has one rank.
        _number(env, "LOCAL_RANK", rank if local_size == size else 0),
        local_size,
        address,
        _number(env, "MASTER_PORT", 29500),
        "shardwise launch" if "SHARDWISE_LAUNCHER" in env else "RANK and WORLD_SIZE",
    )


def _from_indexed_job(env: Mapping[str, str]) -> JobSeat | None:
    # Without WORLD_SIZE the pods of an indexed Job work each on its own, as a job array does.
    if "JOB_COMPLETION_INDEX" not in env or "WORLD_SIZE" not in env or "RANK" in env:
        return None
    size = _number(env, "WORLD_SIZE")
    if size > 1 and not env.get("MASTER_ADDR"):
        raise ConfigError(
            f"{size} ranks in the pods of an indexed Job: set MASTER_ADDR to the first pod's name, JOB-0.SERVICE of a "
            "headless Service, for the Job's variables do not name it"
        )
    address = env.get("MASTER_ADDR", LOOPBACK)
    is_here = is_loopback(address)
    rank = _number(env, "JOB_COMPLETION_INDEX")
    return JobSeat(
        rank,
        size,
        rank if is_here else 0,
        size if is_here else 1,
        address,
        _number(env, "MASTER_PORT", 29500),
        "JOB_COMPLETION_INDEX and WORLD_SIZE",
    )


def _from_slurm(env: Mapping[str, str]) -> JobSeat | None:
    # SLURM_STEP_NUM_TASKS exists only inside srun. A batch script that runs python directly sees SLURM_NTASKS too, and
    # would wait for ranks that were never started.
    if "SLURM_PROCID" not in env or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    size = _number(env, "SLURM_STEP_NUM_TASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", LOOPBACK)
    return JobSeat(
        _number(env, "SLURM_PROCID"),
        size,
        _number(env, "SLURM_LOCALID", 0),
        _tasks_here(env, size),
        env.get("MASTER_ADDR") or first_host(nodes),
        _number(env, "MASTER_PORT", _port_of(env.get("SLURM_JOB_ID", "0") + env.get("SLURM_STEP_ID", "0"))),
        "SLURM",
        "MASTER_PORT" in env,
    )


def _tasks_here(env: Mapping[str, str], size: int) -> int:
    """Return the number of tasks of a SLURM step on this host, from ``SLURM_STEP_TASKS_PER_NODE``: ``2(x3),1``."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", "") or "1"
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,7})\))?", part.strip())
        if match is None:
            raise ConfigError(
                f"SLURM: SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of counts such as 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(set(counts)) == 1:
        return counts[0]
    place = _number(env, "SLURM_NODEID", len(counts))
    if place >= len(counts) or sum(counts) != size:
        raise ConfigError(
            f"SLURM: SLURM_STEP_TASKS_PER_NODE={text!r} has {len(counts)} hosts and {sum(counts)} tasks; this is host "
            f"number {env.get('SLURM_NODEID', '?')} (SLURM_NODEID) of a step with {size} tasks (SLURM_STEP_NUM_TASKS)"
        )
    return counts[place]


def _from_mpi(env: Mapping[str, str]) -> JobSeat | None:
    if "OMPI_COMM_WORLD_RANK" in env:
        prefix, rank, size = "OMPI_COMM_WORLD", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    elif "PMI_RANK" in env and "PMI_SIZE" in env:
        prefix, rank, size = "MPI", "PMI_RANK", "PMI_SIZE"
    else:
        return None
    world_size = _number(env, size)
    local_size = _number(env, f"{prefix}_LOCAL_SIZE" if prefix != "MPI" else "MPI_LOCALNRANKS", world_size)
    is_one_host = local_size == world_size
    if "MASTER_ADDR" not in env and not is_one_host and importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(
            f"{world_size} MPI ranks on several hosts: set MASTER_ADDR to the first host's address "
            "(mpirun -x MASTER_ADDR=...), for MPI's variables do not name it; or install mpi4py, by which the ranks "
            "exchange it"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("PMI_ID", "0")
    return JobSeat(
        _number(env, rank),
        world_size,
        _number(env, f"{prefix}_LOCAL_RANK" if prefix != "MPI" else "MPI_LOCALRANKID", _number(env, rank)),
        local_size,
        env.get("MASTER_ADDR", LOOPBACK if is_one_host else ""),
        _number(env, "MASTER_PORT", _port_of(job)),
        "MPI",
        "MASTER_PORT" in env,
    )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: ``gpu[07-09,12],cpu1`` gives ``gpu07``.

    Raises:
        ConfigError: if the list names no host.
    """
    first = re.match(r"(?:[^\[\],]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ConfigError(f"SLURM node list {nodes!r} names no host")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def is_loopback(address: str) -> bool:
    """Return whether a store at ``address`` can be reached only from this host."""
    return address in ("localhost", "::1", "[::1]") or address.startswith("127.")


def _port_of(job: str) -> int:
    return 20_000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 20_000
