"""Exchanges cost what the closed forms of their transports say, over the link that their ranks cross."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.base.hardware import Hardware, Level, Link, even_hardware
from shardwise.comm import shared_memory
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.plan.exchange_calls import LEVELS, Operation
from shardwise.plan.mesh import Mesh
from shardwise.simulate.exchange_price import (
    GroupPlace,
    TransportName,
    copied_bytes,
    exchange_s,
    interpolated_s,
    level_of,
    place_of,
    transport_of,
)
from shardwise.simulate.exchanges import ExchangeCall

OPERATIONS: tuple[Operation, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "all_to_all",
    "send",
)
NEAR, FAR = Link(100e9, 3e-6), Link(10e9, 14e-6)
EVEN = even_hardware(
    "even",
    1e12,
    host_bytes_s=1e10,
    device_bytes_s=1e12,
    link_bytes_s=1e10,
    disk_bytes_s=1e9,
    exchange_bytes_s=1,
)
HARDWARE: Hardware = replace(EVEN, links={"device": Link(1e10, 0), "host": NEAR, "cluster": FAR})


def sent(operation: Operation, full: float, ranks: int, calls: int = 1) -> ExchangeCall:
    """The call of one rank for a full tensor of so many bytes, as ``Traffic`` counts it."""
    share = 1.0 if operation == "send" else (ranks - 1) / ranks * (2 if operation == "all_reduce" else 1)
    return ExchangeCall(operation, "weights", "dp", round(full * share), 1, calls)


def seconds(
    operation: Operation,
    full: float,
    ranks: int,
    transport: TransportName = "nccl",
    hosts: int = 1,
    hardware: Hardware = HARDWARE,
) -> float:
    level: Level = "cluster" if hosts > 1 else "host"
    return exchange_s(sent(operation, full, ranks), hardware, transport, level, ranks, hosts)


# Places ------------------------------------------------------------------------------------------------------------


def test_the_link_that_an_axis_crosses() -> None:
    """64 ranks on 8 hosts of 8: tp fills half a host, dp_shard the host and three others, pp and copies cross."""
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=4, tp=4)
    found = {
        axis: place_of(mesh, axis, 8)
        for axis in ("tp", "dp_shard", "dp_replicate", "pp", "dp", "world", "cp")
    }
    assert found == {
        "tp": GroupPlace("host", 4),
        "dp_shard": GroupPlace("cluster", 4, 2),
        "dp_replicate": GroupPlace("cluster", 2, 2),
        "pp": GroupPlace("cluster", 2, 2),
        "dp": GroupPlace("cluster", 8, 4),
        "world": GroupPlace("cluster", 64, 8),
        "cp": GroupPlace("host", 1),
    }
    assert {level_of(mesh, axis, 64) for axis in found} == {"host"}
    experts = Mesh(dp_shard=8, ep=4)
    assert place_of(experts, "ep", 4) == GroupPlace("host", 4) and place_of(experts, "edp", 4).hosts == 2
    assert place_of(experts, "ep", 2) == GroupPlace("cluster", 4, 2)


def test_levels_of_an_exchange_lie_on_their_own_links() -> None:
    mesh = Mesh(dp_shard=16)
    across, within = (place_of(mesh, f"dp_shard {level}", 4) for level in LEVELS)
    assert across == GroupPlace("cluster", 4, 4) and within == GroupPlace("host", 4)


@pytest.mark.parametrize("per_host", [1, 2, 3, 4, 5, 6, 8, 12])
def test_places_are_those_of_the_worst_group(per_host: int) -> None:
    """Also if the hosts' bounds are no bounds of groups."""
    for mesh in (
        Mesh(pp=2, dp_shard=3, tp=2),
        Mesh(pp=2, dp_replicate=3, dp_shard=4, cp=2),
        Mesh(dp_shard=6, ep=3),
    ):
        for axis in (
            "pp",
            "dp_replicate",
            "dp_shard",
            "cp",
            "tp",
            "dp",
            "model",
            "stage",
            "world",
            "edp",
            "ep",
        ):
            worst = max(len({rank // per_host for rank in ranks}) for ranks in mesh.groups(axis))
            found = place_of(mesh, axis, per_host)
            assert found == GroupPlace("cluster" if worst > 1 else "host", mesh.size(axis), worst), (
                mesh,
                axis,
            )


def test_a_large_mesh_is_not_walked() -> None:
    mesh = Mesh(pp=8, dp_shard=2048, tp=8)
    assert place_of(mesh, "dp", 8) == GroupPlace("cluster", 2048, 2048)
    assert place_of(mesh, "tp", 8) == GroupPlace("host", 8)


def test_transports() -> None:
    host, places, hosts = GroupPlace("host", 8), GroupPlace("cluster", 16, 2), GroupPlace("cluster", 2, 2)
    assert transport_of(False, places) == "nccl"
    assert transport_of(True, host) == "shared_memory"
    assert transport_of(True, places) == "levels"
    assert transport_of(True, host, "torch") == transport_of(True, places, "torch") == "gloo"
    assert transport_of(True, hosts) == "gloo"


# Prices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["nccl", "gloo", "shared_memory", "levels"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_more_bytes_and_more_ranks_take_no_less(operation: Operation, transport: TransportName) -> None:
    """A ring's steps and copies grow with the ranks; a two-fold message takes at most twice as long."""
    sizes = [1 << power for power in range(6, 31, 2)]
    for ranks, hosts in ((2, 1), (4, 1), (8, 1), (16, 2), (32, 4)):
        if (transport == "shared_memory" and hosts > 1) or (transport == "levels" and hosts == 1):
            continue
        found = [seconds(operation, size, ranks, transport, hosts) for size in sizes]
        # Where several parts cross instead of one, a two-level sum has fewer bytes in each.
        assert all(
            0.99 * before <= after <= 4.4 * before for before, after in zip(found, found[1:], strict=False)
        )
    if transport == "levels":
        return
    by_ranks = [seconds(operation, 1 << 24, ranks, transport) for ranks in (2, 4, 8, 16)]
    assert by_ranks == sorted(by_ranks)


def test_a_ring_of_nccl() -> None:
    full = 1 << 30
    assert seconds("all_gather", full, 8) == pytest.approx(8.4e-6 + 7 * 3e-6 + full * 7 / 8 / 100e9)
    assert seconds("all_reduce", full, 8) == pytest.approx(8.4e-6 + 14 * 3e-6 + 2 * full * 7 / 8 / 100e9)
    assert seconds("broadcast", full, 8) == pytest.approx(8.4e-6 + 7 * 3e-6 + full / 100e9, rel=1e-6)
    assert seconds("send", full, 2) == pytest.approx(8.4e-6 + 3e-6 + full / 100e9)
    small = seconds("all_gather", 64, 8)
    assert small == pytest.approx(6.6e-6 + 7 * 0.18 * 3e-6, rel=0.01), "the protocol of low latency"
    call = sent("all_gather", full, 8, calls=3)
    assert exchange_s(call, HARDWARE, "nccl", "host", 8) == pytest.approx(3 * seconds("all_gather", full, 8))
    assert exchange_s(call, HARDWARE, "nccl", "host", 1) == 0.0


def test_few_ranks_of_a_host_may_have_a_part_of_its_rate() -> None:
    """Devices that are joined in pairs: two of them have a quarter of the links, up to four have half of them."""
    paired = NEAR._replace(groups=((2.0, 0.25), (4.0, 0.5)))
    wide = {"device": Link(1e10, 0), "host": paired, "cluster": Link(1e12, 14e-6)}
    hardware = replace(HARDWARE, links=wide)  # type: ignore[arg-type]
    full = 1 << 30
    for ranks, rate in ((2, 25e9), (3, 50e9), (4, 50e9), (8, 100e9)):
        steps = 8.4e-6 + (ranks - 1) * 3e-6
        part = full * (ranks - 1) / ranks
        assert seconds("all_gather", full, ranks, hardware=hardware) == pytest.approx(steps + part / rate)
    assert seconds("send", full, 2, hardware=hardware) == pytest.approx(8.4e-6 + 3e-6 + full / 25e9)
    over = seconds("all_gather", full, 4, hosts=2, hardware=hardware)
    assert over == pytest.approx(8.4e-6 + 14e-6 + 2 * 3e-6 + full * 3 / 4 / 25e9), "two ranks on each host"


def test_a_ring_over_hosts_uses_the_adapters_of_its_ranks() -> None:
    full = 1 << 32
    alone, two, eight = (seconds("all_gather", full, 8 * ranks, hosts=8) for ranks in (1, 2, 8))
    steps = 7 * 14e-6
    assert alone == pytest.approx(8.4e-6 + steps + full * 7 / 8 / 10e9)
    assert two == pytest.approx(8.4e-6 + steps + 8 * 3e-6 + full * 15 / 16 / 20e9)
    assert eight == pytest.approx(8.4e-6 + steps + 56 * 3e-6 + full * 63 / 64 / 80e9)
    wide = replace(HARDWARE, links={**HARDWARE.links, "cluster": Link(50e9, 14e-6)})
    narrow = seconds("all_gather", full, 64, hosts=8, hardware=wide)
    assert narrow == pytest.approx(8.4e-6 + steps + 56 * 3e-6 + full * 63 / 64 / 100e9), (
        "as much as the host's link"
    )


def test_a_tree_is_taken_if_it_is_shorter() -> None:
    """Of a small sum over many hosts, a ring has 2 (H-1) steps through the network and a tree 2 log2 H."""
    full, hosts = 1 << 22, 64
    ring = 8.4e-6 + 2 * 63 * 14e-6 + 2 * full * 63 / 64 / 10e9
    tree = 8.4e-6 + 2 * 6 * 14e-6 + 2 * full / (0.92 * 10e9)
    assert tree < ring and seconds("all_reduce", full, 64, hosts=hosts) == pytest.approx(tree)
    large = 1 << 34
    assert seconds("all_reduce", large, 64, hosts=hosts) == pytest.approx(
        8.4e-6 + 2 * 63 * 14e-6 + 2 * large * 63 / 64 / 10e9
    )


def test_an_all_to_all_leaves_the_host_by_each_ranks_adapter() -> None:
    full = 1 << 32
    part = full / 16
    assert seconds("all_to_all", full, 16, hosts=2) == pytest.approx(
        8.4e-6 + 14 * 3e-6 + 14e-6 + 8 * part / 10e9, rel=1e-6
    )
    assert seconds("all_to_all", full, 8) == pytest.approx(8.4e-6 + 7 * 3e-6 + full * 7 / 8 / 100e9)
    flat = seconds("all_to_all", full, 64, hosts=8)
    per_host = {"across": (8, 8), "within": (8, 1)}
    levels = {
        name: seconds("all_to_all", full / 4, ranks, hosts=hosts) for name, (ranks, hosts) in per_host.items()
    }
    assert levels["within"] < levels["across"] < flat / 3, "if a quarter of the rows goes to another host"


def test_levels_as_we_compose_them() -> None:
    """A slow network carries a host's sum once; each rank carries its part of it."""
    full, rate, link = 1 << 28, 1e6, NEAR
    hardware = replace(HARDWARE, links={"device": link, "host": link, "cluster": Link(rate, 1e-6)})
    of = {
        name: seconds(name, full, 8, "levels", hosts=2, hardware=hardware)  # type: ignore[arg-type]
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    }
    assert of["all_reduce"] == pytest.approx(full / 4 / rate, rel=0.01)
    assert of["reduce_scatter"] == pytest.approx(full / 8 / rate, rel=0.01)
    assert of["all_gather"] == pytest.approx(full / 8 / rate, rel=0.01)
    assert of["broadcast"] == pytest.approx(full / 4 / rate, rel=0.01)
    flat = seconds("all_reduce", full, 8, "gloo", hosts=2, hardware=hardware)
    assert flat > 1.7 * of["all_reduce"]
    uneven = seconds("all_reduce", full, 3, "levels", hosts=2, hardware=hardware)
    assert uneven == pytest.approx(full / rate, rel=0.01), "one rank of each host carries all"


def test_gloo_as_we_compose_it() -> None:
    full = 1 << 26
    assert seconds("all_gather", full, 4, "gloo") == pytest.approx(2 * 2 * 3e-6 + full * 3 / 4 / 100e9)
    pieces = full / (16 << 20)
    moved = pieces * 3 * 3e-6 + full * 3 / 4 / 100e9 + (2 * full + 3 * full * 3 / 4) / 1e10
    assert seconds("reduce_scatter", full, 4, "gloo") == pytest.approx(moved)
    ring = 6 * 3e-6 + 2 * full * 3 / 4 / 100e9 + 3 * full * 3 / 4 / 1e10
    assert seconds("all_reduce", full, 4, "gloo") == pytest.approx(ring)
    assert seconds("send", full, 2, "gloo", hosts=2) == pytest.approx(14e-6 + full / 10e9)


def test_measured_seconds_come_before_the_closed_form() -> None:
    rows = ((1e3, 1e-4), (1e5, 1e-4), (1e7, 1e-2))
    assert [interpolated_s(rows, size) for size in (1, 1e3, 1e6, 1e7, 4e7)] == pytest.approx(
        [1e-4, 1e-4, 1e-3, 1e-2, 4e-2]
    )
    measured = replace(HARDWARE, exchanges={"all_gather": rows})
    assert seconds("all_gather", 1e7, 2, "shared_memory", hardware=measured) == pytest.approx(1e-2)
    assert seconds("all_gather", 1e7, 4, "shared_memory", hardware=measured) == pytest.approx(1e-2 + 2e-4)
    assert seconds("send", 1e7, 2, "shared_memory", hardware=measured) == pytest.approx(3e-6 + 1e7 / 100e9)


def copied(world: World) -> list[tuple[str, int, float, float]]:
    """Operation, full bytes, bytes that this rank copied (an addition counts 1.5 times), and what is foreseen."""
    counts: Counter[str] = Counter()
    plain_copy, plain_sum = shared_memory._copy, shared_memory.SharedMemoryTransport._sum

    def copy(to: torch.Tensor, source: torch.Tensor) -> None:
        counts["bytes"] += min(to.nbytes, source.nbytes)
        plain_copy(to, source)

    def add(self: Any, total: torch.Tensor, parts: Any, accumulate: bool) -> None:
        counts["added"] += total.nbytes * (len(parts) - 1)
        plain_sum(self, total, parts, accumulate)

    size = world.size
    group = world.group(Mesh(dp_shard=size), "dp", CommPolicy(), StepClock(60.0), Traffic())
    found = []
    shared_memory._copy, shared_memory.SharedMemoryTransport._sum = copy, add  # type: ignore[method-assign]
    try:
        for elements in (960, 960 << 12):
            full, part = torch.ones(elements), torch.ones(elements // size)
            counts_of = [[elements // size] * size] * size
            calls: list[tuple[Operation, Any]] = [
                (
                    "all_gather",
                    lambda f=full, p=part: group.all_gather(f, f.view(size, -1)[group.index], "x"),
                ),
                ("reduce_scatter", lambda f=full, p=part: group.reduce_scatter(p, f, "x")),
                ("all_reduce", lambda f=full: group.all_reduce(f, "x")),
                ("broadcast", lambda f=full: group.broadcast(f, 0, "x")),
                (
                    "all_to_all",
                    lambda f=full, c=counts_of: group.all_to_all(torch.empty_like(f), f, c, "x"),
                ),
            ]
            for operation, call in calls:
                counts.clear()
                call().wait()
                total = counts["bytes"] + 1.5 * counts["added"]
                found.append((operation, elements, total, copied_bytes(operation, full.nbytes, size)))
    finally:
        shared_memory._copy, shared_memory.SharedMemoryTransport._sum = plain_copy, plain_sum  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_copies_of_the_shared_memory_are_those_that_are_foreseen(ranks: Any, size: int) -> None:
    for rows in ranks(size).run(copied):
        for operation, elements, total, foreseen in rows:
            assert total == pytest.approx(foreseen), (operation, elements)


def test_measured_seconds_of_gloo_are_those_of_two_ranks_on_one_host() -> None:
    closed = replace(EVEN, links={"device": Link(1e10, 0), "host": NEAR, "cluster": FAR})
    measured = replace(closed, exchanges={"gloo all_gather": ((1e3, 1e-3), (1e6, 1e-3))})

    def price(rates: Hardware, ranks: int, level: Level = "host", hosts: int = 1) -> float:
        return exchange_s(sent("all_gather", 1e5, ranks), rates, "gloo", level, ranks, hosts)

    assert price(measured, 2) == pytest.approx(1e-3)
    assert price(measured, 4) == pytest.approx(1e-3 * price(closed, 4) / price(closed, 2))
    assert price(measured, 4, "cluster", 2) == price(closed, 4, "cluster", 2)
    shared = exchange_s(sent("all_gather", 1e5, 2), measured, "shared_memory", "host", 2)
    assert shared == exchange_s(sent("all_gather", 1e5, 2), closed, "shared_memory", "host", 2)
