"""Placements and the moves between them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import PlanError
from shardwise.plan.placement import (
    AxisCut,
    ByHash,
    Partial,
    PieceRange,
    Placement,
    Replicate,
    Shard,
    ShardBlock,
    elements_sent,
    local_shape,
    move,
    pieces,
    runs,
)


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


SHAPES = [
    ((12, 3), Shard(0)),
    ((3, 12), Shard(1)),
    ((7, 2), Shard(0)),
    ((2, 7, 3), Shard(1)),
    ((5,), Replicate()),
]
FUSED = Shard(0, (ShardBlock(8, 4), ShardBlock(4, 2), ShardBlock(4, 2)))
"""Four query heads of two features, two key and value heads."""


@pytest.mark.parametrize(("shape", "where"), [*SHAPES, ((16, 3), FUSED)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_runs_of_all_ranks_cover_the_tensor(shape: tuple[int, ...], where: Placement, ranks: int) -> None:
    full = torch.arange(math.prod(shape))
    seen = torch.zeros(math.prod(shape), dtype=torch.long)
    for index in range(ranks):
        local = torch.full((math.prod(local_shape(shape, [AxisCut(where, 0, ranks)])),), -1)
        for run in runs(shape, [AxisCut(where, index, ranks)]):
            local[run.local : run.local + run.elements] = full[run.full : run.full + run.elements]
            seen[run.full : run.full + run.elements] += 1
        if isinstance(where, Shard):  # as slicing the dimension says
            held = pieces(where, shape[where.dim], index, ranks)
            wanted = torch.cat(
                [full.view(shape).narrow(where.dim, p.start, p.stop - p.start) for p in held], where.dim
            )
            size = wanted.shape[where.dim]
            kept = local.view(local_shape(shape, [AxisCut(where, 0, ranks)])).narrow(where.dim, 0, size)
            assert torch.equal(kept, wanted)
        for start in range(0, len(local), 5):  # and any part of them
            for run in runs(shape, [AxisCut(where, index, ranks)], start, min(start + 5, len(local))):
                assert torch.equal(
                    local[run.local : run.local + run.elements], full[run.full :][: run.elements]
                )
    assert bool((seen > 0).all())
    if not isinstance(where, Replicate) and where is not FUSED:
        assert bool((seen == 1).all())


def test_fewer_heads_than_ranks_are_held_by_neighbours() -> None:
    assert [pieces(FUSED, 16, i, 4)[1] for i in range(4)] == [PieceRange(8, 10, 2)] * 2 + [
        PieceRange(10, 12, 2)
    ] * 2
    held = [[run.replicas for run in runs((16, 3), [AxisCut(FUSED, i, 4)])] for i in range(4)]
    assert held == [[(1,), (2,), (2,)]] * 4
    assert [run.replicas for run in runs((16, 3), [AxisCut(FUSED, 0, 2)])] == [(1,)] * 3
    assert [run.replicas for run in runs((5,), [AxisCut(Replicate(), 3, 4)])] == [(4,)]


def test_heads_that_do_not_divide_are_refused_with_the_nearest_number() -> None:
    with pytest.raises(
        PlanError, match="6 heads .* over 4 ranks; the nearest number of ranks that works is 3"
    ):
        pieces(Shard(0, (ShardBlock(12, 6),)), 12, 0, 4)
