"""Links: the transports of tensors between the ranks of a World, made when they are first needed and kept.

    transport   the collectives of a group: shared memory between CPU ranks of one host; two levels between CPU ranks
                of several hosts (two_levels.py), shared memory within each host and gloo across; else a group of torch
    wire        the messages of two ranks: shared memory if all ranks of their group are CPU ranks of one host, else
                torch's messages

Groups of the same ranks share a transport, whose collectives run in one order. Collectives beside the main thread use
another transport, under the name of their *lane*. Memory, descriptors and groups of torch end with ``release``.
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from shardwise.base.errors import ConfigError
from shardwise.comm.board import MessageBoard
from shardwise.comm.collectives import Group
from shardwise.comm.groups import GROUP_TIMEOUT_S, HOST_BACKENDS, backends, end_groups, make_group
from shardwise.comm.peers import RING, PointToPoint, SharedMemoryWire, TorchWire, Wire
from shardwise.comm.policy import CommPolicy
from shardwise.comm.rendezvous.hosts import different_hosts, grid_of
from shardwise.comm.shared_memory import SharedMemoryTransport, SharedMemoryUnavailable
from shardwise.comm.shared_ring import meet
from shardwise.comm.transports import MESSAGE_BYTES, TorchTransport, Transport
from shardwise.comm.two_levels import TwoLevelTransport
from shardwise.memory.leftovers import LEFTOVERS

_log = logging.getLogger(__name__)


class WorldLinks:
    """Transports and wires of one World.

    Args:
        rank: This rank's index in ``members``.
        members: Ranks of the job, by rank of the World.
        device: Device of the tensors.
        backend: Backend of torch.
        board: Texts between the ranks.
        uses_default: True if torch's default group belongs to the World: it carries collectives of all ranks, and
            messages.
    """

    def __init__(
        self,
        rank: int,
        members: tuple[int, ...],
        device: torch.device,
        backend: str,
        board: MessageBoard,
        uses_default: bool,
    ):
        self._rank = rank
        self._members = members
        self._device = device
        self._backend = backend
        self._board = board
        self._uses_default = uses_default
        self.transports: dict[tuple[tuple[int, ...], tuple[int, ...], str, str], Transport | None] = {}
        """Transports by ranks, hosts, policy and lane; None on a rank that is not in the group."""
        self._wires: dict[tuple[int, int, bool, str], Wire | None] = {}
        self._groups: list[dist.ProcessGroup] = []
        self._end_groups = LEFTOVERS.keep(self, partial(end_groups, self._groups))
        self._everyone: list[dist.ProcessGroup | None] = []

    @property
    def ring_bytes(self) -> int:
        """Bytes of shared memory that this rank provides to its transports and wires."""
        every = (*self.transports.values(), *self._wires.values())
        return sum(getattr(each, "nbytes", 0) for each in every)

    def barrier(self) -> None:
        """Wait until every rank has arrived."""
        if not self._everyone:
            backend = self._backend if self._device.type == "cpu" else HOST_BACKENDS
            self._everyone.append(self._torch_group(tuple(range(len(self._members))), "barrier", backend))
        dist.all_reduce(torch.zeros(1), group=self._everyone[0])

    def release(self) -> None:
        """Release all transports, wires and groups."""
        for wire in self._wires.values():
            if wire is not None:
                wire.close()
        self._wires.clear()
        for transport in self.transports.values():
            close = getattr(transport, "close", None)
            if close is not None:
                close()
        self.transports.clear()
        self._everyone.clear()
        end_groups(self._groups)

    # Collectives -----------------------------------------------------------------------------------------------------

    def transport(
        self,
        ranks: tuple[int, ...],
        kin: Sequence[tuple[int, ...]],
        policy: CommPolicy,
        lane: str,
        hosts: Sequence[int] = (),
    ) -> Transport | None:
        """Return the transport of ``ranks``; beside devices torch's groups are made for all groups of ``kin``.

        Args:
            ranks: Ranks of the group.
            kin: All groups of this kind, in one order on all ranks.
            policy: Keys under ``comm:``.
            lane: Name of the lane.
            hosts: Number of each rank's host; empty: all ranks are on one host.

        Raises:
            ConfigError: if the policy's transport cannot be used.
        """
        lying = different_hosts(hosts) if self._is_on_cpu else ()
        key = (ranks, lying, policy.transport, lane)
        if len(ranks) < 2 or key in self.transports:
            return self.transports.get(key)
        if self._is_on_cpu:
            # No group of gloo is split off another one: only the members meet, by name.
            if self._rank in ranks:
                self.transports[key] = self._cpu_transport(ranks, lying, policy, lane)
            return self.transports.get(key)
        if policy.transport == "shared_memory":
            raise ConfigError(
                f"comm.transport: shared_memory needs CPU ranks and gloo; here device {self._device}, backend "
                f"{self._backend!r}; use auto"
            )
        for each in kin:
            # All ranks skip the same groups, because they have walked the same lists before.
            if len(each) > 1 and (each, (), policy.transport, lane) not in self.transports:
                self.transports[each, (), policy.transport, lane] = self._torch_transport(each, lane)
        return self.transports.get(key)

    def _cpu_transport(
        self, ranks: tuple[int, ...], hosts: tuple[int, ...], policy: CommPolicy, lane: str
    ) -> Transport | None:
        """Return the transport of CPU ranks, this rank among them.

        Args:
            ranks: Ranks of the group.
            hosts: Number of each rank's host; empty: all ranks are on one host.
            policy: Keys under ``comm:``.
            lane: Name of the lane.
        """
        if policy.transport != "torch" and not hosts:
            found = self._shared_memory(ranks, ranks.index(self._rank), policy)
            if found is not None:
                return found
        flat = self._torch_transport(ranks, lane, MESSAGE_BYTES if hosts else 0)
        if policy.transport == "torch" or len({*hosts}) in (0, len(ranks)):
            return flat
        assert flat is not None, "this rank is in the group"
        across, within = grid_of(ranks, hosts)
        here = next(each for each in within if self._rank in each)
        column = next((each for each in across if self._rank in each), ())
        near = self.transport(here, (here,), policy, lane)
        far = self.transport(column, (column,), policy, lane, range(len(column)))
        assert far is None or isinstance(far, TorchTransport), "one rank on each host"
        return TwoLevelTransport(ranks.index(self._rank), hosts, near, far, flat)

    def _torch_transport(self, ranks: tuple[int, ...], lane: str, message_bytes: int = 0) -> Transport | None:
        """Return the transport of ``ranks`` over a new group of torch.

        Args:
            ranks: Ranks of the group.
            lane: Name of the lane.
            message_bytes: Largest message to another rank in bytes; 0: messages are not cut.

        Returns:
            The transport; None on a rank that is not in the group and only takes part in making it.
        """
        group = self._torch_group(ranks, lane, self._backend)
        if self._rank not in ranks:
            return None
        index, composed = ranks.index(self._rank), self._backend == "gloo"
        # torch's default group has a backend for host tensors.
        beside = group is not None and self._device.type != "cpu"
        return TorchTransport(
            group,
            self._names(ranks),
            index,
            composed,
            self._device,
            self._board.raise_verdict,
            partial(self._host_group, ranks, lane) if beside else None,
            message_bytes,
        )

    def _host_group(self, ranks: tuple[int, ...], lane: str, timeout_s: float) -> dist.ProcessGroup | None:
        """Make and return the group for host tensors of ``ranks``, after all of them have asked for it.

        torch's own wait for the ranks of a new group has no deadline of ours, so the ranks meet at the board before.
        """
        index, purpose = ranks.index(self._rank), f"{lane}/host"
        number = self._board.number("meeting", ranks, purpose)
        key = f"meeting/{purpose}/{number}/{'-'.join(map(str, ranks))}"
        self._board.post(key, index, "")
        self._board.collect(
            key, len(ranks), timeout_s, "a meeting for collectives of host tensors", self._names(ranks)
        )
        return self._torch_group(ranks, purpose, HOST_BACKENDS)

    def _torch_group(
        self, ranks: tuple[int, ...], purpose: str, backend: str = ""
    ) -> dist.ProcessGroup | None:
        """Make and return torch's group of ``ranks`` of this World.

        Returns None for torch's default group, and on a rank that is not in the group.
        [Note: one function makes all groups]

        Args:
            ranks: Ranks of the group.
            purpose: Name of its use; groups of the same ranks for another use are other groups.
            backend: Backends of the group; "": one for host tensors and one for the device.
        """
        members = self._names(ranks)
        if self._uses_default and not purpose and len(members) == dist.get_world_size():
            return None
        number = self._board.number("group", ranks, purpose)
        name = f"shardwise/{self._board.word}/{purpose}/{number}/{'-'.join(map(str, members))}"
        group = make_group(name, members, backend or backends(self._device, self._backend), GROUP_TIMEOUT_S)
        if group is not None:
            self._groups.append(group)
        return group

    def _shared_memory(self, ranks: tuple[int, ...], index: int, policy: CommPolicy) -> Transport | None:
        prefix = f"shm/{self._board.number('shm', ranks)}/{'-'.join(map(str, ranks))}"
        try:
            return SharedMemoryTransport(
                index,
                len(ranks),
                post=lambda key, text: self._board.post(f"{prefix}/{key}", index, text),
                collect=lambda key, timeout_s: self._board.collect(
                    f"{prefix}/{key}",
                    len(ranks),
                    timeout_s,
                    "a meeting for shared memory",
                    self._names(ranks),
                ),
                timeout_s=policy.limit_s,
                names=self._names(ranks),
                alarm=self._board.raise_verdict,
            )
        except SharedMemoryUnavailable as error:
            self._without_shared_memory(ranks, policy, error)
            return None

    def _without_shared_memory(
        self, ranks: tuple[int, ...], policy: CommPolicy, error: SharedMemoryUnavailable
    ) -> None:
        """Warn that shared memory cannot be used, or raise if the policy requires it."""
        if policy.transport == "shared_memory":
            raise ConfigError(
                f"comm.transport: shared_memory cannot be used here: {error}; use auto"
            ) from error
        if self._rank == ranks[0] and not self._board.number("told of no shared memory"):
            _log.warning("comm.transport: auto takes %s, not shared memory: %s", self._backend, error)

    # Messages --------------------------------------------------------------------------------------------------------

    def peers(self, group: Group, policy: CommPolicy, kin: Sequence[tuple[int, ...]]) -> PointToPoint:
        """Return a channel for messages to the neighbours of this rank on the ring of ``group``'s ranks.

        All ranks of the group make this call. On gloo the other ranks of the group can be reached too.

        Args:
            group: The group.
            policy: Keys under ``comm:``.
            kin: All groups of this kind, in one order on all ranks.
        """
        wires: dict[int, Wire] = {}
        # A wait for a message of torch does not continue sends through shared memory, so all wires are of one kind.
        shares = self._is_on_cpu and policy.transport != "torch" and not different_hosts(group.hosts)
        for ranks in (group.ranks,) if self._is_on_cpu else kin or (group.ranks,):
            size = len(ranks)
            # All ranks go through the pairs in one order: of those that wait to meet, the first can always proceed.
            for low, high in sorted({(min(i, (i + 1) % size), max(i, (i + 1) % size)) for i in range(size)}):
                if low != high:
                    wire = self._wire(ranks[low], ranks[high], shares, policy)
                    if ranks == group.ranks and wire is not None and group.index in (low, high):
                        wires[high if group.index == low else low] = wire
        if self._backend == "gloo" and group.size > 3:  # otherwise all ranks are neighbours
            whole = None if self._uses_default else self._torch_group(group.ranks, "ring")
            for index, rank in enumerate(group.ranks):
                if index != group.index:
                    wires.setdefault(index, TorchWire(self._members[rank], whole, whole))
        return PointToPoint(group, wires, self._device)

    def _wire(self, low: int, high: int, shares: bool, policy: CommPolicy) -> Wire | None:
        """Return the wire between two ranks; None on any other rank, which only takes part in making groups.

        Args:
            low: One of the ranks.
            high: The other rank.
            shares: True if the ranks may share memory.
            policy: Keys under ``comm:``.
        """
        key = (low, high, shares, policy.transport)
        if key not in self._wires:
            is_end = self._rank in (low, high)
            wire: Wire | None = None
            if shares and is_end:
                wire = self._shared_wire(low, high, policy)
            if wire is None and (is_end or not self._is_on_cpu):
                wire = self._torch_wire(low, high, is_end)
            self._wires[key] = wire
        return self._wires[key]

    def _torch_wire(self, low: int, high: int, is_end: bool) -> Wire | None:
        """Return a wire over torch's groups: one group for gloo, two for NCCL.

        gloo keeps the messages of two ranks apart in any group that holds both ranks.
        """
        if self._backend == "gloo":
            up = down = None if self._uses_default else self._torch_group((low, high), "pair")
        else:
            up, down = (self._torch_group((low, high), way) for way in ("up", "down"))
        if not is_end:
            return None
        other = self._members[high if self._rank == low else low]
        if self._rank != low:
            up, down = down, up
        return TorchWire(other, up, down, agrees=self._device.type != "cpu")

    def _shared_wire(self, low: int, high: int, policy: CommPolicy) -> Wire | None:
        index = int(self._rank == high)
        prefix = f"wire/{self._board.number('wire', low, high)}/{low}-{high}"
        try:
            rings = meet(
                index,
                lambda key, text: self._board.post(f"{prefix}/{key}", index, text),
                lambda key, timeout_s: self._board.collect(
                    f"{prefix}/{key}", 2, timeout_s, "a meeting for messages", self._names((low, high))
                ),
                policy.limit_s,
                RING,
                self._names((low, high)),
                self._board.raise_verdict,
            )
        except SharedMemoryUnavailable as error:
            self._without_shared_memory((low, high), policy, error)
            return None
        return SharedMemoryWire(rings, index)

    def _names(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ``ranks`` of the World in the numbering of the job."""
        return tuple(self._members[rank] for rank in ranks)

    @property
    def _is_on_cpu(self) -> bool:
        return self._device.type == "cpu" and self._backend == "gloo"
