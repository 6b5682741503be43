"""Exchanges of ranks that pretend to lie on several hosts, beside the same in one step."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.plan.exchange import GradientExchange
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


def gathered(world: World, hosts: tuple[int, ...]) -> tuple[list[int], int, set[str]]:
    group = group_over(world, hosts)
    output = torch.empty(3 * world.size, dtype=torch.int32)
    group.all_gather(output, torch.arange(3, dtype=torch.int32) + 10 * world.rank, "ranges").wait()
    return output.tolist(), group.traffic.bytes, {name for name, *_ in group.traffic.counts}


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)])
def test_gathers_in_two_levels(ranks: Any, hosts: tuple[int, ...]) -> None:
    size = len(hosts)
    wanted = [10 * rank + place for rank in range(size) for place in range(3)]
    assert ranks(size).run(gathered, hosts) == [(wanted, 3 * 4 * (size - 1), {"all_gather"})] * size


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
