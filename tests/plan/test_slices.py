"""Slices over several axes: the pieces of all ranks make the whole, and who counts, writes and adds what."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.mesh import EXPERT, Mesh
from shardwise.plan.placement import Partial, Placement, Replicate, Shard, ShardBlock
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.plan.slices import TensorSlices

R, P = Replicate(), Partial()
FUSED = Shard(1, (ShardBlock(8, 4), ShardBlock(4, 2), ShardBlock(4, 2)))
"""Four query heads of two features, two key and two value heads: 16 columns."""


def slices(
    shape: tuple[int, ...],
    mesh: Mesh,
    where: dict[str, Placement],
    gradient: dict[str, Placement] | None = None,
) -> list[TensorSlices]:
    registry = Registry(mesh)
    gradient = {axis: where.get(axis, R) for axis in mesh.model_axes(EXPERT)} | {"edp": P} | (gradient or {})
    for kind in ("parameter", "gradient"):
        registry.add(TensorInfo("w", shape, torch.float32, kind, where, gradient, axes=EXPERT))  # type: ignore[arg-type]
    return [TensorSlices(registry, mesh, rank) for rank in range(mesh.world_size)]


@st.composite
def cut_tensors(draw: Any) -> tuple[tuple[int, ...], Mesh, dict[str, Placement]]:
    """Two axes that cut: different dimensions or one, evenly or not, in blocks or not."""
    copies, ep, etp = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    mesh = Mesh(dp_shard=copies * ep * etp, ep=ep, etp=etp)
    if draw(st.booleans()):  # experts, in halves of gate and up: [E/ep, 2F/etp, D]
        shape = (draw(st.integers(1, 6)), 16, draw(st.integers(1, 3)))
        return shape, mesh, {"ep": Shard(0), "etp": FUSED}
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    return shape, mesh, {axis: Shard(draw(dims)) if draw(st.booleans()) else R for axis in ("ep", "etp")}


@given(cut_tensors(), st.data())
def test_the_pieces_of_all_ranks_make_the_whole(case: Any, data: Any) -> None:
    shape, mesh, where = case
    full = torch.arange(math.prod(shape)).view(shape)
    times, first_times, said = (torch.zeros(math.prod(shape), dtype=torch.long) for _ in range(3))
    for here in slices(shape, mesh, where):
        info = here.registry.get("parameter", "w")
        piece = torch.full(here.local_shape(info), -1)
        for theirs, mine in here.views(info, full, piece):
            mine.copy_(theirs)
        flat = torch.full((piece.numel(),), -1)
        for run in here.runs(info):
            flat[run.local : run.local + run.elements] = full.view(-1)[run.full : run.full + run.elements]
            times[run.full : run.full + run.elements] += 1
            if here.is_first(info, run):
                first_times[run.full : run.full + run.elements] += 1
            said[run.full : run.full + run.elements] = math.prod(run.replicas) * mesh.edp
        assert torch.equal(flat, piece.view(-1)), "views and runs hold the same elements"
        start = data.draw(st.integers(0, len(flat)))
        stop = data.draw(st.integers(start, len(flat)))
        part = torch.full_like(flat, -1)
        for run in here.runs(info, start, stop):
            assert start <= run.local and run.local + run.elements <= stop
            part[run.local : run.local + run.elements] = full.view(-1)[run.full : run.full + run.elements]
        assert torch.equal(part[start:stop], flat[start:stop])
    assert (times > 0).all()
    assert torch.equal(times, said), "each rank knows how many hold what it holds"
    assert (first_times == mesh.edp).all(), "one rank of each stage's copy is the first"


def test_experts_are_cut_along_two_dimensions() -> None:
    """[E/ep, 2F/etp, D]."""
    where = {"ep": Shard(0), "etp": Shard(1, (ShardBlock(4, 4), ShardBlock(4, 4)))}
    ranks = slices((2, 8, 3), Mesh(dp_shard=4, ep=2, etp=2), where)
    info = ranks[0].registry.get("parameter", "w")
    assert [here.local_shape(info) for here in ranks] == [(1, 4, 3)] * 4
    last = [(run.local, run.full, run.elements) for run in ranks[3].runs(info)]
    # Expert 1, columns 2 and 3 of the gate and of the up projection, which begin at 0 and at 4.
    assert last == [(0, (8 + 2) * 3, 6), (6, (8 + 4 + 2) * 3, 6)]


@pytest.mark.parametrize(
    ("where", "gradient", "wanted"),
    [
        ({}, {"etp": P}, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ({}, {"ep": P}, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ({}, {"ep": P, "etp": P}, [tuple(range(8))]),
        ({"etp": Shard(0)}, {"ep": P, "etp": Shard(0)}, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ({"etp": Shard(0, (ShardBlock(4, 2),))}, {}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"etp": Shard(0, (ShardBlock(4, 2),))}, {"ep": P}, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ({}, {}, []),
    ],
    ids=["sequence", "context", "both", "cut and context", "neighbours", "neighbours and context", "equal"],
)
def test_gradients_are_added_up_over_the_axes_that_hold_addends(
    where: dict[str, Placement], gradient: dict[str, Placement], wanted: list[tuple[int, ...]]
) -> None:
    """Of each element every addend is in the sum once, and one rank counts it in the norm."""
    ranks = slices((4,), Mesh(dp_shard=8, ep=2, etp=4), where, gradient)
    found: set[tuple[int, ...]] = set()
    counted: Counter[int] = Counter()
    for here in ranks:
        info = here.registry.get("parameter", "w")
        for run in here.runs(info):
            found.add(here.addends(info, run))
            if here.is_first(info, run):
                counted.update(range(run.full, run.full + run.elements))
    assert sorted(found - {()}) == wanted
    assert counted == Counter({element: 1 for element in range(4)})
    assert sorted(ranks[0].groups_of_addends()) == wanted
    assert {group for here in ranks for group in shared(here)} == set(wanted)


def shared(here: TensorSlices) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """The shared ranges of a bucket that has the tensor alone and is owned as a whole."""
    elements = math.prod(here.local_shape(here.registry.get("parameter", "w")))
    bucket: Any = SimpleNamespace(overlaps=lambda index, count: [(SimpleNamespace(name="w"), 0, elements, 0)])
    return here.shared_ranges(bucket, 0, 1)


def test_shared_ranges_of_a_fused_tensor_are_those_of_its_copied_heads() -> None:
    """With eight ranks every rank has one key and value head of two, which it shares with three others."""
    for here in slices(
        (3, 16), Mesh(dp_shard=8, etp=8), {"etp": Shard(1, (ShardBlock(8, 4), ShardBlock(8, 2)))}
    ):
        kin = tuple(range(4)) if here.rank < 4 else tuple(range(4, 8))
        pair = (here.rank // 2 * 2, here.rank // 2 * 2 + 1)
        assert shared(here) == {
            pair: [(row * 6, row * 6 + 2) for row in range(3)],
            kin: [(row * 6 + 2, row * 6 + 6) for row in range(3)],
        }


def test_a_tensor_without_copies_has_no_shared_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs, as many as rows, are not looked at."""
    monkeypatch.setattr(TensorSlices, "runs", lambda *_: pytest.fail("runs were looked at"))
    for here in slices((1 << 40, 8), Mesh(dp_shard=4, etp=4), {"etp": Shard(1)}):
        assert shared(here) == {}
