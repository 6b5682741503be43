"""Collectives of ranks that pretend to lie on several hosts, beside their definitions."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.comm import links
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.plan.exchange import GradientExchange
from shardwise.plan.exchange_calls import crossing_bytes
from shardwise.plan.mesh import Mesh

ELEMENTS = 24 * 6


def group_over(world: World, hosts: tuple[int, ...]) -> Group:
    """All ranks, whose exchanges go in two levels over ``hosts``."""
    mesh, policy = Mesh(dp_shard=world.size), CommPolicy()
    clock, traffic = world.clock(policy), Traffic()
    group = world.group(mesh, "dp_shard", policy, clock, traffic)
    with patch.object(world, "hosts", hosts):
        group.levels = world.two_levels(mesh, "dp_shard", policy, clock, traffic)
    return group


def addend(rank: int, dtype: torch.dtype) -> torch.Tensor:
    draws = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, (ELEMENTS,), generator=draws).to(dtype)


def reduced(
    world: World, hosts: tuple[int, ...], wire: str, total: str, between: str, accumulate: bool
) -> tuple[list[float], int]:
    """This rank's range of the sum, and the bytes that the group has counted."""
    group = group_over(world, hosts)
    exchange = GradientExchange("two_level", world.size, len({*hosts}))
    into = torch.full((ELEMENTS // world.size,), 3.0, dtype=getattr(torch, total))
    full = addend(world.rank, getattr(torch, wire))
    group.reduce_scatter(
        into, full, "a sum", accumulate=accumulate, exchange=exchange, between=getattr(torch, between)
    ).wait()
    assert torch.equal(full, addend(world.rank, getattr(torch, wire))), "the addend keeps its contents"
    return into.tolist(), group.traffic.bytes


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)])
@pytest.mark.parametrize(
    ("wire", "total", "between"),
    [
        ("float64", "float64", "float64"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_the_sum_is_that_of_one_step(
    ranks: Any, hosts: tuple[int, ...], wire: str, total: str, between: str, accumulate: bool
) -> None:
    """Whole numbers, which every dtype adds exactly."""
    size = len(hosts)
    found = ranks(size).run(reduced, hosts, wire, total, between, accumulate)
    whole = sum(addend(rank, torch.float64) for rank in range(size)) + 3 * accumulate
    assert [each for part, _ in found for each in part] == whole.tolist()
    itemsize, wide = (getattr(torch, dtype).itemsize for dtype in (wire, between))
    per_host = size // len({*hosts})
    within = ELEMENTS * (per_host - 1) // per_host * itemsize
    across = ELEMENTS // per_host * (len({*hosts}) - 1) // len({*hosts}) * wide
    assert {sent for _, sent in found} == {within + across}


def rounded(world: World, between: str) -> list[float]:
    """The sum of numbers that the sum of one host cannot have in 16 bits."""
    group = group_over(world, (0, 0, 1, 1))
    into = torch.empty(1, dtype=torch.float32)
    full = torch.full((4,), (256.0, 1.0, 256.0, 1.0)[world.rank], dtype=torch.bfloat16)
    group.reduce_scatter(
        into,
        full,
        "a sum",
        exchange=GradientExchange("two_level", 4, 2),
        between=getattr(torch, between),
    ).wait()
    return into.tolist()


@pytest.mark.parametrize(("between", "total"), [("float32", 514.0), ("bfloat16", 512.0)])
def test_sums_of_hosts_travel_in_the_dtype_given(ranks: Any, between: str, total: float) -> None:
    assert ranks(4).run(rounded, between) == [[total]] * 4


def transport_over(world: World, hosts: tuple[int, ...]) -> tuple[Group, type]:
    mesh, policy = Mesh(dp_shard=world.size), CommPolicy(timeout_s=20.0)
    with patch.object(world, "hosts", hosts):
        group = world.group(mesh, "dp_shard", policy, world.clock(policy), Traffic())
    return group, type(group.transport)


class Crossed(NamedTuple):
    """What one rank found, and the bytes that left it for ranks of other hosts by the calls of gloo."""

    kind: str
    failures: list[str]
    counted: dict[str, int]
    bits: dict[str, bytes]


def collectives(world: World, hosts: tuple[int, ...], elements: int) -> Crossed:
    """Run every collective beside its definition."""
    group, kind = transport_over(world, hosts)
    size, rank = world.size, world.rank
    failures, bits, counted = [], {}, {}
    every = [
        torch.randint(-9, 9, (size * elements,), generator=torch.Generator().manual_seed(each)).double()
        for each in range(size)
    ]

    def check(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(found, wanted):
            failures.append(f"{name}: {found.tolist()[:8]} for {wanted.tolist()[:8]}")
        counted[name] = group.traffic.bytes - sum(counted.values())

    summed = every[rank].clone()
    group.all_reduce(summed, "a sum").wait()
    check("all_reduce", summed, sum(every))
    odd = every[rank][: size * elements - 1].clone()
    group.all_reduce(odd, "an odd sum").wait()
    check("odd", odd, sum(every)[:-1])
    part = torch.full((elements,), 2.0, dtype=torch.float64)
    group.reduce_scatter(part, every[rank], "a part", accumulate=True).wait()
    check("reduce_scatter", part, sum(every).view(size, -1)[rank] + 2)
    output = torch.zeros(size * elements, dtype=torch.float64)
    first = group.all_gather(output, every[rank][:elements], "shards")
    inside = torch.zeros(size, elements, dtype=torch.float64)
    inside[rank] = every[rank][:elements]
    second = group.all_gather(inside.view(-1), inside[rank], "shards")
    second.wait()
    first.wait()
    for name, found in (("all_gather", output), ("in place", inside.view(-1))):
        check(name, found, torch.cat([each[:elements] for each in every]))
    for root in range(size):
        copied = every[rank].clone()
        group.broadcast(copied, root, "a copy").wait()
        check(f"broadcast {root}", copied, every[root])
    counts = [[(3 * i + 2 * j) % 4 for j in range(size)] for i in range(size)]
    rows = [torch.arange(sum(row)) + 100 * i for i, row in enumerate(counts)]
    arrived = torch.zeros(sum(row[rank] for row in counts), dtype=torch.int64)
    group.all_to_all(arrived, rows[rank], counts, "rows").wait()
    check("all_to_all", arrived, torch.cat([rows[i].split(counts[i])[rank] for i in range(size)]))
    group.barrier()
    uneven = torch.rand(size * elements, generator=torch.Generator().manual_seed(rank))
    group.all_reduce(uneven, "a sum that rounds").wait()
    bits["sum"] = uneven.numpy().tobytes()
    return Crossed(kind.__name__, failures, counted, bits)


@pytest.mark.parametrize("elements", [6, 3000])
@pytest.mark.parametrize(
    ("hosts", "kind"),
    [
        ((0, 0, 1, 1), "TwoLevelTransport"),
        ((0, 0, 1), "TwoLevelTransport"),
        ((0, 1, 1, 0), "TwoLevelTransport"),
        ((0, 1), "TorchTransport"),
        ((0, 0), "SharedMemoryTransport"),
        pytest.param((0, 0, 0, 1, 1, 1), "TwoLevelTransport", marks=pytest.mark.soak),
        pytest.param((0, 0, 1, 1, 2, 2), "TwoLevelTransport", marks=pytest.mark.soak),
        pytest.param((0, 1, 1, 1, 2, 2), "TwoLevelTransport", marks=pytest.mark.soak),
    ],
)
def test_every_collective_over_hosts(ranks: Any, hosts: tuple[int, ...], kind: str, elements: int) -> None:
    """Whole numbers, which are added exactly; a sum that rounds has the same bits on all ranks and in each run."""
    size = len(hosts)
    found, again = (ranks(size).run(collectives, hosts, elements) for _ in range(2))
    assert [each.failures for each in found] == [[]] * size
    assert {each.kind for each in found} == {kind}
    assert len({each.bits["sum"] for each in (*found, *again)}) == 1
    for name, times in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 2), ("broadcast 0", 1)):
        assert {each.counted[name] for each in found} == {times * 8 * elements * (size - 1)}, name


def in_pieces(world: World, hosts: tuple[int, ...]) -> list[str]:
    """Run every collective over new transports whose messages between hosts have at most 125 elements."""
    fresh = links.WorldLinks(world.rank, world.members, world.device, world.backend, world.board, False)
    with patch.object(links, "MESSAGE_BYTES", 1000), patch.object(world, "links", fresh):
        failures = collectives(world, hosts, 300).failures
    fresh.release()
    return failures


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 1), (0, 1)])
def test_messages_between_hosts_are_cut(ranks: Any, hosts: tuple[int, ...]) -> None:
    assert ranks(len(hosts)).run(in_pieces, hosts) == [[]] * len(hosts)


