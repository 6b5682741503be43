"""Steps of the list in ``compose/apply.py`` that need a model's description, but no engine.

``ModelCut`` has the steps of the phase CUT, which cut the whole model to the Plan; the functions below it wrap blocks
of a stage. The order of the steps is that of the list.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.comm import symmetric
from shardwise.comm.collectives import Group
from shardwise.compose.apply import Phase, Step, apply_steps
from shardwise.compose.describe import DescribedModel, blocks_of
from shardwise.kernels.deferred import (
    DefersProducts,
    ProductQueue,
    deferred_linear,
    is_plain_linear,
    is_transposed,
)
from shardwise.models.dropout import KeyedDropout, replace_dropout, unkeyed_dropout
from shardwise.models.layers import Attention
from shardwise.models.tiles import check_heads, check_tiles, tile_foreign, tile_model
from shardwise.parallel.context.choice import KeysBy
from shardwise.parallel.context.foreign import cut_foreign_attention, other_mixing, takes_interface
from shardwise.parallel.context.functions import check_model, cut_functions
from shardwise.parallel.context.region import ContextRanks, ContextRegion, cut_attention
from shardwise.parallel.embedding.collection import as_before
from shardwise.parallel.expert.apply import ExpertRanks, check_blocks, cut_experts, surround
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.expert.policy import ExpertsPolicy
from shardwise.parallel.expert.stacks import ExpertStack, find_stacks
from shardwise.parallel.expert.surroundings import Layout, SequencePart
from shardwise.parallel.pipeline.check_cut import check_cut
from shardwise.parallel.pipeline.cut import cut
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.pipeline.uses import order_of_use
from shardwise.parallel.tensor.apply import make_parallel
from shardwise.parallel.tensor.layers import ColumnLinear, RowLinear
from shardwise.parallel.tensor.layout import dropout_cuts
from shardwise.parallel.tensor.overlap import OFF, ForwardOverlap
from shardwise.parallel.tensor.region import ParallelRegion, WithheldLogits
from shardwise.parallel.zero.batch_norm import synchronize_batch_norm
from shardwise.passes.recompute import RecomputePolicy, apply_recompute
from shardwise.passes.replay import DrawReplay
from shardwise.passes.tiles import TilesPolicy
from shardwise.plan.stage_places import StagePlaces
from shardwise.precision.fp8 import CutProducts, Float8Products, Float8Source, fp8_forward
from shardwise.tiers.activations import ActivationOffload
from shardwise.tiers.alike import AlikeStorages

RunStage = Callable[[Callable[[nn.Module], Any], Any, Hashable], Any]
"""Function of (call of the model, input from the stage before, kind of batch) that returns the input of the next stage,
or the call's result.

