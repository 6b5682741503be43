"""Seconds of an exchange, as its transport makes it, over the link that its ranks cross.

N ranks of a group lie on H hosts, L = N/H on each. S is the full tensor in bytes, B the rate of a link, α its latency.

    shared memory     copies of a rank (comm/shared_memory.py), by the rate of copies that the link of the host implies,
    (CPU, one host)   or by the seconds that were measured for as many copied bytes:
                          all_gather                S
                          reduce_scatter            S (N-1)/N and N-1 additions of S/N
                          all_reduce                both; or, of small tensors, S and N-1 additions of S
                          broadcast                 S
                          all_to_all                what leaves, what arrives and what stays
                          send                      what leaves, and again on the rank that receives
    gloo              as comm/collectives.py composes them, or on one host by the seconds that were measured for two
                      ranks, times the ratio of these forms for N ranks and for two:
                          all_gather                N broadcasts by trees, on two threads
                          reduce_scatter            all-to-alls in pieces, and additions in memory
                          all_reduce                a ring: 2 (N-1) (α + S/N / B)
    levels            as comm/two_levels.py composes them of shared memory within a host (near) and gloo across the
    (CPU, H hosts)    hosts (far), each rank carrying 1/L of what crosses:
                          all_gather                far S/L, near S
                          reduce_scatter            near all-to-all and additions of S, far S/L
                          all_reduce                near reduce-scatter of S, far S/L, near gather of S
                          broadcast                 near S, far S/L, near S
                          all_to_all                the longer of what stays on a host and what leaves it
    nccl              the smallest of two protocols and, of an all-reduce, of ring and tree:
                          ring                      b + (N-1) α + (N-1)/N S / B, twice for an all-reduce
                          tree                      b + 2 ((L-1) α + ceil(log2 H) α of the cluster) + 2 S / 0.92 B
                          all_to_all                b + (N-1) α + the longer of what stays on a host and what leaves it

A ring of NCCL over hosts uses the adapters of all its ranks on a host: B = min(B of the host, L B of the cluster). An
all-to-all sends most of its bytes to other hosts, each rank through its own adapter.

Gradients whose sums of hosts travel in a dtype of their own (plan/exchange.py) are two calls, whose axes name their
levels. Each is priced for its own ranks and link. Not in the price: the Python of a call, and waiting for ranks that
come later.

Sources: NCCL, src/graph/tuning.cc (latencies of protocols, and their shares of the rate), as copied in
torch/_inductor/comm_analysis.py; Thakur et al. 2005, doi:10.1177/1094342005051521 (closed forms).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

from shardwise.base.hardware import Hardware, Level, Link
from shardwise.plan.exchange_calls import LEVELS
from shardwise.plan.mesh import Mesh
from shardwise.simulate.exchanges import ExchangeCall

TransportName = Literal["shared_memory", "gloo", "levels", "nccl"]

_ADDITION = 1.5
"""Bytes that an addition reads and writes, over those of a copy: three for two."""
_WHOLE_BYTES = 4 << 20
"""Largest all-reduce in shared memory that every rank sums by itself, times (N-1)²."""
_PIECE_BYTES = 16 << 20
"""Bytes of one all-to-all of a reduction by gloo."""
_SMALL_BYTES = 8 << 10
"""Largest all-reduce over several hosts that crosses as one part (comm/two_levels.py)."""
_GLOO_THREADS = 2
"""Threads of one group of gloo, on which its broadcasts run beside one another."""
_NCCL_BASE_S = {"simple": 8.4e-6, "ll": 6.6e-6}
"""Seconds that a collective of NCCL takes however small it is, by protocol."""
_NCCL_LATENCY = {"simple": 1.0, "ll": 0.18}
"""Latency of a protocol over that of the link, which tables of hardware give for ``simple``."""
_RING_RATE = {"simple": 1.0, "ll": 0.5}
_TREE_RATE = {"simple": 0.92, "ll": 1 / 3.8}
"""Rates of the protocols over that of the link."""


class GroupPlace(NamedTuple):
    """The place of a group's ranks on the hosts of a job."""

    level: Level
    """Link that the group crosses: ``host``, or ``cluster`` if its ranks lie on several hosts."""
    ranks: int
    hosts: int = 1
    """Hosts on which the ranks lie."""


def level_of(mesh: Mesh, axis: str, per_host: int) -> Level:
    """Return the link that the groups of an axis cross; see ``place_of``."""
    return place_of(mesh, axis, per_host).level


