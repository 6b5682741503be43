"""Hosts of a planned job: the ways to sum gradients over them and the axes that lie on several, before any rank exists.

Rank r lies on host r // per_host, as launchers number them. The ways are those that the ranks themselves find when they
meet (comm/rendezvous/hosts.py).

Cost: one group of ranks for each axis of sharded state, if all groups lie on hosts alike; else all groups.
"""

from shardwise.comm.rendezvous.hosts import different_hosts, exchange_of, notes_of_axes
from shardwise.plan.exchange import Asked, GradientExchange
from shardwise.plan.mesh import DENSE, EXPERT, Mesh
from shardwise.simulate.exchange_price import is_aligned


def exchanges_on_hosts(
    mesh: Mesh, asked: Asked, per_host: int | None, device_type: str
) -> dict[str, GradientExchange]:
    """Return the ways to sum gradients over the ranks of an axis, by axis; empty if all ranks lie on one host.

    Args:
        mesh: The mesh.
        asked: Value of ``zero.exchange``.
        per_host: Ranks of one host; None: all ranks lie on one host.
        device_type: Type of the device, such as ``cpu``.

    Raises:
        ConfigError: if ``two_level`` is asked for and the ranks do not lie evenly on their hosts.
    """
    if per_host is None or mesh.world_size <= per_host:
        return {}
    found = {}
    for axis in (DENSE[1], EXPERT[1]):
        alone = mesh.size(axis) == 1
        kin = [mesh.ranks(axis, 0)] if alone or is_aligned(mesh, axis, per_host) else mesh.groups(axis)
        found[axis] = exchange_of(axis, asked, kin, lambda rank: rank // per_host, device_type != "cpu")
    return found


def cp_hosts(mesh: Mesh, per_host: int | None) -> tuple[int, ...]:
    """Return the number of the host of each rank along "cp"; empty if all are on one host.

    Args:
        mesh: The mesh.
        per_host: Ranks of one host; None: all ranks lie on one host.
    """
    return () if per_host is None else different_hosts([rank // per_host for rank in mesh.ranks("cp", 0)])


def notes_of_planned_axes(mesh: Mesh, per_host: int | None) -> list[str]:
    """Return a sentence for each of "tp", "cp" and "ep" whose ranks lie on several hosts, with a mesh that avoids it.

    Args:
        mesh: The mesh.
        per_host: Ranks of one host; None: all ranks lie on one host.
    """
    return (
        [] if per_host is None else notes_of_axes(mesh, [rank // per_host for rank in range(mesh.world_size)])
    )
