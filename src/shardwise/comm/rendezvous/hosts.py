"""Hosts: the ranks that share a host, and the two levels in which a group that spans several hosts may exchange.

ranks    0 1 2 3        0 1 2
hosts    0 0 1 1        0 0 1        number of each rank's host
within   (0 1) (2 3)    (0 1) (2)    the ranks of one host
across   (0 2) (1 3)    (0 2)        the ranks in one place of their hosts; as many as the smallest host has ranks
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from shardwise.base.errors import ConfigError, MeshError
from shardwise.base.words import counted
from shardwise.plan.exchange import Asked, GradientExchange
from shardwise.plan.mesh import Mesh

Ranks = tuple[int, ...]


def numbered(names: Sequence[str]) -> tuple[int, ...]:
    """Return the number of each rank's host, from the hosts' names."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def grid_of(ranks: Ranks, hosts: Sequence[int]) -> tuple[list[Ranks], list[Ranks]]:
    """Return the groups ``across`` and ``within`` of a group's ranks, however many of them each host has.

    Args:
        ranks: Ranks of the group.
        hosts: Number of each rank's host.

    Returns:
        One group across hosts for each place that every host has, and one group within each host, in the order in
        which the hosts first occur.
    """
    by_host: dict[int, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        by_host.setdefault(host, []).append(rank)
    within = [tuple(each) for each in by_host.values()]
    places = range(min(map(len, within)))
    return [tuple(each[place] for each in within) for place in places], within


def levels_of(ranks: Ranks, hosts: Sequence[int]) -> tuple[list[Ranks], list[Ranks]] | None:
    """Return the groups ``across`` and ``within`` of a group's ranks.

    Args:
        ranks: Ranks of the group.
        hosts: Number of each rank's host.

    Returns:
        The groups; None unless there are several hosts with equally many ranks, more than one, that are neighbours in
        the group.
    """
    across, within = grid_of(ranks, hosts)
    is_even = len({*map(len, within)}) == 1 and sum(within, ()) == ranks
    return (across, within) if is_even and 1 not in (len(across), len(within)) else None


def different_hosts(hosts: Sequence[int]) -> tuple[int, ...]:
    """Return the hosts of a group's ranks, numbered from 0 on in their order; empty if all ranks are on one host."""
    return numbered([str(host) for host in hosts]) if len({*hosts}) > 1 else ()


def exchange_of(
    axis: str, asked: Asked, kin: Sequence[Ranks], host_of: Callable[[int], int], is_native: bool
) -> GradientExchange:
    """Return how gradients are summed over the ranks along an axis.

    Args:
        axis: Name of the axis.
        asked: Value of ``zero.exchange``.
        kin: Groups of ranks along the axis; of groups that lie on hosts alike, one is enough.
        host_of: Function that returns the number of a rank's host.
        is_native: True if the backend has a reduce-scatter of its own.

    Raises:
        ConfigError: if ``two_level`` is asked for and the ranks do not lie evenly on their hosts.
    """
    lying = [[host_of(rank) for rank in ranks] for ranks in kin]
    size, hosts = len(kin[0]), max(len({*each}) for each in lying)
    is_even = hosts > 1 and all(
        levels_of(ranks, each) is not None for ranks, each in zip(kin, lying, strict=True)
    )
    if asked == "two_level" and hosts > 1 and not is_even:
        raise ConfigError(
            f"zero.exchange: two_level needs equally many ranks of {axis!r} on each host, more than one and "
            f"neighbours on the axis; here the {counted(size, 'rank')} of such a group lie on the hosts "
            f"{', '.join(map(str, lying[0]))}; use auto"
        )
    return GradientExchange(asked, size, hosts, is_even, is_native)


def notes_of_axes(mesh: Mesh, hosts: Sequence[int]) -> list[str]:
    """Return a sentence for each of "tp", "cp" and "ep" whose ranks lie on several hosts, with a mesh that avoids it.

    Args:
        mesh: The mesh.
        hosts: Number of each rank's host.
    """
    found = []
    for axis in ("tp", "cp", "ep"):
        crossed = _most_hosts(mesh, axis, hosts)
        if crossed > 1:
            size = mesh.size(axis)
            found.append(
                f"mesh.{axis}: the {size} ranks along {axis!r} lie on {crossed} hosts, so the passes of every layer "
                f"wait for the network; {_inside(mesh, axis, hosts)}"
            )
    return found


def _most_hosts(mesh: Mesh, axis: str, hosts: Sequence[int]) -> int:
    if mesh.size(axis) == 1:
        return 1
    return max(len({hosts[rank] for rank in ranks}) for ranks in mesh.groups(axis))


def _inside(mesh: Mesh, axis: str, hosts: Sequence[int]) -> str:
    """Return the advice to use the largest size of an axis whose ranks lie on one host each."""
    size = mesh.size(axis)
    for smaller in (each for each in range(size - 1, 1, -1) if size % each == 0):
        changed: dict[str, Any] = {
            axis: smaller,
            "cp_heads": gcd(mesh.cp_heads, smaller if axis == "cp" else mesh.cp),
        }
        if axis == "tp":
            changed["dp_shard"] = mesh.dp_shard * size // smaller
        try:
            made = replace(mesh, **changed)
        except MeshError:
            continue
        if _most_hosts(made, axis, hosts) == 1:
            return f"with mesh.{axis}: {smaller} they stay on one host, and the other ranks go to dp"
    return f"with mesh.{axis}: 1 and the other ranks along dp or pp only gradients or activations cross"