def place_of(mesh: Mesh, axis: str, per_host: int) -> GroupPlace:
    """Return the place of the groups of an axis, if rank r is on host r // per_host.

    Args:
        mesh: The mesh.
        axis: Name of the axis, with its level if the exchange has two: ``dp_shard across hosts``.
        per_host: Ranks of one host.

    Returns:
        The place of the group that lies on the most hosts.
    """
    for suffix in LEVELS:
        if axis.endswith(f" {suffix}"):
            whole = place_of(mesh, axis.removesuffix(f" {suffix}"), per_host)
            if suffix == LEVELS[0]:
                return GroupPlace("cluster" if whole.hosts > 1 else "host", whole.hosts, whole.hosts)
            return GroupPlace("host", whole.ranks // whole.hosts)
    size = mesh.size(axis)
    if mesh.world_size <= per_host or size == 1:
        return GroupPlace("host", size)
    groups = [mesh.ranks(axis, 0)] if is_aligned(mesh, axis, per_host) else mesh.groups(axis)
    hosts = max(len({rank // per_host for rank in ranks}) for ranks in groups)
    return GroupPlace("cluster" if hosts > 1 else "host", size, hosts)


def is_aligned(mesh: Mesh, axis: str, per_host: int) -> bool:
    """Return True if bounds of hosts are bounds of groups, so that all groups of an axis lie on hosts alike."""
    ranks = mesh.ranks(axis, 0)
    steps = {later - before for before, later in zip(ranks, ranks[1:], strict=False)}
    step = min(steps)
    bounds = (step, step * len(ranks))
    return len(steps) == 1 and all(per_host % each == 0 or each % per_host == 0 for each in bounds)


def transport_of(is_cpu: bool, place: GroupPlace, asked: str = "auto") -> TransportName:
    """Return the transport that a group's ranks use for collectives (comm/links.py).

    Args:
        is_cpu: True if ranks compute on CPUs.
        place: Place of the group on the hosts of the job.
        asked: Value of ``comm.transport``.
    """
    if not is_cpu:
        return "nccl"
    if asked == "torch" or place.hosts == place.ranks > 1:
        return "gloo"
    return "shared_memory" if place.hosts == 1 else "levels"


def exchange_s(
    call: ExchangeCall,
    hardware: Hardware,
    transport: TransportName,
    level: Level,
    ranks: int,
    hosts: int = 1,
) -> float:
    """Return the seconds of all calls of one exchange, on one rank.

    Args:
        call: Calls of one size.
        hardware: Rates of a rank.
        transport: Transport of the group.
        level: Link that the group crosses; with ``ranks`` and ``hosts`` a ``GroupPlace``.
        ranks: Ranks of the group.
        hosts: Hosts on which the ranks lie.
    """
    if ranks < 2:
        return 0.0
    if call.operation in ("send", "all_to_all"):
        full = (
            call.elements * call.itemsize * (ranks / (ranks - 1) if call.operation == "all_to_all" else 1.0)
        )
    else:
        times = 2 if call.operation == "all_reduce" else 1
        full = call.elements * call.itemsize * ranks / (ranks - 1) / times
    seconds = {"shared_memory": _shared_memory_s, "gloo": _gloo_s, "levels": _levels_s, "nccl": _nccl_s}[
        transport
    ]
    return call.calls * seconds(call.operation, full, hardware, level, ranks, hosts)


_SHARED = "shared"
"""Axis of sums over the ranks of a model that hold the same elements."""


class ExchangePrices:
    """Seconds of the exchanges of one job, each priced once.

    Args:
        hardware: Rates of a rank.
        mesh: The mesh.
        is_cpu: True if ranks compute on CPUs.
        per_host: Ranks of one host; None: all ranks are on one host.
    """

    def __init__(self, hardware: Hardware, mesh: Mesh, is_cpu: bool, per_host: int | None = None):
        self._hardware = hardware
        self._mesh = mesh
        self._is_cpu = is_cpu
        self._per_host = per_host or mesh.world_size
        self._seconds: dict[ExchangeCall, float] = {}
        self._places: dict[str, GroupPlace] = {}

    def of(self, call: ExchangeCall) -> float:
        """Return the seconds of equal calls of a collective, or of a message, on a rank."""
        if call not in self._seconds:
            place = self.place(call.axis)
            transport = transport_of(self._is_cpu, place)
            seconds = exchange_s(call, self._hardware, transport, place.level, place.ranks, place.hosts)
            if call.operation == "send" and self._is_cpu:
                seconds /= 2  # the sender copies the message in, and the receiver copies it out
            self._seconds[call] = seconds
        return self._seconds[call]

    def place(self, axis: str) -> GroupPlace:
        """Return the place of an axis's groups on the hosts of the job."""
        if axis not in self._places:
            name = "model" if axis == _SHARED else axis
            self._places[axis] = place_of(self._mesh, name, self._per_host)
        return self._places[axis]


# Shared memory -----------------------------------------------------------------------------------------------------


def copied_bytes(operation: str, full: float, ranks: int) -> float:
    """Return the bytes that a rank copies in shared memory; an addition counts as one and a half copies.

    Args:
        operation: Operation.
        full: Bytes of the full tensor.
        ranks: Ranks of the group.
    """
    part, others = full / ranks, full / ranks * (ranks - 1)
    if operation == "reduce_scatter":
        return others + _ADDITION * others
    if operation == "all_reduce":
        if full * (ranks - 1) ** 2 <= _WHOLE_BYTES:
            return full + _ADDITION * full * (ranks - 1)
        return others + _ADDITION * others + part + others
    if operation == "all_to_all":
        return 2 * others + part
    if operation == "send":
        return 2 * full
    return 0.0 if operation == "barrier" else full


def _shared_memory_s(
    operation: str, full: float, hardware: Hardware, level: Level, ranks: int, hosts: int
) -> float:
    link, copied = hardware.links["host"], copied_bytes(operation, full, ranks)
    # Two ranks that gather send a byte for two that they copy.
    computed = copied / (2 * link.bytes_s)
    measured = hardware.exchanges.get(operation)
    if not measured:
        return link.latency_s * (ranks - 1) + computed
    # What does not grow with the bytes is a post and a wait for each peer.
    smallest_s = measured[0][1]
    return interpolated_s(measured, copied) + (ranks - 2) * smallest_s


def interpolated_s(measured: Sequence[tuple[float, float]], nbytes: float) -> float:
    """Return seconds by bytes, interpolated between measured sizes; beyond the last, they grow with the bytes."""
    sizes = [size for size, _ in measured]
    above = bisect_left(sizes, nbytes)
    if above == 0:
        return measured[0][1]
    if above == len(measured):
        return measured[-1][1] * nbytes / sizes[-1]
    (small, less_s), (large, more_s) = measured[above - 1], measured[above]
    return less_s + (more_s - less_s) * (nbytes - small) / (large - small)


# Gloo --------------------------------------------------------------------------------------------------------------


def _gloo_s(operation: str, full: float, hardware: Hardware, level: Level, ranks: int, hosts: int) -> float:
    measured = hardware.exchanges.get(f"gloo {operation}")
    if not measured or level == "cluster":
        return _composed_s(operation, full, hardware, level, ranks, hosts)
    seconds = interpolated_s(measured, copied_bytes(operation, full, 2))
    if ranks == 2:
        return seconds
    of_all, of_two = (
        _composed_s(operation, full, hardware, level, each, hosts if each == ranks else 1)
        for each in (ranks, 2)
    )
    return seconds * of_all / of_two


def _composed_s(
    operation: str, full: float, hardware: Hardware, level: Level, ranks: int, hosts: int
) -> float:
    link = hardware.links[level]
    others = full / ranks * (ranks - 1)
    tree = math.ceil(math.log2(ranks))
    if operation == "all_gather":
        rounds = max(math.ceil(ranks / _GLOO_THREADS), 1) * tree
        return rounds * link.latency_s + others / link.bytes_s
    if operation == "broadcast":
        return tree * (link.latency_s + full / link.bytes_s)
    if operation == "reduce_scatter":
        pieces = max(math.ceil(full / _PIECE_BYTES), 1)
        exchanged = pieces * (ranks - 1) * link.latency_s + _through_adapters_s(
            full, hardware, level, ranks, hosts
        )
        # A copy that makes the piece contiguous, and the additions, in memory.
        return exchanged + hardware.touched_s(2 * full + 3 * others, "host")
    if operation == "all_reduce":
        added_s = hardware.touched_s(3 * others, "host")
        return 2 * (ranks - 1) * link.latency_s + 2 * others / link.bytes_s + added_s
    if operation == "all_to_all":
        return (ranks - 1) * link.latency_s + _through_adapters_s(full, hardware, level, ranks, hosts)
    if operation == "barrier":
        return 2 * (ranks - 1) * link.latency_s
    return link.latency_s + full / link.bytes_s


def _through_adapters_s(full: float, hardware: Hardware, level: Level, ranks: int, hosts: int) -> float:
    """Return the seconds in which each rank sends its parts of ``full`` bytes straight to all other ranks."""
    part, near = full / ranks, ranks / hosts - 1
    within_s = part * near / hardware.links["host"].bytes_s
    if level != "cluster":
        return within_s
    return max(within_s, part * (ranks - 1 - near) / hardware.links["cluster"].bytes_s)


# Two levels --------------------------------------------------------------------------------------------------------


def _levels_s(operation: str, full: float, hardware: Hardware, level: Level, ranks: int, hosts: int) -> float:
    least, most = ranks // hosts, -(-ranks // hosts)
    is_even = least == most

    def near(each: str, nbytes: float = full) -> float:
        return _shared_memory_s(each, nbytes, hardware, "host", most, 1)

    def far(each: str, nbytes: float) -> float:
        return _composed_s(each, nbytes, hardware, "cluster", hosts, hosts)

    if operation == "broadcast":
        return 2 * near("broadcast") + far("broadcast", full / least)
    if operation == "barrier" or (operation == "all_reduce" and full <= _SMALL_BYTES):
        return near("all_reduce") + far("all_reduce", full) + near("broadcast")
    if operation == "all_reduce" and is_even:
        return near("reduce_scatter") + far("all_reduce", full / least) + near("all_gather")
    if operation == "all_reduce":
        return near("all_reduce") + far("all_reduce", full / least) + near("broadcast")
    if operation == "all_to_all":
        leaving_s = (ranks - 1) * hardware.links["cluster"].latency_s + _through_adapters_s(
            full, hardware, level, ranks, hosts
        )
        return max(near("all_to_all", full * most / ranks), leaving_s)
    if operation == "all_gather" and is_even:
        return far("all_gather", full / least) + near("all_gather")
    if operation == "reduce_scatter" and is_even:
        added_s = hardware.touched_s(2 * full + 3 * full * (most - 1) / most, "host")
        return near("all_to_all") + added_s + far("reduce_scatter", full / least)
    return _composed_s(operation, full, hardware, level, ranks, hosts)


# NCCL --------------------------------------------------------------------------------------------------------------


def _nccl_s(operation: str, full: float, hardware: Hardware, level: Level, ranks: int, hosts: int) -> float:
    if operation == "send":
        link = hardware.links[level].among(2)
        return _NCCL_BASE_S["simple"] + link.latency_s + full / link.bytes_s
    if operation == "barrier":
        operation, full = "all_reduce", 8.0
    return min(
        found
        for protocol in ("ll", "simple")
        for found in _nccl_ways(operation, full, hardware, level, ranks, hosts, protocol)
    )


def _nccl_ways(
    operation: str, full: float, hardware: Hardware, level: Level, ranks: int, hosts: int, protocol: str
) -> list[float]:
    """Return the seconds of one collective by ring and, if the operation is an all-reduce, by tree."""
    base_s, factor = _NCCL_BASE_S[protocol], _NCCL_LATENCY[protocol]
    near_s, far_s = (factor * hardware.links[each].latency_s for each in ("host", "cluster"))
    if level != "cluster":
        near_s = factor * hardware.links[level].latency_s
        hosts = 1
    bytes_s = _ring_link(hardware, level, ranks, hosts).bytes_s
    times = 2 if operation == "all_reduce" else 1
    steps_s = times * ((ranks - hosts) * near_s + (hosts - 1) * far_s)
    if operation == "all_to_all":
        through_s = _through_adapters_s(full, hardware, level, ranks, hosts)
        return [base_s + steps_s + through_s / _RING_RATE[protocol]]
    sent = full if operation == "broadcast" else times * full * (ranks - 1) / ranks
    ways = [base_s + steps_s + sent / (_RING_RATE[protocol] * bytes_s)]
    if operation == "all_reduce":
        depth_s = 2 * ((ranks / hosts - 1) * near_s + math.ceil(math.log2(hosts)) * far_s)
        ways.append(base_s + depth_s + 2 * full / (_TREE_RATE[protocol] * bytes_s))
    return ways


def _ring_link(hardware: Hardware, level: Level, ranks: int, hosts: int) -> Link:
    """Return the link that a ring over all ranks of a group has between two of them."""
    per_host = ranks // hosts
    near, far = hardware.links["host"].among(per_host), hardware.links["cluster"]
    if level != "cluster":
        return hardware.links[level].among(ranks)
    return far._replace(bytes_s=min(per_host * far.bytes_s, near.bytes_s if per_host > 1 else math.inf))
