"""Rows that ranks exchange: their numbers, and blocks of the size that a capacity allows."""

import math
from typing import NamedTuple

import pytest

from shardwise.comm.collectives import Group
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.parallel.expert.cost import expected_rows
from shardwise.parallel.expert.row_counts import block_counts, even_counts

EXPERTS = 8


class OfSize(NamedTuple):
    """As much of a group as bounds follow from."""

    size: int


@pytest.mark.parametrize("levels", [(2,), (4,), (2, 2), (2, 4)])
@pytest.mark.parametrize("capacity", [0.5, 1.0, 2.0])
def test_blocks_are_as_large_as_the_capacity_allows(levels: tuple[int, ...], capacity: float) -> None:
    """Rows that leave a rank are those of the closed form, and every expert has room for all that may come."""
    tokens, top_k, experts, ep = 64, 2, 16, math.prod(levels)
    room = min(tokens, int(capacity * top_k * tokens / experts))
    bounds = block_counts(tokens, room, experts, [OfSize(size) for size in levels], OfSize(1))  # type: ignore[list-item,arg-type]
    rows = sum((len(counts) - 1) * counts[0][0] for counts in bounds.hops)
    hosts = levels[0] if len(levels) > 1 else 1
    assert rows == expected_rows(tokens, top_k, experts, ep, hosts, capacity)
    assert bounds.experts == [min(ep * room, bounds.parts[0])] * (experts // ep)


@pytest.mark.parametrize("parts", [1, 3])
def test_even_counts_are_what_is_expected(parts: int) -> None:
    ep, etp = Group("ep", (0, 1, 2, 3), 0, None, StepClock(0.0), Traffic()), Group.alone("etp")
    found = even_counts(600, parts, 2, EXPERTS, [ep], ep, etp)
    assert sum(found.experts) == found.fullest == 600 * 2 / parts
    (counts,) = found.hops
    assert sum(counts[0][1:]) == pytest.approx(expected_rows(600, 2, EXPERTS, 4) / parts, abs=3)
    assert found.parts == [sum(row[0] for row in counts)]
