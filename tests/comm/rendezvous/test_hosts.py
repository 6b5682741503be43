"""Which ranks share a host, and when a group exchanges in two levels."""

import pytest

from shardwise.comm.rendezvous.hosts import grid_of, levels_of, notes_of_axes, numbered
from shardwise.plan.mesh import Mesh


def test_hosts_are_numbered_in_the_order_of_their_first_ranks() -> None:
    assert numbered(["b", "b", "a", "b"]) == (0, 0, 1, 0)


def test_ranks_in_one_place_meet_across_hosts_and_those_of_a_host_within() -> None:
    across, within = levels_of((1, 3, 5, 7, 9, 11), (0, 0, 2, 2, 4, 4)) or ([], [])
    assert across == [(1, 5, 9), (3, 7, 11)]
    assert within == [(1, 3), (5, 7), (9, 11)]


@pytest.mark.parametrize(
    "hosts", [(0,), (0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 0, 1), (0, 1, 1, 1), (0, 1, 0, 1), (0, 0, 1, 1, 0, 0)]
)
def test_one_level_else(hosts: tuple[int, ...]) -> None:
    """One host, one rank on each, unequal numbers, hosts that do not stand together."""
    assert levels_of(tuple(range(len(hosts))), hosts) is None


def test_axes_over_hosts_are_named_with_a_mesh_that_avoids_it() -> None:
    two = (0, 0, 0, 0, 1, 1, 1, 1)
    assert notes_of_axes(Mesh(dp_shard=2, tp=4), two) == []
    assert notes_of_axes(Mesh(pp=2, dp_shard=4, ep=4), two) == []
    (tp,) = notes_of_axes(Mesh(tp=8), two)
    assert tp == (
        "mesh.tp: the 8 ranks along 'tp' lie on 2 hosts, so the passes of every layer wait for the network; with "
        "mesh.tp: 4 they stay on one host, and the other ranks go to dp"
    )
    (cp,) = notes_of_axes(Mesh(dp_shard=8, cp=8), two)
    assert "with mesh.cp: 4" in cp
    (ep,) = notes_of_axes(Mesh(dp_shard=8, ep=8), (0, 0, 1, 1, 2, 2, 3, 3))
    assert "lie on 4 hosts" in ep and "with mesh.ep: 2" in ep
    (none,) = notes_of_axes(Mesh(tp=3), (0, 0, 1))
    assert "with mesh.tp: 1" in none


def test_the_grid_of_uneven_hosts() -> None:
    assert grid_of((4, 5, 6), (0, 0, 1)) == ([(4, 6)], [(4, 5), (6,)])
    assert grid_of((0, 1, 2, 3), (0, 1, 1, 0)) == ([(0, 1), (3, 2)], [(0, 3), (1, 2)])
