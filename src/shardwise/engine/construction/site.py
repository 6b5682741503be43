"""Site: this rank, with the groups, files and threads that the Plan's state needs."""

import logging
from collections.abc import Callable
from math import floor

from shardwise.base.errors import ConfigError
from shardwise.comm.collectives import Group
from shardwise.comm.rendezvous.hosts import notes_of_axes
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.config.auto import resolve
from shardwise.config.run import RunConfig
from shardwise.engine.parts.parts import RuntimeContext
from shardwise.memory.direct_io import rounded_up
from shardwise.memory.ledger import Ledger
from shardwise.plan.mesh import DENSE, EXPERT, Mesh
from shardwise.plan.plan import Plan
from shardwise.tiers.offload import OffloadPolicy
from shardwise.tiers.scratch import DiskScratch
from shardwise.tiers.tier import TierResources, threads_beside

_log = logging.getLogger(__name__)

GROUP_AXES = ("world", "dp", "dp_shard", "dp_replicate", "data", "cp", "tp", "pp", "model")
"""Axes along which every engine makes its process groups."""
EXPERT_GROUP_AXES = ("expert_dp", "edp", "ep", "etp")
"""Axes along which an engine with expert state makes further process groups."""


def site_of(world: World, config: RunConfig) -> RuntimeContext:
    """Return the site of this rank, with the open numbers of the configuration resolved.

    Raises:
        ConfigError: if the configuration does not fit the ranks or the device.
        MeshError: if the mesh does not fit the number of ranks.
    """
    settings, mesh, _ = resolve(config, world.size, world.device.type)
    if config.translated and world.rank == 0:
        _log.info("config: %s", config.translated)
    for note in notes_of_axes(mesh, world.hosts) if world.rank == 0 else ():
        _log.warning("%s", note)
    clock, traffic = world.clock(settings.comm), Traffic()
    groups = {axis: world.group(mesh, axis, settings.comm, clock, traffic) for axis in GROUP_AXES}
    ledger = Ledger()
    ledger.take("rings", "transports", lambda: world.ring_bytes)
    exchanges = {axis: world.exchange(mesh, axis, settings.zero.exchange) for axis in (DENSE[1], EXPERT[1])}
    site = RuntimeContext(world, settings, mesh, groups, clock, traffic, ledger, exchanges=exchanges)
    _give_levels(site, DENSE[1])
    return site


def _give_levels(site: RuntimeContext, axis: str) -> None:
    """Make the groups of both levels along ``axis`` if its ranks may exchange model state in two levels."""
    zero, exchange = site.settings.zero, site.exchanges[axis]
    if zero.stage and exchange.has_levels and exchange.asked in ("auto", "two_level"):
        group = site.groups[axis]
        group.levels = site.world.two_levels(site.mesh, axis, site.settings.comm, site.clock, site.traffic)


def with_tiers(site: RuntimeContext, plan: Plan) -> RuntimeContext:
    """Return the site with files and a thread for state off the device; unchanged if all state lies on the device.

    Raises:
        ConfigError: if the disk has no room for the files.
        TierError: if the files cannot be made.
    """
    wanted: dict[str, dict[str, int]] = {}
    own, policy = plan.own, site.settings.offload
    for (unit, place), rows in own.buffers.items():
        for row in rows:
            if row.tier == "disk":
                bucket, what = own.units[unit].buckets[place], own.units[unit].title_of(place)
                wanted.setdefault(row.kind, {})[what] = row.nbytes(bucket, plan.mesh)
    if all(row.tier == "device" for rows in own.buffers.values() for row in rows):
        return site
    scratch = None
    if wanted:
        assert policy.disk_path is not None, "the configuration was checked"
        scratch = DiskScratch(policy.disk_path, site.world.rank, site.world.local_size)
        try:
            scratch.reserve(wanted, _shares(plan, policy))
        except ConfigError:
            scratch.close()
            raise
    tiers = TierResources(scratch, policy.buffers, threads_beside(site.world.device, site.world.local_size))
    site.ledger.take("loaded", "blocks of state", lambda: tiers.staging.nbytes)
    return site._replace(tiers=tiers)


def _shares(plan: Plan, policy: OffloadPolicy) -> dict[float, int]:
    """Return the bytes of this rank's files, by smaller values of ``offload.fraction``.

    With a smaller fraction the first of the Units that move now stay (``parallel/zero/layout.py:moved``).
    """
    sizes: dict[int, int] = {}
    for (unit, place), rows in plan.own.buffers.items():
        for row in rows:
            if row.tier == "disk":
                size = rounded_up(row.nbytes(plan.own.units[unit].buckets[place], plan.mesh))
                sizes[unit] = sizes.get(unit, 0) + size
    moving = [size for _, size in sorted(sizes.items())]
    return {
        floor(1000 * policy.fraction * (len(moving) - first) / len(moving)) / 1000: sum(moving[first:])
        for first in range(1, len(moving))
    }


def groups_of_context(mesh: Mesh, group_of: Callable[[str], Group]) -> dict[str, Group]:
    """Return the groups along "cp" that exchange heads and keys, by axis.

    Args:
        mesh: The mesh.
        group_of: Function that returns the group of an axis.
    """
    if mesh.cp_heads == 1:
        return {"cp_heads": Group.alone("cp_heads"), "cp_tokens": group_of("cp")}
    if mesh.cp_tokens == 1:
        return {"cp_heads": group_of("cp"), "cp_tokens": Group.alone("cp_tokens")}
    return {axis: group_of(axis) for axis in ("cp_heads", "cp_tokens")}


def with_groups_of_context(site: RuntimeContext, plan: Plan) -> RuntimeContext:
    """Return the site with the process groups that exchange heads and keys; unchanged if "cp" has one rank."""
    if plan.mesh.cp == 1:
        return site
    world, settings, groups = site.world, site.settings, site.groups

    def group_of(axis: str) -> Group:
        made = groups.get(axis)
        return made or world.group(plan.mesh, axis, settings.comm, site.clock, site.traffic)

    return site._replace(mesh=plan.mesh, groups={**groups, **groups_of_context(plan.mesh, group_of)})


def has_expert_state(plan: Plan) -> bool:
    """Return True if a Unit of the Plan lies on the axes of experts."""
    return any(unit.axes != DENSE for each in plan.classes.values() for unit in each.units)


def with_groups_of_experts(site: RuntimeContext, plan: Plan) -> RuntimeContext:
    """Return the site with the process groups of expert state; unchanged if no Unit has its own axes."""
    if not has_expert_state(plan):
        return site
    world, settings, mesh, groups, clock, traffic, *_ = site
    made = {axis: world.group(mesh, axis, settings.comm, clock, traffic) for axis in EXPERT_GROUP_AXES}
    levels = world.levels(mesh.groups("ep"), "ep", settings.comm, clock, traffic)
    site = site._replace(groups={**groups, **made}, levels=levels)
    _give_levels(site, EXPERT[1])
    return site
