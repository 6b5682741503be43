"""World: the rank of this process, and its connections to the other ranks.

``join`` finds the rank (comm/rendezvous/seat.py), waits for the other ranks at the store
(comm/rendezvous/handshake.py) and creates torch's default process group, or adopts the group that exists. It may be
called any number of times in one job: each World has a part of the store of its own (comm/board.py), so that texts of
two engines never mix, and groups of its own (comm/links.py), which end with it. ``World.among`` is a World of some of
the ranks.

On one host everything binds the loopback interface, however the ranks were started. On several hosts gloo and NCCL use
the interface on the way to the store (comm/rendezvous/address.py), and the store listens at its own address alone
(comm/rendezvous/connection.py).
"""

import contextlib
import logging
import multiprocessing.util
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.base.errors import ConfigError, DeadlineError, UsageError
from shardwise.comm.board import MessageBoard
from shardwise.comm.collectives import Group
from shardwise.comm.groups import (
    GROUP_TIMEOUT_S,
    backend_of_default,
    backends,
    is_bound,
    is_made_here,
    keep_with_default,
)
from shardwise.comm.links import WorldLinks
from shardwise.comm.peers import PointToPoint
from shardwise.comm.policy import CommPolicy
from shardwise.comm.rendezvous import handshake
from shardwise.comm.rendezvous.address import HostRoute, find_route, is_public, main_address
from shardwise.comm.rendezvous.connection import LIFE, connect, forget_secret, refused_hosts
from shardwise.comm.rendezvous.device import choose_device, identity_of
from shardwise.comm.rendezvous.environment import prepare_for_groups
from shardwise.comm.rendezvous.host_table import (
    HostRow,
    clock_warnings,
    described,
    differences,
    refusal_of_addresses,
    refusal_of_versions,
    rows_of,
    table,
)
from shardwise.comm.rendezvous.hosts import exchange_of, levels_of, numbered
from shardwise.comm.rendezvous.jobs import JobThread
from shardwise.comm.rendezvous.mpi import broadcast_address
from shardwise.comm.rendezvous.seat import LOOPBACK, JobSeat, find_seat
from shardwise.comm.rendezvous.store import SealedStore, root_of, say_farewell
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.transports import TorchTransport
from shardwise.comm.two_levels import TwoLevels
from shardwise.comm.watching.link_use import LinkMeter
from shardwise.comm.watching.rings import remove_old
from shardwise.comm.watching.watch import FlightFolder, Watchdog
from shardwise.plan.exchange import Asked, GradientExchange
from shardwise.plan.exchange_calls import LEVELS
from shardwise.plan.mesh import Mesh

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class World:
    """A rank's process and its connections to the other ranks; returns one ``Group`` per mesh axis.

    Args:
        rank: This rank in this World.
        size: Number of ranks.
        local_rank: This rank among those of its host.
        local_size: Number of ranks on this host.
        backend: Backend of torch for tensors on ``device``.
        device: Device on which this rank computes.
        members: Ranks of the job, by rank of this World; empty: all of them.
        hosts: Number of each rank's host; empty: all ranks are on one host.
        board: Texts between the ranks; None: a new board.
        owns_default: True if ``close`` ends torch's default group.
        is_part: True if ``among`` made this World: the watch belongs to the whole.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int = 0,
        local_size: int = 1,
        backend: str = "",
        device: torch.device = _CPU,
        members: tuple[int, ...] = (),
        hosts: tuple[int, ...] = (),
        board: MessageBoard | None = None,
        owns_default: bool = False,
        is_part: bool = False,
    ):
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.backend = backend
        self.device = device
        self.members = members or tuple(range(size))
        self.hosts = hosts or (0,) * size
        self.board = MessageBoard(rank, members=self.members) if board is None else board
        self.links = WorldLinks(rank, self.members, device, backend, self.board, owns_default)
        """Transports between the ranks."""
        self.addresses: tuple[str, ...] = ()
        """Address of each host, by its number; empty texts on one host."""
        self.ends_with_engine = False
        """True if this World was made for one engine, whose ``close`` releases it."""
        self._owns_default = owns_default
        self._is_part = is_part
        self._threads: dict[str, JobThread] = {}

    def among(self, ranks: Sequence[int]) -> "World":
        """Return a World of only these ranks, in which they count from 0, for engines on a part of the job.

        All of ``ranks`` make this call in the same order; no other rank makes it.

        Args:
            ranks: Ranks of this World, this rank among them.

        Raises:
            UsageError: if ``ranks`` is not such a list, or torch's default group is bound to a device.
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
        here = ranks.index(self.rank)
        name = f"{self.board.number('among', ranks)}:{'-'.join(map(str, ranks))}"
        return World(
            here,
            len(ranks),
            self.local_rank,
            len(ranks) if self.local_size == self.size else self.local_size,
            self.backend,
            self.device,
            tuple(self.members[rank] for rank in ranks),
            tuple(self.hosts[rank] for rank in ranks),
            self.board.part(here, name, [self.members[rank] for rank in ranks]),
            is_part=True,
        )

    def clock(self, policy: CommPolicy) -> StepClock:
        """Return a clock for one engine."""
        watch = self.board.watch
        if watch is not None and watch.start():
            _log.debug("rank %d: the watch begins", self.rank)
        return StepClock(policy.timeout_s, policy.debug_delay_s, watch, self.board.meet)

    def group(self, mesh: Mesh, axis: str, policy: CommPolicy, clock: StepClock, traffic: Traffic) -> Group:
        """Return the group of the ranks along ``axis``.

        Every rank makes this call for the same axes in the same order.

        Args:
            mesh: The mesh.
            axis: Axis, or several together.
            policy: Keys under ``comm:``.
            clock: Clock of the engine.
            traffic: Counter of what is sent.
        """
        ranks = mesh.ranks(axis, self.rank)
        return self.group_among(ranks, axis, policy, clock, traffic, kin=mesh.groups(axis))

    def group_among(
        self,
        ranks: tuple[int, ...],
        axis: str,
        policy: CommPolicy,
        clock: StepClock,
        traffic: Traffic,
        lane: str = "",
        kin: Sequence[tuple[int, ...]] = (),
    ) -> Group:
        """Return the group of ``ranks``.

        Groups of the same ranks share a transport, whose collectives run in one order. Collectives that run beside the
        main thread need a ``lane`` of their own and run in its ``thread``.

        Args:
            ranks: Ranks of the group, this rank among them.
            axis: Name of the group in errors.
            policy: Keys under ``comm:``.
            clock: Clock of the engine.
            traffic: Counter of what is sent.
            lane: Name of the lane; "" is the main thread.
            kin: All groups of this kind in the World, in one order on all ranks. If empty, all of ``ranks`` make this
                call and no other rank has a group of this kind.
        """
        names, hosts = (tuple(each[rank] for rank in ranks) for each in (self.members, self.hosts))
        transport = self.links.transport(ranks, kin or (ranks,), policy, lane, hosts)
        return Group(axis, ranks, ranks.index(self.rank), transport, clock, traffic, names, hosts)

    def groups_among(
        self,
        kin: Sequence[tuple[int, ...]],
        axis: str,
        policy: CommPolicy,
        clock: StepClock,
        traffic: Traffic,
    ) -> dict[tuple[int, ...], Group]:
        """Return the groups among ``kin`` that contain this rank, by ranks; there may be none.

        All ranks make this call with the same list.

        Args:
            kin: Groups of one kind.
            axis: Name of the groups in errors.
            policy: Keys under ``comm:``.
            clock: Clock of the engine.
            traffic: Counter of what is sent.
        """
        found = {}
        for ranks in kin:
            self.links.transport(ranks, (ranks,), policy, "", [self.hosts[rank] for rank in ranks])
            if self.rank in ranks:
                found[ranks] = self.group_among(ranks, axis, policy, clock, traffic)
        return found

    def levels(
        self,
        kin: Sequence[tuple[int, ...]],
        axis: str,
        policy: CommPolicy,
        clock: StepClock,
        traffic: Traffic,
    ) -> tuple[Group, ...]:
        """Return the two levels of this rank's group among ``kin``: across hosts and within this host.

        All ranks make this call with the same list.

        Args:
            kin: Groups of one kind.
            axis: Name of the groups in errors.
            policy: Keys under ``comm:``.
            clock: Clock of the engine.
            traffic: Counter of what is sent.

        Returns:
            The group of the ranks in this rank's place on every host, and the group of this host's ranks; empty if the
            group has no two levels.
        """
        parts = [levels_of(ranks, [self.hosts[rank] for rank in ranks]) for ranks in kin]
        found: list[Group] = []
        for level, name in enumerate(LEVELS):
            every = [ranks for each in parts if each is not None for ranks in each[level]]
            found += self.groups_among(every, f"{axis} {name}", policy, clock, traffic).values()
        return tuple(found)

    def two_levels(
        self, mesh: Mesh, axis: str, policy: CommPolicy, clock: StepClock, traffic: Traffic
    ) -> TwoLevels:
        """Return the two levels of the ranks along ``axis``, which lie evenly on several hosts.

        Args:
            mesh: The mesh.
            axis: Axis.
            policy: Keys under ``comm:``.
            clock: Clock of the engine.
            traffic: Counter of what is sent.
        """
        across, within = self.levels(mesh.groups(axis), axis, policy, clock, traffic)
        return TwoLevels(across, within, self.device)

    def exchange(self, mesh: Mesh, axis: str, asked: Asked) -> GradientExchange:
        """Return how gradients are summed over the ranks along ``axis``, the same on every rank.

        Args:
            mesh: The mesh.
            axis: Axis.
            asked: Value of ``zero.exchange``.

        Raises:
            ConfigError: if ``two_level`` is asked for and the ranks do not lie evenly on their hosts.
        """
        is_native = self.backend not in ("gloo", "fake")
        return exchange_of(axis, asked, mesh.groups(axis), self.hosts.__getitem__, is_native)

    def thread(self, lane: str) -> JobThread:
        """Return the thread of a lane, which all engines share because they share the lane's transports."""
        return self._threads.setdefault(lane, JobThread(f"shardwise-{lane}"))

    @property
    def ring_bytes(self) -> int:
        """Bytes of shared memory that this rank provides to its transports and channels."""
        return self.links.ring_bytes

    def transports(self) -> str:
        """Return the names of the transports that carry collectives between ranks, as text."""
        kinds = {type(each) for each in self.links.transports.values()}
        names = ["shared memory"] * (SharedMemoryTransport in kinds) + [self.backend] * (
            TorchTransport in kinds
        )
        return " and ".join(names) or "nothing: one rank"

    def peers(self, group: Group, policy: CommPolicy, kin: Sequence[tuple[int, ...]] = ()) -> PointToPoint:
        """Return a channel for messages to the neighbours of this rank on the ring of ``group``'s ranks.

        All ranks of the group make this call. On gloo the other ranks of the group can be reached too.

        Args:
            group: The group.
            policy: Keys under ``comm:``.
            kin: As in ``group_among``.
        """
        return self.links.peers(group, policy, kin)

    def record_in(self, folder: Path) -> None:
        """Let the records of this rank lie in ``folder``; called before the first engine is built."""
        if self.board.watch is not None:
            self.board.watch.record_in(folder)

    def link_meter(self) -> LinkMeter | None:
        """Return a meter of what this rank sends to other hosts; None if the ranks are on one host."""
        if len(set(self.hosts)) == 1 or not self.addresses:
            return None
        own = self.hosts[self.rank]
        return LinkMeter(each for number, each in enumerate(self.addresses) if number != own)

    def next_engine(self) -> int:
        """Return a number for an engine, the same on every rank that builds its engines in the same order."""
        return self.board.number("engine") + 1

    def barrier(self) -> None:
        """Wait until every rank has arrived."""
        if self.size == 1 or self.backend == "fake":
            return
        self.links.barrier()

    def post(self, key: str, text: str) -> None:
        """Write this rank's text under ``key``; usable from any thread."""
        self.board.post(key, self.rank, text)

    def collect(self, key: str, timeout_s: float, what: str = "") -> list[str]:
        """Return the texts that all ranks posted under ``key``, by rank, after waiting for late ranks.

        Args:
            key: Key of the texts.
            timeout_s: Seconds to wait.
            what: Name of the exchange in errors.
        """
        return self.board.collect(key, self.size, timeout_s, what)

    def at_work(self, key: str, what: str) -> AbstractContextManager[None]:
        """Return a context in which the calling thread does its part of work for which other ranks wait.

        Args:
            key: Beginning of the keys at which the others wait.
            what: Name of the work.
        """
        return self.board.at_work(key, what)

    def joining(self, thread: int) -> AbstractContextManager[None]:
        """Return a context in which the calling thread waits for the thread ``thread`` of this process."""
        return self.board.joining(thread)

    def forget(self, key: str) -> None:
        """Delete the texts that all ranks posted under ``key``; called by one rank when all have read them."""
        self.board.forget(key, self.size)

    def release(self) -> None:
        """Release shared memory, descriptors, groups and the watch of this World; the job continues."""
        self.links.release()
        if self.board.watch is not None and not self._is_part:
            self.board.watch.stop()

    def close(self) -> None:
        """Leave the job; all ranks call this together, after the last collective."""
        self.release()
        if self.size > 1 and dist.is_initialized() and self._owns_default:
            dist.destroy_process_group()


