"""Outline: the model as data, this rank's Plan of it, and what is done to its blocks beside the Plan."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from shardwise.compose.describe import Described, describe_cut
from shardwise.compose.plan import Planned, Policies, make_plan
from shardwise.config.run import RunConfig
from shardwise.engine.parts import Site
from shardwise.engine.recipe import Recipe
from shardwise.engine.tables import check_mesh
from shardwise.memory.activations import check_blocks
from shardwise.memory.alike import Alike
from shardwise.memory.recompute import chosen
from shardwise.memory.replay import Replay
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.zero.modules import check_renormalized, repeated_blocks
from shardwise.plan.plan import Plan
from shardwise.plan.registry import UpdateRule
from shardwise.precision.operations import Operations


class Outline(NamedTuple):
    """The model as data, and what is done to it beside the Plan."""

    described: Described
    planned: Planned
    to_recompute: list[str]
    """Names of blocks, of the whole model."""
    to_offload: list[str]
    """Of blocks whose activations wait in host memory."""
    replay: Replay
    loads: ExpertLoads
    operations: Operations
    """Their dtypes."""
    alike: Alike | None
    """What ranks along "tp" have in common of what blocks save; None where nobody asks."""

    @property
    def plan(self) -> Plan:
        """Of all ranks."""
        return self.planned.plan


def outline_of(
    model: nn.Module, site: Site, recipe: Recipe, call: Callable[[nn.Module], Any] | None = None
) -> Outline:
    """``call`` shows in which order the model uses its parts. Nothing is changed. Errors: ConfigError, PlanError."""
    settings, mesh = site.settings, site.mesh
    check_renormalized(model, mesh.size("dp") * mesh.tp)
    check_mesh(model, mesh, settings)
    described = describe_cut(
        model, mesh, settings.zero, settings.tensor, settings.pipeline, call, site.world.device
    )
    units = [unit for unit in described.spec.units if unit not in described.stacks]
    blocks = (units if isinstance(model, Layers) else ()) or repeated_blocks(model) or units
    policies = policies_of(settings, recipe.group_of(model, described.spec), recipe.updates, blocks)
    planned = Planned(described.spec, policies, make_plan(described.spec, mesh, policies, site.world.rank))
    operations = Operations(settings.precision)
    to_recompute = chosen(blocks, settings.recompute)
    to_offload = check_blocks(blocks, settings.offload)
    replay = Replay(operations)
    loads = ExpertLoads(described.spec.experts_of, replay)
    alike = Alike(site.groups["tp"]) if to_offload and mesh.tp > 1 else None
    return Outline(described, planned, to_recompute, to_offload, replay, loads, operations, alike)


def policies_of(
    settings: RunConfig, group_of: Callable[[str], int], updates: Sequence[UpdateRule], blocks: Sequence[str]
) -> Policies:
    """Those of a Plan, out of a resolved configuration."""
    microbatches = settings.batch.accumulation or 1
    return Policies(
        settings.zero,
        settings.pipeline,
        settings.precision,
        group_of,
        updates,
        microbatches,
        settings.tokens_per_step,
        settings.experts.exchange == "blocks",
        settings.offload,
        frozenset(blocks),
    )
