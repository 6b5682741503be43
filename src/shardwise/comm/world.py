"""World: which rank this process is, and how it reaches the others.

The rank comes from the first of these that speaks; the winner is printed by rank 0:
    1  arguments of ``join``
    2  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT   torchrun, our own launcher, Kubernetes
    3  SLURM_PROCID inside an srun step             (a batch script outside srun is one process)
    4  OMPI_COMM_WORLD_RANK, PMI_RANK               Open MPI, MPICH, Intel MPI
    5  none: one process

``join`` creates torch's default process group. On one host everything binds the loopback interface; our launcher hands
rank 0 a listening socket on 127.0.0.1, because a TCPStore that opens its own listens on every interface.
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Clock, Group, TorchTransport, Transport
from shardwise.comm.jobs import JobThread
from shardwise.comm.peers import RING, Peers, SharedMemoryWire, TorchWire, Wire
from shardwise.comm.policy import CommPolicy
from shardwise.comm.shared_memory import SharedMemoryTransport, SharedMemoryUnavailable
from shardwise.comm.shared_ring import meet
from shardwise.comm.trace import Traffic
from shardwise.plan.errors import CommError, ConfigError, DeadlineError
from shardwise.plan.mesh import Mesh


class Seat(NamedTuple):
    """One rank's place in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    source: str


def find_seat(environment: Mapping[str, str]) -> Seat:
    """Read the rank from environment variables, in the order of the module's docstring."""
    for reader in (_from_torchrun, _from_slurm, _from_mpi):
        seat = reader(environment)
        if seat is not None:
            if not 0 <= seat.rank < seat.world_size:
                raise ConfigError(f"{seat.source}: rank {seat.rank} does not fit {seat.world_size} ranks")
            return seat
    return Seat(0, 1, 0, 1, "127.0.0.1", 0, "none (one process)")


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"environment: {name}={text!r} is not a whole number")
    return int(text)


def _from_torchrun(env: Mapping[str, str]) -> Seat | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    size = _number(env, "WORLD_SIZE")
    return Seat(
        _number(env, "RANK"),
        size,
        _number(env, "LOCAL_RANK", 0),
        _number(env, "LOCAL_WORLD_SIZE", size if "MASTER_ADDR" not in env else 1),
        env.get("MASTER_ADDR", "127.0.0.1"),
        _number(env, "MASTER_PORT", 29500),
        "shardwise launch" if "SHARDWISE_LAUNCHER" in env else "RANK and WORLD_SIZE",
    )


def _from_slurm(env: Mapping[str, str]) -> Seat | None:
    # SLURM_STEP_NUM_TASKS exists inside srun alone: a batch script that runs python directly sees SLURM_NTASKS too, and
    # would wait for ranks that nobody started.
    if "SLURM_PROCID" not in env or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    size = _number(env, "SLURM_STEP_NUM_TASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "127.0.0.1")
    per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "") or "1")
    return Seat(
        _number(env, "SLURM_PROCID"),
        size,
        _number(env, "SLURM_LOCALID", 0),
        int(per_node.group()) if per_node else 1,
        env.get("MASTER_ADDR") or first_host(nodes),
        _number(env, "MASTER_PORT", _port_of(env.get("SLURM_JOB_ID", "0") + env.get("SLURM_STEP_ID", "0"))),
        "SLURM",
    )