The first pass of each kind is watched.
"""
Stages = dict[int, tuple[nn.Module, RunStage | None]]
"""Stages of a rank, by index; without a pipeline the model itself."""


class CutRanks(NamedTuple):
    """The ranks over which a model is cut."""

    groups: Mapping[str, Group]
    """Group of each axis."""
    levels: tuple[Group, ...] = ()
    """Groups of "ep" across and within hosts, if "ep" spans hosts."""


class CutPolicies(NamedTuple):
    """Keys of the configuration that decide how the whole model is cut."""

    seed: int
    """Seed of dropout and routers."""
    experts: ExpertsPolicy
    """Exchange of rows with experts."""
    tiles: TilesPolicy
    synchronizes_batch_norm: bool
    """True if statistics of batch norm are those of all data-parallel ranks."""
    keeps_one_pass: bool
    """True if no forward pass of the last stage waits while another one runs."""
    folded: bool = False
    """True if the pipeline stages lie on the ranks in a V (``StagePlaces``)."""
    overlap: ForwardOverlap = OFF
    """Rule by which products of the forward pass overlap their exchanges over "tp"."""
    keys: KeysBy = "planned"
    """The way in which keys travel between ranks that share sequences."""


@dataclass
class ModelCut:
    """The cuts of one whole model, in place.

    A new object has checked that the policies fit the model.
    """

    model: nn.Module
    described: DescribedModel
    starts: Sequence[str]
    """Blocks that begin each stage but the first."""
    ranks: CutRanks
    policies: CutPolicies
    replay: DrawReplay
    """Records of random numbers, which recomputation replays."""
    loads: ExpertLoads
    """Counters of the experts' loads."""
    alike: AlikeStorages | None = None
    """Recorder of tensors that ranks along "tp" have in common."""
    stages: Stages = field(default_factory=dict)
    """This rank's stages; empty until the model is cut."""
    context: ContextRegion | None = None
    """State of passes whose sequences are cut; None if "cp" has one rank."""

    def __post_init__(self) -> None:
        check_tiles(self.model, self.policies.tiles, self.described.spec.units)
        self._tp = self.ranks.groups["tp"]
        if self.policies.overlap.wanted == "symmetric_memory":
            symmetric.begin(self._tp)
        self._region = ParallelRegion(
            self._tp, self.described.cuts_sequence, self.replay, self.alike, self.policies.overlap
        )
        self._stacks: Mapping[str, ExpertStack] = {}
        groups, policy = self.ranks.groups, self.policies.experts
        ep, etp = groups.get("ep") or Group.alone("ep"), groups.get("etp") or Group.alone("etp")
        in_blocks = policy.exchange == "blocks"
        self._expert_ranks = ExpertRanks(
            ep, etp, self._tp, self._layout, self.ranks.levels, policy.rows, in_blocks
        )

    @property
    def steps(self) -> dict[str, Step]:
        """Steps of the phase CUT, by the names of their rows."""
        return {
            "batch norm": self._synchronize_batch_norm,
            "dropout": self._replace_dropout,
            "context": self._cut_sequences,
            "slices": self._cut_slices,
            "heads": self._join_heads,
            "mixtures": lambda: self._surround(self.model),
            "experts": self._cut_experts,
            "stages": self._cut_stages,
            "tiles": self._tile,
        }

    def _synchronize_batch_norm(self) -> None:
        if self.policies.synchronizes_batch_norm:
            synchronize_batch_norm(self.model, self.ranks.groups["dp"])

    def _replace_dropout(self) -> None:
        table, is_cut, tp = self.described.table, self.described.cuts_sequence, self._tp
        cuts = {} if table is None else dropout_cuts(self.model, table, tp.index, tp.size, is_cut)
        replace_dropout(self.model, self.policies.seed, self.replay, cuts)

    def _cut_sequences(self) -> None:
        group = self.ranks.groups.get("cp")
        if group is None or group.size == 1:
            return
        parts = self._tp.size if self.described.cuts_sequence else 1
        _refuse_context(self.model, group.size, parts)
        groups = self.ranks.groups
        heads, tokens = groups.get("cp_heads") or Group.alone("cp_heads"), groups.get("cp_tokens") or group
        ranks = ContextRanks(group, heads, tokens, self.policies.keys)
        self.context = region = ContextRegion(ranks, parts, self.replay, WithheldLogits)
        if takes_interface(self.model):
            cut_foreign_attention(self.model, region)
        elif _has_our_attention(self.model):
            cut_attention(self.model, region, lambda module: isinstance(module, Attention))
        else:
            cut_functions(self.model, region, self.replay)
        for module in self.model.modules():
            if isinstance(module, KeyedDropout):
                module.tokens = region.tokens
        region.watch(self.model)

    def _cut_slices(self) -> None:
        if self.described.table is not None:
            _refuse_unkeyed(self.model)
            make_parallel(
                self.model, self.described.table, self._tp, self.described.cuts_sequence, self._region
            )

    def _join_heads(self) -> None:
        if self.described.table is None:
            tile_foreign(self.model, self.policies.tiles)
        check_heads(self.model, self.policies.tiles)

    def _layout(self) -> Layout:
        """Return how activations of the running pass lie on "tp"."""
        return "cut" if self._region.cut else "addends" if self._region.adds else "alike"

    def _part(self) -> SequencePart | None:
        """Return the part of the sequences that this rank has in the running pass; None for whole sequences."""
        cut = None if self.context is None else self.context.cut
        if self.context is None or cut is None:
            return None
        group, layout = self.context.group, cut.layout
        return SequencePart(group, layout.ranges[group.index], layout.length, layout.padded)

    def _surround(self, module: nn.Module) -> None:
        surround(module, self.policies.seed, self.replay, self.loads, self._tp, self._layout, self._part)

    def _cut_experts(self) -> None:
        in_blocks, rows = self.policies.experts.exchange == "blocks", self.policies.experts.rows
        if in_blocks:
            check_blocks(self.model)
        self._stacks = self.described.stacks
        # The forward of stacks that are not cut is replaced too if rows travel in blocks or take turns.
        if not self._stacks and (in_blocks or rows is not None or not self.replay.has_numbers):
            self._stacks = find_stacks(self.model).stacks
        cut_experts(self.model, self._stacks, self._expert_ranks, self.replay)

    def _cut_stages(self) -> None:
        pp = self.ranks.groups["pp"]
        if pp.size == 1:
            self.stages = {0: (self.model, None)}
            return
        here = StagePlaces(pp.size, self.policies.folded).stages_of(pp.index, len(self.starts) + 1)
        for index, stage in cut(self.model, self.starts, here, self.described.uses).items():
            stage.draws = self.replay.draws
            # Layers that a LayerSpec has just built are new.
            replace_dropout(stage.module, self.policies.seed, self.replay)
            self._surround(stage.module)
            cut_experts(stage.module, self._stacks, self._expert_ranks, self.replay)
            self.stages[index] = stage.module, stage.run

    def _tile(self) -> None:
        is_whole = self.ranks.groups["pp"].size == 1
        for module, _ in self.stages.values():
            tile_model(
                module, self.policies.tiles, self.replay, at_once=is_whole or self.policies.keeps_one_pass
            )


