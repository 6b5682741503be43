"""Cut: the model of one rank. The first techniques of the order in draft.py, in place.

dropout     keyed by the whole model's names, so that the same features fall everywhere      models/dropout.py
slices      every matrix to its piece on "tp"                                                parallel/tensor
stages      the blocks that this rank runs, behind stand-ins for the others                  parallel/pipeline
recompute   around the blocks that are left                                                  memory/recompute.py
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.comm.collectives import Group
from shardwise.compose.whole import Whole
from shardwise.memory.recompute import RecomputePolicy, apply_recompute
from shardwise.memory.replay import Replay
from shardwise.models.dropout import replace_dropout, unkeyed_dropout
from shardwise.parallel.embedding.collection import as_before, collections_of
from shardwise.parallel.pipeline.cut import (
    blocks_around,
    check_cut,
    cut,
    find_blocks,
    owners,
    stages_of_modules,
    weigh,
)
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.partition import partition
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.pipeline.uses import Uses, order_of_use
from shardwise.parallel.tensor.apply import make_parallel, table_of
from shardwise.parallel.tensor.layout import dropout_cuts
from shardwise.parallel.tensor.layout import owners as owners_of
from shardwise.parallel.tensor.policy import TensorPolicy
from shardwise.plan.errors import PlanError

RunStage = Callable[[Callable[[nn.Module], Any], Any, Hashable], Any]
"""(call of the model, what the stage before sent, kind of batch) -> what goes to the next stage, or the call's result.
The first pass of each kind is watched."""


def cut_model(
    model: nn.Module,
    whole: Whole,
    tensor: TensorPolicy,
    pipeline: PipelinePolicy,
    tp: Group,
    pp: Group,
    seed: int,
    replay: Replay,
    call: Callable[[nn.Module], Any] | None = None,
    device: torch.device | None = None,
) -> dict[int, tuple[nn.Module, RunStage | None]]:
    """This rank's stages by index; without a pipeline the model itself. ``whole`` learns where everything lies.
    ``call``, which computes on ``device``, shows the order in which the model uses its parts.

    Errors: PlanError where the model cannot be cut so.
    """
    if tp.size > 1 and isinstance(model, Layers) and model.has_specs:
        raise PlanError(
            f"tensor: mesh.tp is {tp.size}, but the model is a list with layers that are not built yet (LayerSpec), "
            "whose matrices cannot be cut; give built modules in the list, or set mesh.tp: 1"
        )
    uses = order_of_use(model, call, device) if pp.size > 1 and not isinstance(model, Layers) else None
    table = table_of(model, tensor.table) if tp.size > 1 else None
    if table is not None and tensor.gather_logits:
        table = replace(table, causal_loss=False)
    is_cut = table is not None and table.sequence and tensor.sequence_parallel
    cuts = {} if table is None else dropout_cuts(model, table, tp.index, tp.size, is_cut)
    replace_dropout(model, seed, replay, cuts)
    unkeyed = unkeyed_dropout(model) if table is not None else []
    if unkeyed:
        raise PlanError(
            f"tensor: {unkeyed[0]} drops by torch's generator, which differs from rank to rank, so that ranks along tp "
            "would go on from different numbers; use nn.Dropout, or set its share to 0"
        )
    if table is not None:
        placed = make_parallel(model, table, tp, is_cut, replay=replay)
        whole.owners.update(owners_of(model, table, placed))
        whole.places.update({name: placed[name] for name in whole.parameters})
    if pp.size == 1:
        return {0: (model, None)}
    starts = stage_starts(model, pipeline, pp.size, uses)
    owner = owners(model, starts, uses)
    for name, entry in whole.parameters.items():
        whole.stages[name] = tuple(sorted({owner[each] for each in (name, *entry.aliases)}))
    whole.stages.update({name: (owner[name],) for name in whole.buffers})
    whole.stages.update(_stages_of_tables(model, stages_of_modules(model, starts, uses)))
    here = range(pp.index, len(starts) + 1, pp.size)
    stages = cut(model, starts, here, uses)
    for stage in stages.values():  # what a LayerSpec has built here has not been seen before
        replace_dropout(stage.module, seed, replay)
    return {index: (stage.module, stage.run) for index, stage in stages.items()}


def _stages_of_tables(model: nn.Module, stage_of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Stages that use each collection of embedding tables, by its first name."""
    first = {id(each): name for name, each in collections_of(model).items()}
    found: dict[str, set[int]] = {name: set() for name in first.values()}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first:
            found[first[id(module)]].add(stage_of[name])
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


def stage_starts(
    model: nn.Module, policy: PipelinePolicy, ranks: int, uses: Uses | None = None
) -> tuple[str, ...]:
    """Names of the blocks that begin each stage but the first."""
    how = policy.partition
    blocks = find_blocks(model, uses) if isinstance(how, str) else blocks_around(model, how)
    weights, front, back = weigh(model, blocks, uses)
    return partition(how, blocks, weights, ranks * policy.virtual_stages, front, back)


def check_stages(
    model: nn.Module,
    policy: PipelinePolicy,
    ranks: int,
    call: Callable[[nn.Module], Any],
    device: torch.device,
) -> None:
    """Compare the chain of stages with the uncut model, both on this rank, which must hold all of it meanwhile.

    Errors: PlanError names the first stage that differs.
    """
    uses = None if isinstance(model, Layers) else order_of_use(model, call, device)
    with as_before(model):
        check_cut(model, call, stage_starts(model, policy, ranks, uses), uses)


def recompute_blocks(
    module: nn.Module, names: Collection[str], policy: RecomputePolicy, replay: Replay
) -> None:
    """Wrap those of the blocks ``names`` that are in ``module``; stand-ins have nothing to compute again."""
    here = [
        (name, block)
        for name, block in module.named_modules()
        if name in names and next(block.parameters(), None) is not None
    ]
    if here:
        apply_recompute(here, policy.model_copy(update={"blocks": "all"}), replay)
