"""Parts: what ``build`` made and the engine runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.comm.collectives import Clock, Group
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.compose.apply import RunStage
from shardwise.compose.spec import ModelSpec
from shardwise.config.run import RunConfig
from shardwise.engine.accumulation import Accumulation
from shardwise.engine.folders import Folders
from shardwise.engine.pass_context import PassContext
from shardwise.engine.program import ActionLists
from shardwise.engine.shared import SharedGradients
from shardwise.engine.tables import Tables
from shardwise.engine.unit_norms import UnitSquares
from shardwise.memory.ledger import Ledger
from shardwise.memory.tier import Tiers
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.groups import OptimizerGroups
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.hooks import UnitHooks
from shardwise.plan.mesh import Mesh
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.plan.slices import Slices
from shardwise.plan.walker import Walker
from shardwise.precision.loss_scale import LossScale


class Site(NamedTuple):
    """The ranks, and what the configuration comes to on them."""

    world: World
    settings: RunConfig
    mesh: Mesh
    groups: Mapping[str, Group]
    """By axis: "dp", "dp_shard", "dp_replicate", "tp", "pp", "model" and "world"; where experts lie on other ranks
    than the rest, "expert_dp", "edp", "ep" and "etp"."""
    clock: Clock
    traffic: Traffic
    ledger: Ledger
    """Who holds how many bytes."""
    levels: tuple[Group, ...] = ()
    """Of "ep" where it spans hosts: its ranks in this one's place on each, and those of this host."""
    notes: tuple[str, ...] = ()
    """For the Plan."""
    tiers: Tiers | None = None
    """Where state lies off the device."""


@dataclass
class Stage:
    """One pipeline stage on this rank; without a pipeline the whole model."""

    index: int
    module: nn.Module
    hooks: UnitHooks
    run: RunStage | None = None
    handles: list[Any] = field(default_factory=list)
    """Of hooks beside those on Units."""


class Trained(NamedTuple):
    """A trained bucket and its optimizer."""

    bucket: BucketState
    optimizer: FlatOptimizer


@dataclass
class Progress:
    """How far a run has come, the same on all ranks. Saved with a step, and put back when it is loaded."""

    step_count: int = 0
    """Optimizer steps done."""
    applied_steps: int = 0
    """Of them those that were not skipped: what the schedule counts."""
    skipped_in_a_row: int = 0
    """Steps skipped since the last one that was not."""
    best: tuple[int, float] | None = None
    """(step, score) of the best step that was saved with a score."""

    def count(self, applied: bool) -> None:
        """One more step, whose update was made or skipped."""
        self.step_count += 1
        self.applied_steps += applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1


@dataclass
class Parts:
    """The running parts of one engine."""

    model: nn.Module
    site: Site
    program: ActionLists
    """The Plan in the order that is followed now, and what walks it."""
    slices: Slices
    """What this rank holds of the tensors in the registry."""
    stages: list[Stage]
    """In order of their index."""
    trained: list[Trained]
    """Trained buckets in order of Units."""
    shared: SharedGradients
    tables: Tables
    """Embedding tables, beside the parameters."""
    accumulation: Accumulation
    """The microbatches of the running step."""
    optimizer_groups: OptimizerGroups
    """Where lr, betas, momentum and their like come from, step by step."""
    passes: PassContext
    """What stands around every pass."""
    folders: Folders
    """Of saved steps."""
    unit_squares: UnitSquares = field(default_factory=UnitSquares)
    """Places of the Units' squares among the numbers of NORM, where their norms are asked for."""
    stage_peers: Group | None = None
    """The ranks that hold the same stage, where matrices are dealt among them."""
    progress: Progress = field(default_factory=Progress)

    @property
    def walker(self) -> Walker:
        """Walks the Plan's list."""
        return self.program.walker

    @property
    def config(self) -> RunConfig:
        """Resolved configuration."""
        return self.site.settings

    @property
    def world(self) -> World:
        """The ranks."""
        return self.site.world

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.site.world.device

    @property
    def mesh(self) -> Mesh:
        """How the ranks stand."""
        return self.site.mesh

    @property
    def groups(self) -> Mapping[str, Group]:
        """By axis, as in ``Site``."""
        return self.site.groups

    @property
    def clock(self) -> Clock:
        """The step that collectives are in."""
        return self.site.clock

    @property
    def traffic(self) -> Traffic:
        """What this rank sent so far."""
        return self.site.traffic

    @property
    def registry(self) -> Registry:
        """Every persistent tensor with its place on every axis."""
        return self.slices.registry

    @property
    def loss_scale(self) -> LossScale | None:
        """Only under fp16."""
        return self.accumulation.loss_scale

    @property
    def dp(self) -> Group:
        """All data-parallel ranks."""
        return self.site.groups["dp"]

    @property
    def stage_group(self) -> Group:
        """The ranks that hold the stages of one model, this rank's place on all other axes being theirs."""
        return self.groups["pp"]

    def owner(self, info: TensorInfo) -> int:
        """Index in ``stage_group`` of the rank whose stage stands for a tensor that several may hold."""
        return info.stages[0] % self.stage_group.size

    @property
    def spec(self) -> ModelSpec:
        """The whole model as data."""
        return self.program.planned.spec

    @property
    def hooks(self) -> list[UnitHooks]:
        """By stage."""
        return [stage.hooks for stage in self.stages]

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank knows the loss."""
        pp = self.groups["pp"]
        return pp.index == pp.size - 1

    @property
    def brings_loss(self) -> bool:
        """Whether this rank, of those that share a model, brings the loss."""
        return self.has_last_stage and self.groups["tp"].index == 0