_LEFT_OUT: dict[str, Any] = {"_across": MagicMock(), "_spread": lambda *arguments: None}


def without(world: World, hosts: tuple[int, ...], part: str) -> list[str]:
    """Return the collectives that differ from their definitions if a part of the transport is missing."""
    group, _ = transport_over(world, hosts)
    with patch.object(group.transport, part, _LEFT_OUT[part]):
        failures = collectives(world, hosts, 3000).failures
    return [failure.partition(":")[0] for failure in failures]


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("_spread", {0: ["broadcast 2", "broadcast 3"], 2: ["broadcast 0", "broadcast 1"]}),
        ("_across", {rank: ["all_reduce", "odd"] for rank in range(4)}),
    ],
    ids=["parts of a host that only their carriers have", "sums that never cross"],
)
def test_a_step_that_is_left_out_is_seen(ranks: Any, part: str, wrong: dict[int, list[str]]) -> None:
    """The comparisons of ``collectives`` fail where the transport lacks one of its steps."""
    found = ranks(4).run(without, (0, 0, 1, 1), part)
    for rank, names in wrong.items():
        assert {*names} <= {*found[rank]}, found


def moved(world: World, hosts: tuple[int, ...], elements: int) -> dict[str, tuple[int, int]]:
    """Return the bytes that this rank gives to gloo, and its calls, by collective."""
    group, _ = transport_over(world, hosts)
    transport: Any = group.transport
    full, shard = torch.rand(world.size * elements), torch.rand(elements)
    given: list[int] = []

    def counting(name: str, call: Any, share: Callable[[tuple[Any, ...]], int]) -> Any:
        def counted(*arguments: Any) -> Any:
            given.append(share(arguments))
            return call(*arguments)

        return counted

    found = {}
    across, flat = transport._across, transport.flat
    peers = len({*hosts}) - 1
    with ExitStack() as stack:
        for target, name, share in (
            (across, "all_reduce", lambda each: 2 * each[0].nbytes * peers // (peers + 1)),
            (across, "broadcast", lambda each: each[0].nbytes * (each[1] == transport._host) * peers),
            (across, "gather", lambda each: each[0][0].nbytes * peers),
            (across, "all_to_all", lambda each: each[1].nbytes * peers // (peers + 1)),
            (flat, "all_reduce", lambda each: 1 << 40),
            (flat, "broadcast", lambda each: 1 << 40),
            (flat, "all_gather", lambda each: 1 << 40),
            (flat, "reduce_scatter", lambda each: 1 << 40),
        ):
            stack.enter_context(patch.object(target, name, counting(name, getattr(target, name), share)))
        for name, run in (
            ("all_reduce", lambda: group.all_reduce(full, "x")),
            ("reduce_scatter", lambda: group.reduce_scatter(shard, full, "x")),
            ("all_gather", lambda: group.all_gather(full, shard, "x")),
            ("broadcast", lambda: group.broadcast(full, 0, "x")),
        ):
            given.clear()
            run().wait()
            found[name] = (sum(given), crossing_bytes(name, full.numel(), 4, len({*hosts})))
    return found


def test_each_host_sends_its_sum_once(ranks: Any) -> None:
    """The bytes given to gloo for other hosts are those of the closed form, one part for each rank of the host."""
    found = ranks(4).run(moved, (0, 0, 1, 1), 8192)
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        assert {each[name][0] for each in found} == {found[0][name][1] // 2}, name
    assert [each["broadcast"][0] for each in found] == [4 * 2 * 8192, 4 * 2 * 8192, 0, 0]


def chosen(world: World, hosts: tuple[int, ...], asked: Any) -> Any:
    with patch.object(world, "hosts", hosts):
        try:
            return world.exchange(Mesh(dp_shard=world.size), "dp_shard", asked)
        except ConfigError as error:
            return str(error)


def test_uneven_hosts_have_no_levels(ranks: Any) -> None:
    assert ranks(3).run(chosen, (0, 0, 1), "auto")[0] == GradientExchange("auto", 3, 2, False, False)
    assert ranks(4).run(chosen, (0, 0, 1, 1), "auto")[0] == GradientExchange("auto", 4, 2, True, False)
    refused = ranks(3).run(chosen, (0, 0, 1), "two_level")
    assert {*refused} == {
        "zero.exchange: two_level needs equally many ranks of 'dp_shard' on each host, more than one and neighbours on "
        "the axis; here the 3 ranks of such a group lie on the hosts 0, 0, 1; use auto"
    }
