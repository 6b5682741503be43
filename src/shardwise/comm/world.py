"""World: which rank this process is, and how it reaches the others.

``join`` finds the rank (comm/seat.py), meets the other ranks at the store (comm/handshake.py) and creates torch's
default process group, or adopts the one that exists. It may be called any number of times in one job: each World has a
part of the store of its own, so what two engines say never mixes, and groups of its own, which end with it.
``World.among`` is a World of some of the ranks.

On one host everything binds the loopback interface, however the ranks were started: our launcher hands rank 0 a socket
that is bound to 127.0.0.1; without it rank 0 binds one itself, because a TCPStore that opens its own listens on every
interface.
"""

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import handshake
from shardwise.comm.collectives import Clock, Group, TorchTransport, Transport
from shardwise.comm.device import choose_device
from shardwise.comm.groups import backend_of_default, backends, end_group, is_bound, make_group
from shardwise.comm.jobs import JobThread
from shardwise.comm.peers import RING, Peers, SharedMemoryWire, TorchWire, Wire
from shardwise.comm.policy import CommPolicy
from shardwise.comm.seat import LOOPBACK, Seat, find_seat
from shardwise.comm.shared_memory import SharedMemoryTransport, SharedMemoryUnavailable
from shardwise.comm.shared_ring import meet
from shardwise.comm.store import missing_keys
from shardwise.comm.trace import Traffic
from shardwise.comm.watch import Watch
from shardwise.plan.errors import CommError, ConfigError, DeadlineError, UsageError
from shardwise.plan.mesh import Mesh
from shardwise.plan.words import named_ranks

_log = logging.getLogger(__name__)

