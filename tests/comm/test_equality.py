"""Ranks find out whether they hold the same number."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.collectives import Group
from shardwise.comm.equality import are_equal, differ, terms
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.plan.mesh import Mesh


def sums(counts: dict[int, int]) -> list[float]:
    """``terms`` of so many ranks by number, summed in float64 as an all-reduce would."""
    total = torch.zeros(8, dtype=torch.float64)
    for number, ranks in counts.items():
        total += torch.tensor(terms(number), dtype=torch.float64) * ranks
    return total.tolist()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
def test_equal_if_and_only_if_all_are(numbers: list[int]) -> None:
    counts = {number: numbers.count(number) for number in numbers}
    assert are_equal(len(numbers), sums(counts)) == (len(set(numbers)) == 1)
    assert bool(differ(len(numbers), torch.tensor(sums(counts), dtype=torch.float64))) == (
        len(set(numbers)) > 1
    )


@pytest.mark.parametrize("ranks", [8_193, 131_072, 1 << 21])
@pytest.mark.parametrize("other", [2**64 - 2, 2**63, 0])
def test_one_rank_of_many_is_seen(ranks: int, other: int) -> None:
    """A float holds the squares of 20-bit numbers exactly on 8,192 ranks, and of these pieces on two million."""
    same = 2**64 - 1
    assert are_equal(ranks, sums({same: ranks}))
    for others in (0, 1):
        found = sums({same: ranks - others, other: others})
        assert are_equal(ranks, found) == (not others)
        assert bool(differ(ranks, torch.tensor(found, dtype=torch.float64))) == bool(others)


def compare(world: World) -> list[bool]:
    group = world.group(Mesh(dp_shard=world.size), "dp", CommPolicy(), StepClock(20.0), Traffic())
    return [
        group.all_equal(2**63 + 5, "a test"),
        group.all_equal(2**63 + 5 + world.rank, "a test"),
        group.all_equal(-1, "a test"),
    ]


def test_a_group_asks_its_ranks(ranks: Any) -> None:
    assert ranks(2).run(compare) == [[True, False, True]] * 2
    assert Group.alone("dp").all_equal(7, "a test")