def _from_mpi(env: Mapping[str, str]) -> Seat | None:
    if "OMPI_COMM_WORLD_RANK" in env:
        prefix, rank, size = "OMPI_COMM_WORLD", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    elif "PMI_RANK" in env and "PMI_SIZE" in env:
        prefix, rank, size = "MPI", "PMI_RANK", "PMI_SIZE"
    else:
        return None
    world_size = _number(env, size)
    local_size = _number(env, f"{prefix}_LOCAL_SIZE" if prefix != "MPI" else "MPI_LOCALNRANKS", world_size)
    if "MASTER_ADDR" not in env and local_size != world_size:
        raise ConfigError(
            f"{world_size} MPI ranks on several hosts: set MASTER_ADDR to the first host's address "
            "(mpirun -x MASTER_ADDR=...), for MPI's variables do not name it"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("PMI_ID", "0")
    return Seat(
        _number(env, rank),
        world_size,
        _number(env, f"{prefix}_LOCAL_RANK" if prefix != "MPI" else "MPI_LOCALRANKID", _number(env, rank)),
        local_size,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _number(env, "MASTER_PORT", _port_of(job)),
        "MPI",
    )


def first_host(nodes: str) -> str:
    """First host of a SLURM node list: ``gpu[07-09,12],cpu1`` gives ``gpu07``."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if first is None:
        raise ConfigError(f"SLURM node list {nodes!r} names no host")
    return first.group(1) + (first.group(2) or "")


def _port_of(job: str) -> int:
    return 20_000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 20_000


@dataclass
class World:
    """This process among its peers. Hands out one ``Group`` per mesh axis."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    source: str = "none (one process)"
    backend: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: dist.Store | None = None
    _engines: int = 0
    _meetings: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)
    """How often these ranks have met: keeps the keys of each meeting apart in the store."""
    _transports: dict[tuple[Any, ...], Transport] = field(default_factory=dict, repr=False)
    _wires: dict[tuple[Any, ...], Wire] = field(default_factory=dict, repr=False)
    _threads: dict[str, JobThread] = field(default_factory=dict, repr=False)

    def group(self, mesh: Mesh, axis: str, policy: CommPolicy, clock: Clock, traffic: Traffic) -> Group:
        """The ranks along ``axis``. Every rank calls this for the same axes in the same order."""
        return self.group_among(mesh.ranks(axis, self.rank), axis, policy, clock, traffic)

    def group_among(
        self,
        ranks: tuple[int, ...],
        axis: str,
        policy: CommPolicy,
        clock: Clock,
        traffic: Traffic,
        lane: str = "",
    ) -> Group:
        """These ranks, this one among them; ``axis`` names them in errors. All of them call this.

        Groups of the same ranks share a transport, whose collectives run in one order. What runs beside the main
        thread takes a ``lane`` of its own, and runs in its ``thread``.
        """
        transport = self._transport(ranks, policy, lane) if len(ranks) > 1 else None
        return Group(axis, ranks, ranks.index(self.rank), transport, clock, traffic)

    def thread(self, lane: str) -> JobThread:
        """The thread of a lane: one for all engines, for they share its transports."""
        return self._threads.setdefault(lane, JobThread(f"shardwise-{lane}"))

    def _transport(self, ranks: tuple[int, ...], policy: CommPolicy, lane: str = "") -> Transport:
        key = (ranks, policy.transport, lane)
        if key in self._transports:
            return self._transports[key]
        index = ranks.index(self.rank)
        transport: Transport | None = None
        local = self._is_one_cpu_host
        if policy.transport == "shared_memory" and not local:
            raise ConfigError(
                f"comm.transport: shared_memory needs CPU ranks of one host; here device {self.device}, "
                f"{self.local_size} of {self.size} ranks on this host, backend {self.backend!r}; use auto"
            )
        if local and policy.transport != "torch":
            transport = self._shared_memory(ranks, index, policy)
        if transport is None:
            group = None
            if len(ranks) != self.size or lane:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
            transport = TorchTransport(group, ranks, index, composed=self.backend == "gloo")
        self._transports[key] = transport
        return transport

    def _shared_memory(self, ranks: tuple[int, ...], index: int, policy: CommPolicy) -> Transport | None:
        prefix = f"shm/{self._meetings.get(ranks, 0)}/{'-'.join(map(str, ranks))}"
        self._meetings[ranks] = self._meetings.get(ranks, 0) + 1
        try:
            return SharedMemoryTransport(
                index,
                len(ranks),
                post=lambda key, text: self._post(f"{prefix}/{key}", index, text),
                collect=lambda key, timeout_s: self._collect(f"{prefix}/{key}", len(ranks), timeout_s),
                timeout_s=policy.deadline_s,
                names=ranks,
            )
        except SharedMemoryUnavailable as error:
            if policy.transport == "shared_memory":
                raise ConfigError(
                    f"comm.transport: shared_memory cannot be used here: {error}; use auto"
                ) from error
            return None

    def peers(self, group: Group, policy: CommPolicy) -> Peers:
        """Messages from and to the neighbours of this rank on the ring of ``group``'s ranks; all of them call this.

        On gloo the other ranks of the group can be reached too.
        """
        wires: dict[int, Wire] = {}
        size = group.size
        # Everyone goes through the pairs in one order: of those that wait to meet, the first can always go on.
        for low, high in sorted({(min(i, (i + 1) % size), max(i, (i + 1) % size)) for i in range(size)}):
            if group.index in (low, high) and low != high:
                other = high if group.index == low else low
                wires[other] = self._wire(group.ranks[low], group.ranks[high], policy)
        if self.backend == "gloo":
            for index, rank in enumerate(group.ranks):
                if index != group.index:
                    wires.setdefault(index, TorchWire(rank))
        return Peers(group, wires, self.device)

    def _wire(self, low: int, high: int, policy: CommPolicy) -> Wire:
        key = (low, high, policy.transport)
        if key not in self._wires:
            other = high if self.rank == low else low
            wire: Wire | None = None
            if self._is_one_cpu_host and policy.transport != "torch":
                wire = self._shared_wire(low, high, policy)
            if wire is None and self.backend == "gloo":
                wire = TorchWire(other)
            if wire is None:
                up, down = (dist.new_group([low, high], use_local_synchronization=True) for _ in range(2))
                wire = TorchWire(other, up, down) if self.rank == low else TorchWire(other, down, up)
            self._wires[key] = wire
        return self._wires[key]

    def _shared_wire(self, low: int, high: int, policy: CommPolicy) -> Wire | None:
        index = int(self.rank == high)
        meeting = (low, high)
        prefix = f"wire/{self._meetings.get(meeting, 0)}/{low}-{high}"
        self._meetings[meeting] = self._meetings.get(meeting, 0) + 1
        try:
            rings = meet(
                index,
                lambda key, text: self._post(f"{prefix}/{key}", index, text),
                lambda key, timeout_s: self._collect(f"{prefix}/{key}", 2, timeout_s),
                policy.deadline_s,
                RING,
                (low, high),
            )
        except SharedMemoryUnavailable:
            return None
        return SharedMemoryWire(rings, index)

    @property
    def _is_one_cpu_host(self) -> bool:
        return self.device.type == "cpu" and self.local_size == self.size and self.backend == "gloo"

    def next_engine(self) -> int:
        """A number for an engine of this world, the same on every rank that builds its engines in the same order."""
        self._engines += 1
        return self._engines

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        if self.size > 1 and self.backend != "fake":
            dist.barrier()

    def post(self, key: str, text: str) -> None:
        """Publish this rank's string under ``key``; usable from any thread."""
        self._post(key, self.rank, text)

    def collect(self, key: str, timeout_s: float) -> list[str]:
        """The strings that all ranks posted under ``key``, by rank; waits for the late."""
        return self._collect(key, self.size, timeout_s)

    def _post(self, key: str, index: int, text: str) -> None:
        if self.store is None:
            self.store = dist.HashStore()
        self.store.set(f"shardwise/{key}/{index}", text)

    def _collect(self, key: str, size: int, timeout_s: float) -> list[str]:
        if self.store is None:
            raise CommError(f"store: nothing was ever posted under {key!r}")
        keys = [f"shardwise/{key}/{index}" for index in range(size)]
        end = time.monotonic() + timeout_s
        pause_s = 0.0005
        # A blocking wait would hold the store's connection, and with it every other thread of this rank.
        while not self.store.check(keys):
            if time.monotonic() > end:
                missing = [index for index, name in enumerate(keys) if not self.store.check([name])]
                raise DeadlineError(
                    f"rank {self.rank}: {key!r}: no word from rank(s) {missing} within {timeout_s:.0f} s"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
        return [self.store.get(name).decode() for name in keys]

    def close(self) -> None:
        """Leave the job: all ranks together, after the last collective."""
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()
        for transport in self._transports.values():
            close = getattr(transport, "close", None)
            if close is not None:
                close()
        self._transports.clear()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(
    rank: int | None = None,
    world_size: int | None = None,
    address: str = "127.0.0.1",
    port: int = 29500,
    store: dist.Store | None = None,
    backend: str | None = None,
    timeout_s: float = 1800.0,
    quiet: bool = False,
) -> World:
    """Find this process's rank and create torch's default group (or adopt the one that exists).

    Errors: ConfigError where the environment contradicts itself, CommError where the peers cannot be reached.
    """
    if rank is not None and world_size is not None:
        seat = Seat(rank, world_size, rank, world_size, address, port, "arguments")
    elif dist.is_initialized():
        seat = _adopted()
    else:
        seat = find_seat(os.environ)
    device, default_backend = _device(seat.local_rank)
    backend = backend or default_backend
    world = World(
        seat.rank, seat.world_size, seat.local_rank, seat.local_size, seat.source, backend, device, store
    )
    if seat.world_size > 1:
        _meet(world, seat, timeout_s)
    if seat.rank == 0 and not quiet:
        where = f", {seat.local_size} on this host" if seat.local_size != seat.world_size else ""
        print(
            f"shardwise: {seat.world_size} rank(s){where} from {seat.source}, {device.type}, {backend or 'no backend'}"
        )
        sys.stdout.flush()
    return world


def _adopted() -> Seat:
    found = find_seat(os.environ)
    size = dist.get_world_size()
    local = found.local_size if found.world_size == size else size
    return Seat(dist.get_rank(), size, found.local_rank, local, "", 0, "torch's existing default group")


def _device(local_rank: int) -> tuple[torch.device, str]:
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "is_available() promised an accelerator"
        device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
        return device, dist.get_default_backend_for_device(device)
    return torch.device("cpu"), "gloo"


def _meet(world: World, seat: Seat, timeout_s: float) -> None:
    """Create the store and torch's default group."""
    if dist.is_initialized():
        if world.store is None:
            world.store = dist.distributed_c10d._get_default_store()
        world.backend = dist.get_backend()
        return
    limit = timedelta(seconds=timeout_s)
    if seat.local_size == seat.world_size:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if world.backend == "nccl":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if world.store is None:
        world.store = _connect(seat, limit)
    dist.init_process_group(
        world.backend if world.device.type == "cpu" else f"cpu:gloo,{world.device.type}:{world.backend}",
        store=dist.PrefixStore("torch", world.store),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=limit,
        device_id=None if world.device.type == "cpu" else world.device,
    )


def _connect(seat: Seat, limit: timedelta) -> dist.Store:
    descriptor = os.environ.get("SHARDWISE_STORE_FD")
    under_agent = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun's agent serves the store already
    listens = seat.rank == 0 and not under_agent
    listening: dict[str, Any] = {"master_listen_fd": int(descriptor)} if descriptor and listens else {}
    try:
        return dist.TCPStore(
            seat.address,
            seat.port,
            world_size=None,
            is_master=listens,
            timeout=limit,
            wait_for_workers=False,
            **listening,
        )
    except (RuntimeError, dist.DistNetworkError) as error:
        raise CommError(
            f"rank {seat.rank}: cannot reach the store at {seat.address}:{seat.port} (from {seat.source}): {error}"
        ) from error
