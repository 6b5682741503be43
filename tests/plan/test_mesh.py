"""The closed form against arange(world).view(...)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import MeshError
from shardwise.plan.mesh import DataParallelPolicy, Mesh, MeshPolicy

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA_AXES = ("pp", "dp_replicate", "data_shard", "cp", "tp")


def made(data_shard: int, cp: int, **axes: int) -> Mesh:
    return Mesh(dp_shard=data_shard * cp, cp=cp, **axes)


meshes = st.builds(made, **{axis: st.integers(1, 4) for axis in DATA_AXES})


@settings(max_examples=30)
@given(meshes)
def test_groups_and_indices_are_those_of_a_view(mesh: Mesh) -> None:
    for axes, together in ((AXES, "dp"), (DATA_AXES, "data")):
        ranks = torch.arange(mesh.world_size).view([mesh.size(axis) for axis in axes])
        for place, axis in enumerate(axes):
            rows = ranks.movedim(place, -1).reshape(-1, mesh.size(axis)).tolist()
            assert sorted(map(list, mesh.groups(axis))) == sorted(rows)
            for row in rows:
                for index, rank in enumerate(row):
                    assert mesh.index(axis, rank) == index
                    assert list(mesh.ranks(axis, rank)) == row
        both = ranks.movedim((1, 2), (-2, -1)).reshape(-1, mesh.size(together)).tolist()
        assert sorted(map(list, mesh.groups(together))) == sorted(both)
        for row in both:
            assert [mesh.index(together, rank) for rank in row] == list(range(len(row)))


EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")


@st.composite
def expert_meshes(draw: st.DrawFn) -> Mesh:
    """Meshes whose ranks along ep and etp are any part of those of one copy of a stage."""
    mesh = draw(meshes)
    ranks = mesh.dp_shard * mesh.tp
    ep = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, ranks // ep + 1) if ranks // ep % n == 0]))
    return replace(mesh, ep=ep, etp=etp)


@settings(max_examples=30)
@given(expert_meshes())
def test_experts_see_the_same_ranks_in_a_view_of_their_own(mesh: Mesh) -> None:
    assert mesh.size("edp") * mesh.ep * mesh.etp == mesh.dp_shard * mesh.tp
    ranks = torch.arange(mesh.world_size).view([mesh.size(axis) for axis in EXPERT_AXES])
    for place, axis in enumerate(EXPERT_AXES):
        rows = ranks.movedim(place, -1).reshape(-1, mesh.size(axis)).tolist()
        assert sorted(map(list, mesh.groups(axis))) == sorted(rows)
        for row in rows:
            for index, rank in enumerate(row):
                assert mesh.index(axis, rank) == index
                assert list(mesh.ranks(axis, rank)) == row
    together = ranks.movedim((1, 2), (-2, -1)).reshape(-1, mesh.size("expert_dp")).tolist()
    assert sorted(map(list, mesh.groups("expert_dp"))) == sorted(together)


@given(meshes, st.sampled_from((*AXES, *DATA_AXES, "dp", "data")))
def test_groups_cover_each_rank_once(mesh: Mesh, axis: str) -> None:
    assert sorted(rank for group in mesh.groups(axis) for rank in group) == list(range(mesh.world_size))


def test_a_large_mesh_costs_what_a_small_one_does() -> None:
    mesh = Mesh(pp=8, dp_replicate=16, dp_shard=128, tp=8)
    assert mesh.world_size == 131_072
    assert mesh.ranks("tp", 131_071) == tuple(range(131_064, 131_072))
    assert mesh.index("pp", 131_071) == 7
    assert len(mesh.ranks("dp", 5)) == 2048


def test_a_mesh_that_does_not_multiply() -> None:
    with pytest.raises(
        MeshError, match=r"dp=3 covers 3 ranks but the job has 4; .*dp must be 4, or leave dp out"
    ):
        MeshPolicy(dp=3).mesh(4)
    with pytest.raises(MeshError, match=r"dp=2 × tp=2 covers 4 ranks but the job has 8; .*dp must be 4"):
        MeshPolicy(dp=2, tp=2).mesh(8)
    with pytest.raises(MeshError, match=r"pp × cp × tp = 3 does not divide 8"):
        MeshPolicy(tp=3).mesh(8)
    with pytest.raises(MeshError, match="dp_replicate=2 × dp_shard=3 covers 6 ranks but the job has 4"):
        MeshPolicy(dp=DataParallelPolicy(replicate=2, shard=3)).mesh(4)


def test_experts_that_do_not_divide_over_the_ranks() -> None:
    with pytest.raises(
        MeshError,
        match=r"ep=4 × etp=2 = 8 does not divide the 4 ranks .*dp_shard=2 × cp=1 × tp=2\)",
    ):
        Mesh(pp=2, dp_shard=2, tp=2, ep=4, etp=2)
    with pytest.raises(MeshError, match=r"dp=3 covers 3 ranks"):  # the number of ranks comes first
        MeshPolicy(dp=3, ep=2).mesh(4)
    assert MeshPolicy(tp=2, ep=4).mesh(8) == Mesh(dp_shard=4, tp=2, ep=4)


def test_dp_takes_the_ranks_that_remain() -> None:
    assert MeshPolicy(tp=2).mesh(8) == Mesh(dp_shard=4, tp=2)
    assert MeshPolicy().mesh(1) == Mesh()


def test_ranks_along_cp_are_among_those_that_share_state() -> None:
    mesh = MeshPolicy(cp=2, tp=2).mesh(8)
    assert mesh == Mesh(dp_shard=4, cp=2, tp=2) and str(mesh) == "dp=2 × cp=2 × tp=2"
    assert mesh.ranks("dp", 0) == (0, 2, 4, 6) and mesh.ranks("cp", 4) == (4, 6)
    assert mesh.ranks("data", 2) == (2, 6)
    with pytest.raises(MeshError, match="cp=2 does not divide dp_shard=3"):
        Mesh(dp_shard=3, cp=2)


def test_what_is_no_axis() -> None:
    with pytest.raises(MeshError, match="no axis 'zz'; known: pp, dp_replicate"):
        Mesh().size("zz")
    with pytest.raises(MeshError, match="axis 'tp' has size 0"):
        Mesh(tp=0)


def test_names_for_people() -> None:
    assert str(Mesh()) == "1 rank"
    assert str(Mesh(dp_shard=4)) == "dp=4"
    assert str(Mesh(dp_replicate=2, dp_shard=4, tp=2)) == "dp_replicate=2 × dp_shard=4 × tp=2"
    assert str(Mesh(dp_shard=4, tp=2, ep=4)) == "dp=4 × tp=2 (experts edp=2 × ep=4)"
    mesh = Mesh(dp_replicate=2, dp_shard=2)
    assert [mesh.name_of(("dp_replicate", "edp")), mesh.name_of(("edp",))] == ["expert_dp", "edp"]
