"""Which ranks share a host, and when a group exchanges in two levels."""

import pytest

from shardwise.comm.rendezvous.hosts import levels_of, numbered


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