JOIN_S = 60.0
"""In which all ranks must have come, where nothing else is said."""
_GROUP_TIMEOUT_S = 24 * 3600.0
"""Of torch's own groups: beyond every deadline of ours, whose errors say more."""


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
    members: tuple[int, ...] = ()
    """Ranks of the job, by rank of this World; all of them where it is left out."""
    word: str = ""
    """First part of every key and name of this World: no other World of the job has it."""
    watch: Watch | None = None
    """Knows who keeps the others waiting; None for one process."""
    is_part: bool = False
    """Made by ``among``: the watch belongs to the whole."""
    owns_default: bool = False
    """Whether ``close`` ends torch's default group."""
    is_first: bool = True
    """No World of this job was made before."""
    ends_with_engine: bool = False
    """Whether it was made for one engine, whose ``close`` gives back what it holds."""
    _engines: int = 0
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict, repr=False)
    """How often these ranks have met for this: keeps the keys of each meeting apart."""
    _transports: dict[tuple[Any, ...], Transport | None] = field(default_factory=dict, repr=False)
    _wires: dict[tuple[Any, ...], Wire | None] = field(default_factory=dict, repr=False)
    _groups: list[dist.ProcessGroup] = field(default_factory=list, repr=False)
    _threads: dict[str, JobThread] = field(default_factory=dict, repr=False)
    _everyone: list[dist.ProcessGroup | None] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.members = self.members or tuple(range(self.size))

    def among(self, ranks: Sequence[int]) -> "World":
        """A World of these ranks alone, in which they count from 0: for engines on a part of the job.

        All of them call it in the same order; no other rank does. Errors: UsageError.
        """
        ranks = tuple(ranks)
        if self.rank not in ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
            raise UsageError(
                f"among: rank {self.rank} of {self.size} asked for a World of the ranks {list(ranks)}; name each rank "
                "once, and call it on those ranks alone"
            )
        if self.size > 1 and is_bound():
            raise UsageError(
                "among: torch's default group is bound to a device, so NCCL makes new groups with all of its "
                "ranks alone; call init_process_group without device_id"
            )
        return World(
            ranks.index(self.rank),
            len(ranks),
            self.local_rank,
            len(ranks) if self.local_size == self.size else self.local_size,
            self.source,
            self.backend,
            self.device,
            self.store,
            tuple(self.members[rank] for rank in ranks),
            f"{self.word}/{self._number('among', ranks)}:{'-'.join(map(str, ranks))}",
            self.watch,
            is_part=True,
        )

    def clock(self, policy: CommPolicy) -> Clock:
        """The clock of one engine."""
        if self.watch is not None and self.watch.start():
            _log.debug("rank %d: the watch begins", self.rank)
        return Clock(policy.timeout_s, policy.debug_delay_s, self.watch)

    def group(self, mesh: Mesh, axis: str, policy: CommPolicy, clock: Clock, traffic: Traffic) -> Group:
        """The ranks along ``axis``. Every rank calls this for the same axes in the same order."""
        ranks = mesh.ranks(axis, self.rank)
        return self.group_among(ranks, axis, policy, clock, traffic, kin=mesh.groups(axis))

    def group_among(
        self,
        ranks: tuple[int, ...],
        axis: str,
        policy: CommPolicy,
        clock: Clock,
        traffic: Traffic,
        lane: str = "",
        kin: Sequence[tuple[int, ...]] = (),
    ) -> Group:
        """These ranks, this one among them; ``axis`` names them in errors.

        ``kin``: all groups of this kind in the World, in one order on all ranks; left out, all of ``ranks`` call this
        and no other rank has one of its kind. Groups of the same ranks share a transport, whose collectives run in one
        order. What runs beside the main thread takes a ``lane`` of its own, and runs in its ``thread``.
        """
        transport = self._transport(ranks, kin or (ranks,), policy, lane)
        names = tuple(self.members[rank] for rank in ranks)
        return Group(axis, ranks, ranks.index(self.rank), transport, clock, traffic, names)

    def groups_among(
        self, kin: Sequence[tuple[int, ...]], axis: str, policy: CommPolicy, clock: Clock, traffic: Traffic
    ) -> dict[tuple[int, ...], Group]:
        """Those of the groups ``kin`` that this rank is in, which may be none. All ranks call this with one list."""
        found = {}
        for ranks in kin:
            self._transport(ranks, (ranks,), policy, "")
            if self.rank in ranks:
                found[ranks] = self.group_among(ranks, axis, policy, clock, traffic)
        return found

    def thread(self, lane: str) -> JobThread:
        """The thread of a lane: one for all engines, for they share its transports."""
        return self._threads.setdefault(lane, JobThread(f"shardwise-{lane}"))

    @property
    def ring_bytes(self) -> int:
        """Shared memory that this rank brought to its transports and channels."""
        every = (*self._transports.values(), *self._wires.values())
        return sum(getattr(each, "nbytes", 0) for each in every)

    def transports(self) -> str:
        """What carries the collectives between ranks, in words."""
        kinds = {type(each) for each in self._transports.values()}
        names = ["shared memory"] * (SharedMemoryTransport in kinds) + [self.backend] * (
            TorchTransport in kinds
        )
        return " and ".join(names) or "nothing: one rank"

    def _number(self, *what: Any) -> int:
        """0, 1, 2 ... each time that ``what`` is asked for."""
        self._numbers[what] = self._numbers.get(what, -1) + 1
        return self._numbers[what]

    def _transport(
        self, ranks: tuple[int, ...], kin: Sequence[tuple[int, ...]], policy: CommPolicy, lane: str
    ) -> Transport | None:
        """Over ``ranks``. All groups of ``kin`` are made where torch carries them."""
        key = (ranks, policy.transport, lane)
        if len(ranks) < 2 or key in self._transports:
            return self._transports.get(key)
        local = self._is_one_cpu_host
        if policy.transport == "shared_memory" and not local:
            raise ConfigError(
                f"comm.transport: shared_memory needs CPU ranks of one host; here device {self.device}, "
                f"{self.local_size} of {self.size} ranks on this host, backend {self.backend!r}; use auto"
            )
        if local and self.rank not in ranks:
            return None  # between host tensors of one host nothing is split: members meet by name
        if local and policy.transport != "torch":
            found = self._shared_memory(ranks, ranks.index(self.rank), policy)
            if found is not None:
                self._transports[key] = found
                return found
        for each in (ranks,) if local else kin:
            # Skipped alike on all ranks: they have walked the same lists before.
            if len(each) > 1 and (each, policy.transport, lane) not in self._transports:
                self._transports[each, policy.transport, lane] = self._torch_transport(each, lane)
        return self._transports.get(key)

    def _torch_transport(self, ranks: tuple[int, ...], lane: str) -> Transport | None:
        """None on a rank that is not one of them, which walks along."""
        group = self._torch_group(ranks, lane)
        if self.rank not in ranks:
            return None
        members = tuple(self.members[rank] for rank in ranks)
        index, composed = ranks.index(self.rank), self.backend == "gloo"
        return TorchTransport(group, members, index, composed, self.device, self._alarm)

    def _torch_group(self, ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup | None:
        """A group of torch's over ``ranks`` of this World, None for torch's default group or where this rank is not in
        it. [Note: one function makes all groups]"""
        members = tuple(self.members[rank] for rank in ranks)
        if self.owns_default and not purpose and len(members) == dist.get_world_size():
            return None
        name = f"shardwise/{self.word}/{purpose}/{self._number('group', ranks, purpose)}/{'-'.join(map(str, members))}"
        group = make_group(name, members, backends(self.device, self.backend), _GROUP_TIMEOUT_S)
        if group is not None:
            self._groups.append(group)
        return group

    def _shared_memory(self, ranks: tuple[int, ...], index: int, policy: CommPolicy) -> Transport | None:
        prefix = f"shm/{self._number('shm', ranks)}/{'-'.join(map(str, ranks))}"
        try:
            return SharedMemoryTransport(
                index,
                len(ranks),
                post=lambda key, text: self._post(f"{prefix}/{key}", index, text),
                collect=lambda key, timeout_s: self._collect(f"{prefix}/{key}", len(ranks), timeout_s),
                timeout_s=policy.limit_s,
                names=tuple(self.members[rank] for rank in ranks),
                alarm=self._alarm,
            )
        except SharedMemoryUnavailable as error:
            self._without_shared_memory(ranks, policy, error)
            return None

    def _without_shared_memory(
        self, ranks: tuple[int, ...], policy: CommPolicy, error: SharedMemoryUnavailable
    ) -> None:
        """Say it, or refuse."""
        if policy.transport == "shared_memory":
            raise ConfigError(
                f"comm.transport: shared_memory cannot be used here: {error}; use auto"
            ) from error
        if self.rank == ranks[0] and not self._number("told of no shared memory"):
            _log.warning("comm.transport: auto takes %s, not shared memory: %s", self.backend, error)

    @property
    def _alarm(self) -> Any:
        """Called by whoever waits; raises where the watch has found that the waiting is in vain."""
        return None if self.watch is None else self.watch.raise_verdict

    def peers(self, group: Group, policy: CommPolicy, kin: Sequence[tuple[int, ...]] = ()) -> Peers:
        """Messages from and to the neighbours of this rank on the ring of ``group``'s ranks; all of them call this.

        ``kin``: as in ``group_among``. On gloo the other ranks of the group can be reached too.
        """
        wires: dict[int, Wire] = {}
        for ranks in kin or (group.ranks,):
            size = len(ranks)
            # Everyone goes through the pairs in one order: of those that wait to meet, the first can always go on.
            for low, high in sorted({(min(i, (i + 1) % size), max(i, (i + 1) % size)) for i in range(size)}):
                if low != high:
                    wire = self._wire(ranks[low], ranks[high], policy)
                    if ranks == group.ranks and wire is not None and group.index in (low, high):
                        wires[high if group.index == low else low] = wire
        if self.backend == "gloo" and group.size > 3:  # else all of them are neighbours
            whole = None if self.owns_default else self._torch_group(group.ranks, "ring")
            for index, rank in enumerate(group.ranks):
                if index != group.index:
                    wires.setdefault(index, TorchWire(self.members[rank], whole, whole))
        return Peers(group, wires, self.device)

    def _wire(self, low: int, high: int, policy: CommPolicy) -> Wire | None:
        """Between two ranks; None on a rank that is neither, which walks along where groups are made."""
        key = (low, high, policy.transport)
        if key not in self._wires:
            is_end = self.rank in (low, high)
            wire: Wire | None = None
            if self._is_one_cpu_host and policy.transport != "torch" and is_end:
                wire = self._shared_wire(low, high, policy)
            if wire is None and (is_end or not self._is_one_cpu_host):
                wire = self._torch_wire(low, high, is_end)
            self._wires[key] = wire
        return self._wires[key]

    def _torch_wire(self, low: int, high: int, is_end: bool) -> Wire | None:
        """gloo tells the messages of two ranks apart in any group that holds both; NCCL wants one for each way."""
        if self.backend == "gloo":
            up = down = None if self.owns_default else self._torch_group((low, high), "pair")
        else:
            up, down = (self._torch_group((low, high), way) for way in ("up", "down"))
        if not is_end:
            return None
        other = self.members[high if self.rank == low else low]
        return TorchWire(other, up, down) if self.rank == low else TorchWire(other, down, up)

    def _shared_wire(self, low: int, high: int, policy: CommPolicy) -> Wire | None:
        index = int(self.rank == high)
        prefix = f"wire/{self._number('wire', low, high)}/{low}-{high}"
        try:
            rings = meet(
                index,
                lambda key, text: self._post(f"{prefix}/{key}", index, text),
                lambda key, timeout_s: self._collect(f"{prefix}/{key}", 2, timeout_s),
                policy.limit_s,
                RING,
                (self.members[low], self.members[high]),
                self._alarm,
            )
        except SharedMemoryUnavailable as error:
            self._without_shared_memory((low, high), policy, error)
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
        if self.size == 1 or self.backend == "fake":
            return
        if not self._everyone:
            self._everyone.append(self._torch_group(tuple(range(self.size)), "barrier"))
        dist.all_reduce(torch.zeros(1), group=self._everyone[0])

    def post(self, key: str, text: str) -> None:
        """Publish this rank's string under ``key``; usable from any thread."""
        self._post(key, self.rank, text)

    def collect(self, key: str, timeout_s: float) -> list[str]:
        """The strings that all ranks posted under ``key``, by rank; waits for the late."""
        return self._collect(key, self.size, timeout_s)

    def forget(self, key: str) -> None:
        """Drop the strings that all ranks posted under ``key``; for one of them, when all have read them."""
        if self.store is None:
            return
        for index in range(self.size):
            self.store.delete_key(f"shardwise/{self.word}/{key}/{index}")

    def _post(self, key: str, index: int, text: str) -> None:
        if self.store is None:
            self.store = dist.HashStore()
        self.store.set(f"shardwise/{self.word}/{key}/{index}", text)

    def _collect(self, key: str, size: int, timeout_s: float) -> list[str]:
        if self.store is None:
            raise CommError(f"store: nothing was ever posted under {key!r}")
        keys = [f"shardwise/{self.word}/{key}/{index}" for index in range(size)]
        if self.watch is not None:  # so that nobody takes a rank that waits here for one that hangs
            self.watch.begin((self.rank, "word", key, ""), timeout_s, False, timeout_s)
        try:
            missing = missing_keys(self.store, keys, timeout_s)
        finally:
            if self.watch is not None:
                self.watch.end()
        if missing:
            raise DeadlineError(
                f"rank {self.rank}: {key!r}: no word from {named_ranks(missing)} within {timeout_s:.0f} s"
            )
        return [self.store.get(name).decode() for name in keys]

    def release(self) -> None:
        """Give back what this World holds: shared memory, descriptors, groups, its watch. The job goes on."""
        for wire in self._wires.values():
            if wire is not None:
                wire.close()
        self._wires.clear()
        for transport in self._transports.values():
            close = getattr(transport, "close", None)
            if close is not None:
                close()
        self._transports.clear()
        self._everyone.clear()
        while self._groups:
            end_group(self._groups.pop())
        if self.watch is not None and not self.is_part:
            self.watch.stop()

    def close(self) -> None:
        """Leave the job: all ranks together, after the last collective."""
        self.release()
        if self.size > 1 and dist.is_initialized() and self.owns_default:
            dist.destroy_process_group()


def join(
    rank: int | None = None,
    world_size: int | None = None,
    address: str = LOOPBACK,
    port: int = 29500,
    store: dist.Store | None = None,
    backend: str | None = None,
    timeout_s: float = JOIN_S,
    quiet: bool = False,
    device: str = "auto",
) -> World:
    """Find this process's rank, meet the others, and create torch's default group (or adopt the one that exists).

    All ranks call it equally often. ``device``: "auto" takes an accelerator where there is one that can do all that is
    needed, else the CPU; "cpu", "cuda", "cuda:1" and the like take what they say.

    Errors: ConfigError where the environment contradicts itself or the devices do not suffice, DeadlineError names the
    ranks that did not come within ``timeout_s``, CommError where the peers cannot be reached.
    """
    if rank is not None and world_size is not None:
        seat = Seat(rank, world_size, rank, world_size, address, port, "arguments")
    elif dist.is_initialized():
        seat = _adopted()
    else:
        seat = find_seat(os.environ)
    found, default_backend = choose_device(device, seat, os.environ.get("CUDA_VISIBLE_DEVICES"))
    world = World(
        seat.rank,
        seat.world_size,
        seat.local_rank,
        seat.local_size,
        seat.source,
        backend or default_backend,
        found,
        store,
    )
    if seat.world_size > 1 and backend != "fake":
        _meet(world, seat, timeout_s, backend)
    if seat.rank == 0 and world.is_first and not quiet:
        where = f", {seat.local_size} on this host" if seat.local_size != seat.world_size else ""
        many = f"{seat.world_size} ranks{where} from {seat.source}, {found.type}, {world.backend}"
        print("shardwise: " + (many if seat.world_size > 1 else f"one process, {found.type}"))
        sys.stdout.flush()
    return world


def own_seat() -> Seat:
    """Which rank this process is, by its environment."""
    return find_seat(os.environ)


def is_joined() -> bool:
    """This process is in a process group of torch's."""
    return dist.is_initialized()


def _adopted() -> Seat:
    found = find_seat(os.environ)
    size = dist.get_world_size()
    local = found.local_size if found.world_size == size else size
    return Seat(dist.get_rank(), size, found.local_rank, local, "", 0, "torch's existing default group")


def _meet(world: World, seat: Seat, timeout_s: float, backend: str | None) -> None:
    """Meet the other ranks at the store; create torch's default group where there is none."""
    adopts = dist.is_initialized()
    one_host = seat.local_size == seat.world_size
    if one_host:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if world.backend == "nccl":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if world.backend == "nccl":
        # Several communicators at once: their kernels then start in the order of the calls, as all ranks make them.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if adopts and backend is None:
        world.backend = backend_of_default(world.device)
    base = world.store
    if base is None and adopts:
        base = dist.distributed_c10d._get_default_store()
    if base is None:
        base = _connect(seat, timeout_s)
    # torchrun's agent serves one store for all lives of its ranks.
    base = dist.PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", base)
    device = "" if world.device.type == "cpu" else str(world.device)
    me = handshake.identity(device)
    secret = os.environ.get("SHARDWISE_SECRET")
    folder = handshake.private_folder(_private_candidates()) if one_host and not secret else None
    met = handshake.meet(base, seat.rank, seat.world_size, me, secret, folder, timeout_s)
    world.is_first = met.turn == 1
    if met.secret_from == "none" and seat.rank == 0 and world.is_first:
        _log.warning(
            "the job's store is open to every program that reaches %s: give all ranks one SHARDWISE_SECRET in their "
            "environment",
            f"{seat.address}:{seat.port}" if seat.address else "it",
        )
    world.store, world.word = met.store, met.word
    world.watch = Watch(seat.rank, met.who, met.store, f"shardwise/{met.word}/watch")
    if adopts:
        return
    world.owns_default = True
    dist.init_process_group(
        backends(world.device, world.backend),
        # On an accelerator torch's own threads ask the store, which must not need the interpreter for its answer.
        store=dist.PrefixStore("torch", met.store if world.device.type == "cpu" else base),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
    )


def _private_candidates() -> list[Path]:
    """Folders in which ranks of one user and host may share a secret."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folders = [Path(runtime) / "shardwise"] if runtime else []
    return [
        *folders,
        Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}",
        Path.home() / ".cache" / "shardwise" / "jobs",
    ]


def _connect(seat: Seat, timeout_s: float) -> dist.Store:
    descriptor = os.environ.get("SHARDWISE_STORE_FD")
    under_agent = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun's agent serves the store already
    listens = seat.rank == 0 and not under_agent
    # All ranks here: nobody else shall reach the store, whatever name of this host the environment gives.
    address = LOOPBACK if seat.local_size == seat.world_size and not under_agent else seat.address
    listening: dict[str, Any] = {}
    try:
        if descriptor and listens:
            listening = {"master_listen_fd": int(descriptor)}
        elif listens and address == LOOPBACK:
            listening = {"master_listen_fd": _bound(seat.port)}
        return dist.TCPStore(
            address,
            seat.port,
            world_size=None,
            is_master=listens,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            **listening,
        )
    except (RuntimeError, dist.DistNetworkError, OSError) as error:
        advice = (
            ""
            if listens
            else f"; rank 0, which serves it, has not come within {timeout_s:.0f} s or has ended"
        )
        raise CommError(
            f"rank {seat.rank}: cannot reach the store at {address}:{seat.port} (from {seat.source}){advice}: {error}"
        ) from error


def _bound(port: int) -> int:
    """Descriptor of a socket on the loopback interface, for a store to listen on; the store closes it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((LOOPBACK, port))
        return opened.detach()
