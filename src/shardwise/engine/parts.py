"""Parts: what ``build`` made and the engine runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import Checkpoints
from shardwise.comm.collectives import Clock, Group
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.compose.cut import RunStage
from shardwise.compose.whole import Whole
from shardwise.engine.accumulation import Accumulation
from shardwise.engine.original import Original
from shardwise.engine.shared import SharedGradients
from shardwise.engine.step import Trained
from shardwise.engine.tables import Tables
from shardwise.engine.vocabulary import Vocabulary
from shardwise.memory.replay import Place, Replay
from shardwise.optim.groups import OptimizerGroups
from shardwise.parallel.tensor.own_use import OwnUse
from shardwise.parallel.zero.executor import Executor
from shardwise.plan.errors import PlanError
from shardwise.plan.lists import Strategy
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.pytree import tensors_in
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.plan.slices import Slices
from shardwise.precision.loss_scale import LossScale


@dataclass
class Stage:
    """One pipeline stage on this rank; without a pipeline the whole model."""

    index: int
    module: nn.Module
    plan: Plan
    executor: Executor
    run: RunStage | None = None
    handles: list[Any] = field(default_factory=list)
    """Of hooks beside the executor's."""


@dataclass
class Parts:
    """The running parts of one engine."""

    model: nn.Module
    world: World
    device: torch.device
    mesh: Mesh
    whole: Whole
    registry: Registry
    slices: Slices
    """What this rank holds of the tensors in the registry."""
    stages: list[Stage]
    """In order of their index."""
    strategy: Strategy
    trained: list[Trained]
    """Trained buckets in order of Units."""
    shared: SharedGradients
    tables: Tables
    """Embedding tables, beside the parameters."""
    groups: Mapping[str, Group]
    """By axis: "dp", "dp_shard", "dp_replicate", "tp", "pp", "model" and "world"."""
    clock: Clock
    traffic: Traffic
    loss_scale: LossScale | None
    """Only under fp16."""
    accumulation: Accumulation
    """The microbatches of the running step."""
    optimizer_groups: OptimizerGroups
    """Where lr, betas, momentum and their like come from, step by step."""
    replay: Replay
    """The microbatch that random numbers are drawn for."""
    vocabulary: Vocabulary
    """What the tokens of a batch may be."""
    own_use: OwnUse
    """Who uses which slice."""
    original: Original
    """What the model's modules held before."""
    number: int = 0
    """Which engine of its world: keeps the keys of several engines apart in the store."""
    checkpoints: dict[Path, Checkpoints] = field(default_factory=dict)
    """By folder."""
    saves: int = 0

    @property
    def dp(self) -> Group:
        """All data-parallel ranks."""
        return self.groups["dp"]

    @property
    def stage_group(self) -> Group:
        """The ranks that hold the stages of one model, this rank's place on all other axes being theirs."""
        return self.groups["pp"]

    def owner(self, info: TensorInfo) -> int:
        """Index in ``stage_group`` of the rank whose stage stands for a tensor that several may hold."""
        return info.stages[0] % self.stage_group.size

    @property
    def executors(self) -> list[Executor]:
        """By stage."""
        return [stage.executor for stage in self.stages]

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank knows the loss."""
        pp = self.groups["pp"]
        return pp.index == pp.size - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank, of those that share a model, brings the loss."""
        return self.has_last_stage and self.groups["tp"].index == 0

    @contextmanager
    def at(self, step: int, microbatch: int, batch: Any) -> Iterator[None]:
        """Around a pass: random numbers are drawn at its place. Errors: DataError where tokens are outside the model's
        vocabulary."""
        place, looked_at = self.place(step, microbatch, batch), self.own_use.looked_at()
        with self._told_as_cut(), self.vocabulary.checked(batch), self.replay.at(place), looked_at:
            yield

    def place(self, step: int, microbatch: int, batch: Any) -> Place:
        """Where the samples of ``batch`` stand in the global batch of ``step``."""
        rows = next((len(each) for each in tensors_in(batch) if each.dim()), 0)
        return Place(step, (microbatch * self.dp.size + self.dp.index) * rows, rows or None)

    @contextmanager
    def _told_as_cut(self) -> Iterator[None]:
        """A first pass over slices that ends in shapes which do not fit is most often a table that does not fit."""
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())
            misfit = any(word in text for word in ("shape", "size", "dimension"))
            if self.groups["tp"].size == 1 or self.clock.steps_done or not misfit:
                raise
            raise PlanError(
                f"tensor: the first pass over tp={self.groups['tp'].size} ranks ended with: {text}. Where the same "
                "pass runs with mesh.tp: 1, a module counts heads or features in attributes that its table does not "
                "divide: name them in its row, as in tensor.table: {'layers.*.attention': 'num_heads'}, keep the "
                "module whole with 'replicate', or set mesh.tp: 1"
            ) from error