def join(
    rank: int | None = None,
    world_size: int | None = None,
    address: str = LOOPBACK,
    port: int = 29500,
    store: dist.Store | None = None,
    backend: str | None = None,
    policy: CommPolicy | None = None,
    quiet: bool = False,
) -> World:
    """Find this process's rank, wait for the others, and create torch's default group (or adopt the existing one).

    All ranks make this call equally often.

    Args:
        rank: This rank; None: from torch's default group or the environment.
        world_size: Number of ranks; given with ``rank``.
        address: Address of the store, with ``rank``.
        port: Port of the store, with ``rank``.
        store: Store to use; None: torch's, or a new TCPStore.
        backend: Backend of torch; None: chosen for the device.
        policy: Keys under ``comm:``; None: their defaults.
        quiet: Print no line about the ranks.

    Raises:
        ConfigError: if the environment contradicts itself or there are too few devices.
        DeadlineError: if ranks do not come in time; the message names them.
        CommError: if the other ranks cannot be reached.
    """
    policy = policy or CommPolicy()
    if rank is not None and world_size is not None:
        seat = JobSeat(rank, world_size, rank, world_size, address, port, "arguments")
    else:
        seat = _adopted() if dist.is_initialized() else find_seat(os.environ)
    found, default_backend = choose_device(policy.device, seat, os.environ.get("CUDA_VISIBLE_DEVICES"))
    alone = seat.world_size == 1 or backend == "fake"
    adopts = dist.is_initialized()
    if backend is None:
        backend = backend_of_default(found) if adopts and not alone else default_backend
    met = _Meeting(MessageBoard(seat.rank, store), (0,) * seat.world_size)
    if not alone:
        met = _meet(seat, found, backend, store, policy)
    world = World(
        seat.rank,
        seat.world_size,
        seat.local_rank,
        seat.local_size,
        backend,
        found,
        hosts=met.hosts,
        board=met.board,
        owns_default=not alone and not adopts,
    )
    world.addresses = tuple(row.about.address for row in met.rows)
    if seat.rank == 0 and met.is_first and not quiet:
        _print_ranks(seat, found, backend, met.rows)
    return world


