"""Apply: all changes to a module, in order, each with the reason for its position.

The Plan comes first and changes no module; the functions below cut the module to the Plan. On the whole model, once:

    1  batch norm      first: it wraps forwards of the model's own modules, some of which will be copied or replaced
    2  start           rank 0's weights and buffers become all ranks' while every rank still has the whole model
    3  dropout         its masks are keyed by names and by how inputs are cut, so before slices, which check for dropout
                       that is not keyed
    4  slices          along "tp", before stages: a table's patterns match names of the whole model; then experts get
                       the run's settings, by names of the whole model and by how tokens lie on "tp" by then, and stacks
                       of experts are cut
    5  stages          along "pp"; layers that are built only here (LayerSpec) now get dropout and experts (3 and 4)
    6  tiles           after slices, which put modules of their own in the places of heads and projections

and on each stage:

    7  buffers         to the device, in their dtypes: those of layers that were built only here are new
    8  weights         into flat buffers, the stage's real parameters, which all later lines reference
    9  compile         blocks, inside of recomputation: a compiler cannot trace a checkpoint's contexts
    10 recompute       wraps forwards of blocks, inside of hooks: a Unit's weights are gathered around both its passes;
                       before it, because they run again too, those of modules that need it under dtypes by operation
    11 activations     of blocks, to the host; outside of recomputation, which leaves only a block's input to be moved
    12 hooks           of Units, around forward as it is now; also a Unit's methods besides forward
    13 casts           last, at the root: hooks run in the order in which they were registered, so that the hooks of the
                       Units see inputs as the user passed them and the module's own code sees cast inputs

The engine's build (engine/construction/build.py) calls these two functions and changes a module in no other way.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import PlanError
from shardwise.comm.collectives import Group
from shardwise.compose.describe import Described, blocks_of
from shardwise.models.dropout import replace_dropout, unkeyed_dropout
from shardwise.models.tiles import check_heads, check_tiles, tile_foreign, tile_model
from shardwise.parallel.embedding.collection import as_before
from shardwise.parallel.expert.apply import ExpertRanks, check_blocks, cut_experts, surround
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.expert.policy import ExpertsPolicy
from shardwise.parallel.expert.stacks import find_stacks
from shardwise.parallel.expert.surroundings import Layout
from shardwise.parallel.pipeline.check_cut import check_cut
from shardwise.parallel.pipeline.cut import cut
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.pipeline.uses import order_of_use
from shardwise.parallel.tensor.apply import make_parallel
from shardwise.parallel.tensor.layout import dropout_cuts
from shardwise.parallel.tensor.region import Region
from shardwise.parallel.zero.batch_norm import synchronize_batch_norm
from shardwise.parallel.zero.hooks import UnitHooks
from shardwise.parallel.zero.windows import UnitState
from shardwise.passes.recompute import RecomputePolicy, apply_recompute
from shardwise.passes.replay import Replay
from shardwise.passes.tiles import TilesPolicy
from shardwise.tiers.activations import Activations
from shardwise.tiers.alike import Alike

RunStage = Callable[[Callable[[nn.Module], Any], Any, Hashable], Any]
"""Function of (call of the model, input from the stage before, kind of batch) that returns the input of the next stage,
or the call's result.

