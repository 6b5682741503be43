"""Outline: the model as data, this rank's Plan of the model, and the changes to its blocks beside the Plan."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from shardwise.comm.rendezvous.hosts import different_hosts
from shardwise.compose.describe import DescribedModel, describe_cut
from shardwise.compose.module_steps import CutPolicies
from shardwise.compose.plan import PlannedModel, PlanPolicies, make_plan
from shardwise.compose.spec import ModelSpec
from shardwise.config.run import RunConfig
from shardwise.engine.construction.recipe import OptimizerRecipe
from shardwise.engine.parts.parts import RuntimeContext
from shardwise.engine.parts.tables import check_mesh
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.tensor.overlap import ForwardOverlap
from shardwise.parallel.zero.modules import check_renormalized, repeated_blocks
from shardwise.parallel.zero.scales import WeightScales
from shardwise.passes.recompute import chosen
from shardwise.passes.replay import DrawReplay
from shardwise.plan.plan import Plan
from shardwise.plan.registry import UpdateRule
from shardwise.plan.slices import TensorSlices
from shardwise.precision.fp8 import Float8Products, check_device, check_pieces, fp8_layers
from shardwise.precision.operations import OperationDtypes
from shardwise.precision.policy import PrecisionPolicy
from shardwise.tiers.activations import check_blocks
from shardwise.tiers.alike import AlikeStorages


class Float8Layers(NamedTuple):
    """The linear layers that compute in fp8."""

    names: tuple[str, ...]
    """Names of the layers, of the whole model."""
    products: Float8Products
    scales: WeightScales
    """Scales of the weights that are gathered in fp8."""


class BuildSpec(NamedTuple):
    """The model as data, its Plan, and the changes to its blocks beside the Plan."""

    described: DescribedModel
    planned: PlannedModel
    to_recompute: list[str]
    """Names of the recomputed blocks, of the whole model."""
    to_offload: list[str]
    """Names of the blocks whose activations wait in host memory."""
    replay: DrawReplay
    loads: ExpertLoads
    operations: OperationDtypes
    """Dtypes of operations."""
    alike: AlikeStorages | None
    """Activations that ranks along "tp" have in common; None if no activations are offloaded or tp is 1."""
    fp8: Float8Layers | None
    """Layers that compute in fp8; None if there are none."""

    @property
    def plan(self) -> Plan:
        """The Plan of all ranks."""
        return self.planned.plan


def outline_of(
    model: nn.Module,
    site: RuntimeContext,
    recipe: OptimizerRecipe,
    call: Callable[[nn.Module], Any] | None = None,
) -> BuildSpec:
    """Describe a model and make its Plan; the model is not changed.

    Args:
        model: The model, before it is cut.
        site: The ranks and their configuration.
        recipe: The recipe of the optimizers.
        call: Calls the model, to show the order in which the model uses its parts.

    Raises:
        ConfigError: if a policy does not fit the model.
        PlanError: if no valid Plan can be made.
    """
    settings, mesh = site.settings, site.mesh
    check_renormalized(model, mesh.size("dp") * mesh.tp)
    check_mesh(model, mesh, settings)
    described = describe_cut(
        model, mesh, settings.zero, settings.tensor, settings.pipeline, call, site.world.device
    )
    units = [unit for unit in described.spec.units if unit not in described.stacks]
    blocks = (units if isinstance(model, Layers) else ()) or repeated_blocks(model) or units
    check_device(settings.precision, site.world.device)
    settings = with_fp8_layers(settings, model, described.spec)
    policies = policies_of(settings, recipe.group_of(model, described.spec), recipe.updates, blocks)
    cp_hosts = different_hosts([site.world.hosts[rank] for rank in mesh.ranks("cp", 0)])
    policies = policies._replace(exchanges=site.exchanges, cp_hosts=cp_hosts)
    planned = PlannedModel(
        described.spec, policies, make_plan(described.spec, mesh, policies, site.world.rank)
    )
    operations = OperationDtypes(settings.precision)
    to_recompute = chosen(blocks, settings.recompute)
    to_offload = check_blocks(blocks, settings.offload)
    replay = DrawReplay(operations)
    loads = ExpertLoads(described.spec.experts_of, replay)
    alike = AlikeStorages(site.groups["tp"]) if to_offload and mesh.tp > 1 else None
    fp8 = _fp8_layers(settings.precision, planned.plan, site)
    return BuildSpec(described, planned, to_recompute, to_offload, replay, loads, operations, alike, fp8)


def with_fp8_layers(settings: RunConfig, model: nn.Module, spec: ModelSpec) -> RunConfig:
    """Return the configuration with the names of the layers that compute in fp8.

    Cut weights may be gathered in fp8 if blocks are not compiled, because a compiler cannot trace the layers that read
    such weights.

    Args:
        settings: The resolved configuration.
        model: The whole model.
        spec: Its description.

    Raises:
        ConfigError: if no layer can compute in fp8.
    """
    policy = settings.precision
    if policy.linear is None:
        return settings
    gathers = policy.fp8_recipe == "tensorwise" and settings.compile.scope == "none"
    names = fp8_layers(model, spec.units, policy)
    return settings.model_copy(update={"precision": policy.with_fp8(names, gathers)})


def _fp8_layers(policy: PrecisionPolicy, plan: Plan, site: RuntimeContext) -> Float8Layers | None:
    """Return the layers that compute in fp8, whose pieces have been checked, or None if there are none."""
    if policy.linear is None:
        return None
    names, slices = policy.fp8_layers, TensorSlices(plan.registry, plan.mesh, site.world.rank)
    check_pieces(
        (name, slices.local_shape(plan.registry.get("parameter", f"{name}.weight"))) for name in names
    )
    products = Float8Products(policy)
    groups = [site.groups["dp_shard"], site.groups["tp"]]
    return Float8Layers(names, products, WeightScales(groups, products, site.world.device))


def policies_of(
    settings: RunConfig, group_of: Callable[[str], int], updates: Sequence[UpdateRule], blocks: Sequence[str]
) -> PlanPolicies:
    """Return the policies of a Plan from a resolved configuration."""
    microbatches = settings.batch.accumulation or 1
    return PlanPolicies(
        settings.zero,
        settings.pipeline.beside_recomputation(settings.recompute.scope == "full"),
        settings.precision,
        group_of,
        updates,
        microbatches,
        settings.tokens_per_step,
        settings.experts.exchange == "blocks",
        settings.offload,
        frozenset(blocks),
        context=settings.context,
        has_documents=bool(getattr(settings.data, "documents", False)),
        unit_norms=settings.monitor.unit_norms,
        rank_seconds=bool(settings.monitor.rank_seconds),
        has_guard=settings.guard is not None,
    )


def cut_policies_of(settings: RunConfig) -> CutPolicies:
    """Return the keys of a resolved configuration that decide how the whole model is cut."""
    return CutPolicies(
        seed=settings.train.seed,
        experts=settings.experts,
        tiles=settings.tiles,
        synchronizes_batch_norm=settings.batch_norm == "synchronized",
        keeps_one_pass=settings.pipeline.keeps_one_pass,
        folded=settings.pipeline.folded,
        overlap=ForwardOverlap(settings.tensor.overlap),
        keys="ring" if settings.context.method == "ring" else "planned",
    )
