"""Placements and the moves between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.errors import PlanError
from shardwise.plan.placement import ByHash, Partial, Replicate, Shard, elements_sent, move


def test_legal_moves() -> None:
    assert move(Shard(), Replicate()) == "all_gather"
    assert move(Partial(), Shard()) == "reduce_scatter"
    assert move(Partial(), Replicate()) == "all_reduce"
    assert move(Replicate(), Shard()) == "slice"
    assert move(Shard(1), Shard(1)) == ""


@pytest.mark.parametrize(
    ("source", "target"),
    [(Replicate(), Partial()), (Shard(), Partial()), (ByHash(), Replicate()), (Shard(0), Shard(1))],
    ids=str,
)
def test_illegal_moves(source: Shard, target: Shard) -> None:
    with pytest.raises(PlanError, match="no move leads from"):
        move(source, target)


@given(st.integers(0, 1000), st.integers(1, 16))
def test_an_all_reduce_is_a_reduce_scatter_and_a_gather(shard: int, ranks: int) -> None:
    whole = shard * ranks
    scatter = elements_sent(Partial(), Shard(), whole, ranks)
    gather = elements_sent(Shard(), Replicate(), whole, ranks)
    assert elements_sent(Partial(), Replicate(), whole, ranks) == scatter + gather == 2 * shard * (ranks - 1)
    assert elements_sent(Replicate(), Shard(), whole, ranks) == 0
    assert elements_sent(Shard(), Shard(), whole, ranks) == 0


def test_letters() -> None:
    assert [str(p) for p in (Replicate(), Shard(), Shard(1), Partial(), ByHash())] == [
        "R",
        "S",
        "S(1)",
        "P",
        "H",
    ]