class _Meeting(NamedTuple):
    """Result of a meeting of all ranks, for one rank."""

    board: MessageBoard
    hosts: tuple[int, ...]
    """Number of each rank's host."""
    rows: Sequence[HostRow] = ()
    is_first: bool = True
    """True if this is the first World of the job."""


def _print_ranks(seat: JobSeat, device: torch.device, backend: str, rows: Sequence[HostRow]) -> None:
    """Print the number of ranks of the job, the source of that number, the device, the backend, and several hosts."""
    where = f", {seat.local_size} on this host" if seat.local_size != seat.world_size else ""
    many = f"{seat.world_size} ranks{where} from {seat.source}, {device.type}, {backend}"
    print("shardwise: " + (many if seat.world_size > 1 else f"one process, {device.type}"))
    if len(rows) > 1:
        print(table(rows))
    sys.stdout.flush()


@contextlib.contextmanager
def sole_builder(world: World | None) -> Iterator[None]:
    """Refuse to build an engine in one thread while another thread of this rank builds one.

    Args:
        world: The World of the engine; None for one that ``join`` is going to make.

    Raises:
        UsageError: if another thread of this rank is inside this context. A job of one process never raises.
    """
    if world is None:
        seat = _adopted() if dist.is_initialized() else find_seat(os.environ)
        rank, size = seat.rank, seat.world_size
    else:
        rank, size = world.members[world.rank], world.size
    own = threading.current_thread()
    # An engine that is built while the same thread builds another.
    if size == 1 or _BUILDERS.get(rank) is own:
        yield
        return
    found = _BUILDERS.setdefault(rank, own)
    if found is not own:
        raise UsageError(
            f"initialize: thread {own.name!r} of rank {rank} was to build an engine while thread {found.name!r} builds "
            f"another one. The {size} ranks meet in the order in which each rank builds its engines, and two threads "
            "have no order: build engines one after another, in the same order on all ranks"
        )
    try:
        yield
    finally:
        del _BUILDERS[rank]


