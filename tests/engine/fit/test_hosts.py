"""A planned job sums gradients over hosts in the way that its ranks find when they meet."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.comm.rendezvous.hosts import exchange_of
from shardwise.engine.fit.hosts import exchanges_on_hosts, notes_of_planned_axes
from shardwise.plan.exchange import GradientExchange
from shardwise.plan.mesh import Mesh

MESHES = [
    Mesh(dp_shard=8),
    Mesh(dp_replicate=2, dp_shard=4),
    Mesh(dp_shard=4, tp=2),
    Mesh(pp=2, dp_shard=2, tp=2),
    Mesh(dp_shard=8, ep=2),
    Mesh(dp_shard=2, tp=4),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("per_host", [2, 3, 4, 8])
def test_a_plan_finds_what_ranks_find(mesh: Mesh, per_host: int) -> None:
    """``World.exchange`` looks at all groups of an axis; ``per_host`` of 3 cuts groups unevenly."""
    found = exchanges_on_hosts(mesh, "auto", per_host, "cuda")
    assert bool(found) == (per_host < 8)
    for axis, exchange in found.items():
        assert exchange == exchange_of(axis, "auto", mesh.groups(axis), lambda rank: rank // per_host, True)


def test_ranks_on_one_host_have_one_level() -> None:
    assert exchanges_on_hosts(Mesh(dp_shard=8), "two_level", None, "cpu") == {}
    found = exchanges_on_hosts(Mesh(dp_shard=8), "two_level", 4, "cpu")["dp_shard"]
    assert found == GradientExchange("two_level", 8, 2, True, False) and found.has_levels


def test_uneven_hosts_have_no_two_levels() -> None:
    with pytest.raises(ConfigError, match="two_level needs equally many ranks of 'dp_shard' on each host"):
        exchanges_on_hosts(Mesh(dp_shard=8), "two_level", 3, "cuda")


def test_an_axis_over_hosts_is_told_with_a_mesh_that_avoids_it() -> None:
    (told,) = notes_of_planned_axes(Mesh(dp_shard=2, tp=4), 2)
    assert told.startswith("mesh.tp: the 4 ranks along 'tp' lie on 2 hosts") and "tp: 2" in told
    assert notes_of_planned_axes(Mesh(dp_shard=2, tp=4), 4) == []
    assert notes_of_planned_axes(Mesh(dp_shard=2, tp=4), None) == []
