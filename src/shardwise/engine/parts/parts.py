"""Parts: the objects that ``build`` makes and the engine runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.comm.collectives import Group
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.wait_meter import WaitMeter
from shardwise.comm.world import World
from shardwise.compose.module_steps import RunStage
from shardwise.compose.spec import ModelSpec
from shardwise.config.run import RunConfig
from shardwise.engine.parts.accumulation import Accumulation
from shardwise.engine.parts.attention_backend import AttentionHold
from shardwise.engine.parts.deterministic import DeterministicMode
from shardwise.engine.parts.folders import StepFolders
from shardwise.engine.parts.followers import PhasesFollower, StepFollower
from shardwise.engine.parts.pass_context import PassContext
from shardwise.engine.parts.program import ActionLists
from shardwise.engine.parts.rank_phases import RankPhases
from shardwise.engine.parts.shared import SharedGradients
from shardwise.engine.parts.tables import ModelTables
from shardwise.memory.ledger import Ledger
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.groups import OptimizerGroups
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.hooks import UnitHooks
from shardwise.plan.exchange import GradientExchange
from shardwise.plan.mesh import Mesh
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.plan.slices import TensorSlices
from shardwise.plan.walker import Walker
from shardwise.precision.loss_scale import LossScale
from shardwise.tiers.tier import TierResources


class RuntimeContext(NamedTuple):
    """The ranks of a job, and the configuration resolved for them."""

    world: World
    settings: RunConfig
    mesh: Mesh
    groups: Mapping[str, Group]
    """Process groups by name: the axes "dp", "dp_shard", "dp_replicate", "data", "cp", "tp", "pp", and "model" and
    "world". If experts lie on other ranks than the rest, also "expert_dp", "edp", "ep" and "etp".
    """
    clock: StepClock
    traffic: Traffic
    ledger: Ledger
    """Record of the bytes that each holder of memory took."""
    levels: tuple[Group, ...] = ()
    """Two groups of "ep" if it spans hosts: the ranks in this rank's position on each host, and the ranks of this host.
    """
    notes: tuple[str, ...] = ()
    """Notes that the printed Plan shows."""
    tiers: TierResources | None = None
    """Host memory and disks on which state lies off the device; None if all state lies on the device."""
    exchanges: Mapping[str, GradientExchange] = MappingProxyType({})
    """The ways to sum gradients over the ranks of the axes along which state is cut."""
    deterministic: DeterministicMode | None = None
    """The hold on torch's switches; None without ``deterministic: true``."""
    attention: AttentionHold | None = None
    """The hold on torch's attention kernels; None if torch's own choice stays."""


@dataclass
class Stage:
    """One pipeline stage on this rank; without a pipeline the whole model."""

    index: int
    module: nn.Module
    hooks: UnitHooks
    run: RunStage | None = None
    handles: list[Any] = field(default_factory=list)
    """Handles of the hooks that do not belong to Units."""


class TrainedBucket(NamedTuple):
    """A trained bucket and its optimizer."""

    bucket: BucketState
    optimizer: FlatOptimizer


@dataclass
class RunProgress:
    """The progress of a run, the same on all ranks. Saved with a step, and restored when the step is loaded."""

    step_count: int = 0
    """Optimizer steps done."""
    applied_steps: int = 0
    """Optimizer steps that were not skipped; the learning rate schedule counts these steps."""
    skipped_in_a_row: int = 0
    """Steps skipped since the last applied step."""
    best: list[tuple[int, float]] = field(default_factory=list)
    """(step, score) of the steps that were saved with a score, best first; the last ones may be left out."""

    def count(self, applied: bool) -> None:
        """Count one more step, whose update was applied or skipped."""
        self.step_count += 1
        self.applied_steps += applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1


@dataclass
class EngineParts:
    """The running parts of one engine."""

    model: nn.Module
    site: RuntimeContext
    program: ActionLists
    """The Plan in the order that is followed now, and its walker."""
    slices: TensorSlices
    """This rank's pieces of the tensors in the registry."""
    stages: list[Stage]
    """Stages of this rank in order of their index."""
    trained: list[TrainedBucket]
    """Trained buckets in order of Units."""
    shared: SharedGradients
    tables: ModelTables
    """Embedding tables, beside the parameters."""
    accumulation: Accumulation
    """The microbatches of the running step."""
    optimizer_groups: OptimizerGroups
    """The source of lr, betas, momentum and the like, step by step."""
    passes: PassContext
    """The contexts in which every pass of the model runs."""
    folders: StepFolders
    """Folders of saved steps."""
    followers: Sequence[StepFollower] = ()
    """Techniques of this run that take part in every step."""
    stage_peers: Group | None = None
    """The ranks that hold the same stage, if matrices are dealt among them."""
    progress: RunProgress = field(default_factory=RunProgress)

    @property
    def phases(self) -> RankPhases | None:
        """The seconds of all ranks by phase, if the ranks exchange them."""
        return next((each.phases for each in self.followers if isinstance(each, PhasesFollower)), None)

    @property
    def walker(self) -> Walker:
        """The walker of the Plan's list."""
        return self.program.walker

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.site.settings

    @property
    def world(self) -> World:
        """The ranks of the job."""
        return self.site.world

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return self.site.world.device

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks."""
        return self.site.mesh

    @property
    def groups(self) -> Mapping[str, Group]:
        """Process groups by name, as in ``RuntimeContext``."""
        return self.site.groups

    @property
    def clock(self) -> StepClock:
        """The step in which collectives run."""
        return self.site.clock

    @property
    def traffic(self) -> Traffic:
        """The bytes that this rank has sent so far."""
        return self.site.traffic

    @property
    def registry(self) -> Registry:
        """Every persistent tensor with its placement on every axis."""
        return self.slices.registry

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale under fp16; None otherwise."""
        return self.accumulation.loss_scale

    @property
    def dp(self) -> Group:
        """All ranks that hold copies or shards of the same state, and sum its gradient."""
        return self.site.groups["dp"]

    @property
    def data(self) -> Group:
        """The ranks that have different samples: those of ``dp`` without those that have other tokens of a sample."""
        return self.site.groups["data"]

    @property
    def stage_group(self) -> Group:
        """The ranks that hold the stages of one model and have this rank's position on all other axes."""
        return self.groups["pp"]

    def owner(self, info: TensorInfo) -> int:
        """Return the index in ``stage_group`` of the rank whose stage owns a tensor that several stages may hold."""
        return self.mesh.places.place(info.stages[0])

    @property
    def spec(self) -> ModelSpec:
        """The whole model as data."""
        return self.program.planned.spec

    @property
    def hooks(self) -> list[UnitHooks]:
        """Hooks on the Units of each stage, in order of stages."""
        return [stage.hooks for stage in self.stages]

    @property
    def has_last_stage(self) -> bool:
        """True if this rank has the last stage, which computes the loss."""
        return self.groups["pp"].index == self.last_place

    @property
    def last_place(self) -> int:
        """Index on "pp" of the rank that has the last stage."""
        return self.mesh.last_place(self.config.pipeline.stages_per_rank)

    def measure_waits(self) -> None:
        """Measure from now on how long the computation waits for other ranks; a second call does nothing."""
        if self.clock.meter is None:
            self.clock.meter = WaitMeter(self.walker)

    @property
    def brings_loss(self) -> bool:
        """True if this rank, of the ranks that share a model, contributes the loss to sums over them."""
        return self.has_last_stage and self.groups["tp"].index == 0