_BUILDERS: dict[int, threading.Thread] = {}
"""Thread that builds an engine, by rank: builds use torch's default group, which a process has only once."""


def own_seat() -> JobSeat:
    """Return the rank of this process and its job, by the environment."""
    return find_seat(os.environ)


def ranks_of_host() -> int:
    """Return the number of ranks on this host.

    In a process that no launcher started, the variable ``LOCAL_SIZE`` sets the number, as in programs for DeepSpeed on
    CPUs.
    """
    seat, said = find_seat(os.environ), os.environ.get("LOCAL_SIZE", "")
    return int(said) if seat.world_size == 1 and said.isdecimal() and int(said) else seat.local_size


def is_joined() -> bool:
    """Return whether this process is in a process group of torch."""
    return dist.is_initialized()


def _adopted() -> JobSeat:
    found = find_seat(os.environ)
    size = dist.get_world_size()
    local = found.local_size if found.world_size == size else size
    # The program may have met at another place than the one that the environment names: it decides interfaces alone.
    address = found.address if found.world_size == size else ""
    return JobSeat(
        dist.get_rank(),
        size,
        found.local_rank,
        local,
        address,
        found.port,
        "torch's existing default group",
        False,
    )


def _route(seat: JobSeat, policy: CommPolicy, may_fail: bool) -> HostRoute | None:
    """Return the way to the store's host; None if the environment does not name that host.

    Args:
        seat: This rank.
        policy: Keys under ``comm:``.
        may_fail: Return None if there is no way, because the ranks meet at a store that the program made.
    """
    if not seat.address and seat.source == "MPI":
        seat = seat._replace(
            address=broadcast_address(seat.rank, lambda: main_address(os.environ, policy.interface))
        )
    try:
        route = find_route(seat.address, os.environ, policy.interface) if seat.address else None
        if route is not None and is_public(route.store) and not policy.public:
            raise ConfigError(
                f"comm.public: the job's store would be at {route.store}, an address of the open internet; set "
                "MASTER_ADDR to an address of a network of your own, or comm.public: true"
            )
        return route
    except ConfigError as error:
        if not may_fail:
            raise
        _log.warning("%s. gloo and NCCL choose interfaces by themselves", error)
        return None