def apply_to_model(cut: ModelCut, engine_steps: Mapping[str, Step]) -> Stages:
    """Cut a whole model in place, and return this rank's stages.

    Args:
        cut: The model, and how it is cut.
        engine_steps: Steps of the phase CUT that ``cut`` does not have: "start" and "tables".

    Raises:
        PlanError: if the model cannot be cut so.
    """
    apply_steps(Phase.CUT, {**cut.steps, **engine_steps})
    return cut.stages


def _refuse_context(model: nn.Module, ranks: int, parts: int) -> None:
    """Raise PlanError if a model mixes tokens in a layer that cannot exchange keys along "cp"."""
    name, why = type(model).__name__, ""
    is_theirs = hasattr(getattr(model, "config", None), "_attn_implementation")
    if is_theirs and not takes_interface(model):
        why = f"{name} is no causal language model of transformers with the attention interface"
    elif not is_theirs and not _has_our_attention(model):
        why = check_model(model)
    elif takes_interface(model) and (mixing := other_mixing(model)):
        why = f"{name} has {mixing}, which mixes tokens in another way than attention to earlier ones"
    elif parts > 1 and getattr(getattr(model, "config", None), "output_router_logits", False):
        raise PlanError(
            f"mesh.cp: {name} adds a loss of its routers (config.output_router_logits), which counts all tokens of a "
            f"microbatch, and tensor parallelism cuts those of a rank into {parts} parts beside cp; set "
            "tensor.sequence_parallel: false, or mesh.cp: 1"
        )
    if why:
        raise PlanError(f"mesh.cp: {ranks} cuts sequences, and {why}; set mesh.cp: 1")


def _has_our_attention(model: nn.Module) -> bool:
    return any(isinstance(module, Attention) for module in model.modules())