The first pass of each kind is watched.
"""
Stages = dict[int, tuple[nn.Module, RunStage | None]]
"""Stages of a rank, by index; without a pipeline the model itself."""


def apply_to_model(
    model: nn.Module,
    described: Described,
    starts: Sequence[str],
    groups: Mapping[str, Group],
    seed: int,
    replay: Replay,
    loads: ExpertLoads,
    levels: tuple[Group, ...] = (),
    experts: ExpertsPolicy | None = None,
    synchronizes_batch_norm: bool = False,
    start: Callable[[], None] | None = None,
    tiles: TilesPolicy | None = None,
    keeps_one_pass: bool = True,
    alike: Alike | None = None,
) -> Stages:
    """Apply lines 1 to 6 to ``model``, in place, and return this rank's stages.

    Args:
        model: The whole model.
        described: Description of the model.
        starts: Blocks that begin each stage but the first.
        groups: Group of each axis.
        seed: Seed of dropout and routers.
        replay: Records of random numbers, which recomputation replays.
        loads: Counters of the experts' loads.
        levels: Groups of "ep" across and within hosts, if "ep" spans hosts.
        experts: Exchange of rows with experts.
        synchronizes_batch_norm: Compute statistics of batch norm over all data-parallel ranks.
        start: Function that sets the model's first weights and buffers.
        tiles: Settings of tiles.
        keeps_one_pass: True if no forward pass of the last stage waits while another one runs.
        alike: Recorder of tensors that ranks along "tp" have in common.

    Raises:
        PlanError: if the model cannot be cut so.
    """
    tiles = tiles or TilesPolicy()
    check_tiles(model, tiles, described.spec.units)
    if synchronizes_batch_norm:
        synchronize_batch_norm(model, groups["dp"])
    if start is not None:
        start()
    table, is_cut, tp = described.table, described.cuts_sequence, groups["tp"]
    region = Region(tp, is_cut, replay, alike)
    replace_dropout(
        model,
        seed,
        replay,
        {} if table is None else dropout_cuts(model, table, tp.index, tp.size, is_cut),
    )
    if table is not None:
        _refuse_unkeyed(model)
        make_parallel(model, table, tp, is_cut, region)
    else:
        tile_foreign(model, tiles)
    check_heads(model, tiles)

    def layout() -> Layout:
        return "cut" if region.cut else "addends" if region.adds else "alike"

    surround(model, seed, replay, loads, tp, layout)
    stacks, ep, etp = described.stacks, groups.get("ep"), groups.get("etp")
    experts = experts or ExpertsPolicy()
    in_blocks = experts.exchange == "blocks"
    if in_blocks:
        check_blocks(model)
    # Also if the stacks are not cut.
    if not stacks and (in_blocks or experts.rows is not None or not replay.has_numbers):
        stacks = find_stacks(model).stacks
    ranks = ExpertRanks(
        ep or Group.alone("ep"), etp or Group.alone("etp"), tp, layout, levels, experts.rows, in_blocks
    )
    cut_experts(model, stacks, ranks, replay)
    if groups["pp"].size == 1:
        tile_model(model, tiles, replay, at_once=True)
        return {0: (model, None)}
    here = range(groups["pp"].index, len(starts) + 1, groups["pp"].size)
    stages = cut(model, starts, here, described.uses)
    for stage in stages.values():  # layers that a LayerSpec has just built are new
        stage.draws = replay.draws
        replace_dropout(stage.module, seed, replay)
        surround(stage.module, seed, replay, loads, tp, layout)
        cut_experts(stage.module, stacks, ranks, replay)
        tile_model(stage.module, tiles, replay, keeps_one_pass)
    return {index: (stage.module, stage.run) for index, stage in stages.items()}


def apply_to_stage(
    module: nn.Module,
    buffers: Callable[[nn.Module], None],
    weights: Callable[[nn.Module], list[UnitState]],
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    recompute: Callable[[nn.Module], None],
    offload: Callable[[nn.Module], None],
    hooks: Callable[[list[UnitState]], UnitHooks],
    casts: Callable[[nn.Module], list[Any]],
) -> tuple[UnitHooks, list[Any]]:
    """Apply lines 7 to 13 to a stage.

    Args:
        module: The stage.
        buffers: Moves buffers to the device.
        weights: Lays out the weights in flat buffers and returns the state of the Units.
        compiled: Returns the compiled form of a function; None: nothing is compiled.
        recompute: Wraps blocks for recomputation.
        offload: Wraps blocks whose activations go to the host.
        hooks: Registers the hooks of the Units.
        casts: Registers casts of inputs and outputs.

    Returns:
        The object that runs the Units, and the handles of the casts.
    """
    buffers(module)
    states = weights(module)
    if compiled is not None:
        for state in states[1:]:
            own: Any = state.module
            own.forward = compiled(own.forward)
    recompute(module)
    offload(module)
    made = hooks(states)
    return made, casts(module)


def _refuse_unkeyed(model: nn.Module) -> None:
    unkeyed = unkeyed_dropout(model)
    if unkeyed:
        raise PlanError(
            f"tensor: {unkeyed[0]} drops by torch's generator, which differs from rank to rank, so that ranks along tp "
            "would go on from different numbers; use nn.Dropout, or set its share to 0"
        )


def recompute_blocks(
    module: nn.Module, names: Collection[str], policy: RecomputePolicy, replay: Replay
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


def offload_blocks(module: nn.Module, names: Collection[str], activations: Activations) -> None:
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