def _meet(
    seat: JobSeat, device: torch.device, backend: str, store: dist.Store | None, policy: CommPolicy
) -> _Meeting:
    """Wait for the other ranks at the store, and create torch's default group if there is none."""
    adopts = dist.is_initialized()
    one_host = seat.local_size == seat.world_size
    route = None if one_host else _route(seat, policy, may_fail=adopts or store is not None)
    prepare_for_groups(
        one_host, backend, seat.world_size, adopts, interface="" if route is None else route.interface
    )
    private = handshake.private_folder(_private_candidates()) if one_host else None
    base = store
    if base is None and adopts:
        base = dist.distributed_c10d._get_default_store()
    if base is None:
        base = connect(seat, route, policy.join_timeout_s, os.environ, private, device.type == "cpu")
    # A program may hand over the store of torchrun's agent, which serves one for all restarts of its ranks.
    base = dist.PrefixStore(f"life {os.environ.get(LIFE, '0')}", base)
    me = handshake.identity(identity_of(device, os.environ.get("CUDA_VISIBLE_DEVICES")))
    me = described(me, device, route, one_host, seat.local_rank == 0)
    met = _shake_hands(base, seat, me, private, policy)
    if seat.rank == 0 and store is None and not adopts:
        forget_secret(seat, private)
    # The store of a default group that an earlier join made counts its meetings anew.
    is_first = met.turn == 1 and not (adopts and is_made_here())
    rows = rows_of(met.who, met.clocks)
    if seat.rank == 0 and is_first:
        _warn(seat, met, rows)
    prefix = f"shardwise/{met.word}/watch"
    watch = Watchdog(seat.rank, met.who, met.store, prefix, _flight_folder(met.word))
    if not adopts:
        dist.init_process_group(
            backends(device, backend),
            # On an accelerator torch's own threads read the store, which must not need the interpreter to answer.
            # A default group of before, which the program has destroyed, has left its keys under another turn.
            store=dist.PrefixStore(f"torch {met.turn}", met.store if device.type == "cpu" else base),
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        keep_with_default(met.store)
        if store is None and seat.rank == 0:
            # Not atexit, because ranks of shardwise.launch(function) never run its handlers.
            multiprocessing.util.Finalize(None, _end_of_job, (weakref.ref(met.store),), exitpriority=0)
    board = MessageBoard(seat.rank, met.store, met.word, watch, range(seat.world_size))
    return _Meeting(board, numbered([each.host for each in met.who]), rows, is_first)


def _shake_hands(
    base: dist.Store, seat: JobSeat, me: handshake.RankIdentity, private: Path | None, policy: CommPolicy
) -> handshake.HandshakeResult:
    """Return the result of the handshake at ``base``; an error of rank 0 names the hosts that its gate refused."""
    secret = os.environ.get("SHARDWISE_SECRET")
    folder, timeout_s = None if secret else private, policy.join_timeout_s
    try:
        return handshake.meet(
            base, seat.rank, seat.world_size, me, secret, folder, timeout_s, partial(_refusal, policy)
        )
    except DeadlineError as error:
        refused = refused_hosts(seat) if seat.rank == 0 else []
        if not refused:
            raise
        raise DeadlineError(
            f"{error}. The store's gate refused {', '.join(refused)}: ranks there have another SHARDWISE_SECRET than "
            "this host, or none"
        ) from None


def _warn(seat: JobSeat, met: handshake.HandshakeResult, rows: Sequence[HostRow]) -> None:
    """Log what rank 0 finds doubtful about the hosts of the job."""
    if met.secret_from == "none":
        _log.warning(
            "the job's store is open to every program that reaches %s: give all ranks one SHARDWISE_SECRET in their "
            "environment",
            f"{seat.address}:{seat.port}" if seat.address and seat.gives_port else "it",
        )
    for sentence in (*differences(met.who), *clock_warnings(rows)):
        _log.warning("%s", sentence)


def _refusal(policy: CommPolicy, who: Sequence[handshake.RankIdentity]) -> str:
    """Return why ranks with these identities cannot begin, or ""."""
    versions = refusal_of_versions(who) if policy.versions == "same" else ""
    return versions or ("" if policy.public else refusal_of_addresses(who))


def _end_of_job(store: "weakref.ref[SealedStore]") -> None:
    served = store()
    if served is not None:
        say_farewell(root_of(served))


def _flight_folder(word: str) -> FlightFolder:
    """Return the folder of the ranks' rings: that of the job's logs, or one in a folder of the user's own."""
    given = os.environ.get("SHARDWISE_FLIGHT")
    if given:
        return FlightFolder(Path(given), is_temporary=False)
    own = handshake.private_folder(_private_candidates())
    if own is None:
        return FlightFolder(None, is_temporary=True)
    remove_old(own / "flight")
    return FlightFolder(own / "flight" / word[:16], is_temporary=True)


def _private_candidates() -> list[Path]:
    """Return folders in which ranks of one user and host may share a secret."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folders = [Path(runtime) / "shardwise"] if runtime else []
    folders.append(Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}")
    with contextlib.suppress(RuntimeError):  # a container's user without HOME and without an entry in passwd
        folders.append(Path.home() / ".cache" / "shardwise" / "jobs")
    return folders