def _refuse_unkeyed(model: nn.Module) -> None:
    unkeyed = unkeyed_dropout(model)
    if unkeyed:
        raise PlanError(
            f"tensor: {unkeyed[0]} drops by torch's generator, which differs from rank to rank, so that ranks along tp "
            "would go on from different numbers; use nn.Dropout, or set its share to 0"
        )


def multiply_in_fp8(
    module: nn.Module,
    names: Collection[str],
    products: Float8Products,
    sources: Mapping[str, Float8Source],
    tp: Group,
) -> None:
    """Let the linear layers ``names`` that are in ``module`` multiply in fp8.

    Args:
        module: Stage of a model.
        names: Names of layers of the whole model.
        products: torchao's products.
        sources: Weights that are gathered in fp8, by the names of the parameters.
        tp: The ranks along "tp".
    """
    for name, layer in module.named_modules():
        if name not in names:
            continue
        source = sources.get(f"{name}.weight")
        if isinstance(layer, ColumnLinear | RowLinear):
            cuts: Literal["outputs", "inputs"] = "outputs" if isinstance(layer, ColumnLinear) else "inputs"
            layer.fp8 = CutProducts(products, source, tp, cuts, name)
        elif isinstance(layer, nn.Linear):
            layer.forward = partial(fp8_forward, layer, products, source, name)  # type: ignore[method-assign]


def defer_products(module: nn.Module, names: Collection[str], queue: ProductQueue) -> None:
    """Let the gradients of the weights ``names`` that are in ``module`` wait for W.

    Args:
        module: Stage of a model.
        names: Names of weights of the whole model.
        queue: The products that wait.
    """
    for name, layer in module.named_modules():
        own = [key for key in layer._parameters if f"{name}.{key}".lstrip(".") in names]
        if not own:
            continue
        if isinstance(layer, DefersProducts):
            layer.products = queue
        elif is_plain_linear(layer):
            layer.forward = partial(_deferred_forward, layer, queue, is_transposed(layer))


def _deferred_forward(layer: Any, queue: ProductQueue, transposed: bool, x: Tensor) -> Tensor:
    """Return the output of a linear layer; takes the place of the layer's ``forward``."""
    return deferred_linear(x, layer.weight, layer.bias, queue, transposed)


def recompute_blocks(
    module: nn.Module, names: Collection[str], policy: RecomputePolicy, replay: DrawReplay
) -> None:
    """Wrap the blocks ``names`` that are in ``module`` for recomputation; stand-ins have nothing to recompute.

    Args:
        module: Stage of a model.
        names: Names of blocks.
        policy: Keys under ``recompute:``.
        replay: Records of random numbers, which recomputation replays.
    """
    here = _blocks_here(module, names)
    if here:
        apply_recompute(here, policy.model_copy(update={"blocks": "all"}), replay)


def offload_blocks(module: nn.Module, names: Collection[str], activations: ActivationOffload) -> None:
    """Keep in host memory what the blocks ``names`` that are in ``module`` save for the backward pass."""
    activations.wrap(_blocks_here(module, names))


def _blocks_here(module: nn.Module, names: Collection[str]) -> list[tuple[str, nn.Module]]:
    return [
        (name, block)
        for name, block in module.named_modules()
        if name in names and next(block.parameters(), None) is not None
    ]


def check_stages(
    model: nn.Module,
    policy: PipelinePolicy,
    ranks: int,
    call: Callable[[nn.Module], Any],
    device: torch.device,
) -> None:
    """Compare the chain of stages with the uncut model, both on this rank, which must hold the whole model meanwhile.

    Args:
        model: The whole model.
        policy: Keys under ``pipeline:``.
        ranks: Ranks on "pp".
        call: Function that calls the model with a batch.
        device: Device of the comparison.

    Raises:
        PlanError: if a stage differs; the message names the first.
    """
    uses = None if isinstance(model, Layers) else order_of_use(model, call, device)
    starts = blocks_of(model, policy, uses).starts(policy, ranks)
    with as_before(model):
        check_cut(model, call, starts, uses)
