"""The state of an engine as a user may look at it and, for tensors, write it.

    plan, trace, timeline            what is to run, what ran, and when
    lr, loss_scale                   what the next step works with
    state_bytes, held_bytes          what lies on this rank
    gradients, full_tensor           tensors whole, on every rank, and their pieces (``local_tensor``)
    full_parameters, gathered        contexts in which parameters are whole
    state_dict, save_pretrained      the whole model

It stands below ``Engine``, which trains, and knows nothing of that.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Clock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.engine import mapped_state, single_tensors, state, views
from shardwise.engine.check import Check
from shardwise.engine.held import Held
from shardwise.engine.parts import Parts
from shardwise.engine.pipeline import Pipeline
from shardwise.engine.record import StepInputs
from shardwise.engine.together import named, together, within
from shardwise.observe.module_profile import ModuleTree
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.rows import Tally
from shardwise.parallel.expert.loads import ExpertTally
from shardwise.plan.plan import Plan
from shardwise.plan.timeline import Timeline
from shardwise.plan.trace import Trace


class StateAccess:
    """See the module's docstring."""

    def __init__(self, parts: Parts, pipeline: Pipeline | None, record: StepInputs, held: Held) -> None:
        self._parts = parts
        self._pipeline = pipeline
        self._record = record
        self._held = held

    @property
    def module(self) -> nn.Module:
        """The user's model; its parameters are views that the engine moves."""
        return self._parts.model

    @property
    def world(self) -> World:
        """The ranks: ``rank``, ``size``, ``device``."""
        return self._parts.world

    @property
    def config(self) -> RunConfig:
        """Resolved configuration."""
        return self._parts.config

    @property
    def check(self) -> Check | None:
        """Of the first step of a cut model; None after it."""
        return self._record.check

    @property
    def step_count(self) -> int:
        """Optimizer steps done."""
        return self._parts.progress.step_count

    @property
    def applied_steps(self) -> int:
        """Of them those that were not skipped: what the schedule counts."""
        return self._parts.progress.applied_steps

    @property
    def skipped_steps(self) -> int:
        """Of them those that were skipped."""
        return self.step_count - self.applied_steps

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, score) of the best step that was saved with a score."""
        return self._parts.progress.best

    @property
    def is_closed(self) -> bool:
        """After ``close``."""
        return self._held.is_over

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._parts.device

    @property
    def dp_index(self) -> int:
        """Which share of the data this rank computes: its place among the ``dp_size`` data-parallel ranks; the ranks of
        one model share it."""
        return self._parts.dp.index

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: models that train side by side."""
        return self._parts.dp.size

    @property
    def is_main(self) -> bool:
        """True on rank 0 alone."""
        return self.world.rank == 0

    @property
    def plan(self) -> Plan:
        """The Plan, its Actions in the order that the ranks follow now."""
        return views.plan(self._parts, self._pipeline)

    @property
    def traffic(self) -> Traffic:
        """What this rank sent so far."""
        return self._parts.traffic

    @property
    def clock(self) -> Clock:
        """The step that collectives are in."""
        return self._parts.clock

    def timeline(self) -> tuple[Timeline, Timeline] | None:
        """(predicted, measured) of the pipeline's last step, by index on "pp"; None without a pipeline. Collective.

        Predicted: the schedule with the median seconds of each stage's passes, as if messages took no time.
        """
        return views.timeline(self._pipeline)

    @property
    def trace(self) -> Trace:
        """What this rank did in its last step, Action by Action, and where that differed from the Plan."""
        return self._parts.walker.last

    @property
    def module_costs(self) -> ModuleTree | None:
        """Parameters, FLOPs and seconds of every module in the step that ``module_profile:`` names; None before it."""
        return self._parts.passes.profile.tree

    @property
    def graph_breaks(self) -> dict[str, int]:
        """With ``compile: blocks``: graph breaks in this process so far, by reason. None is what to aim at."""
        return views.graph_breaks(self.config)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._parts.optimizer_groups.rates(self.applied_steps)[0]["lr"])

    @property
    def weight_reference(self) -> float:
        """What all weights are divided by: the first microbatch's, times a power of two, near that of the first global
        batch."""
        return self._parts.accumulation.reference

    @property
    def loss_scale(self) -> float | None:
        """What losses are multiplied by under fp16; None otherwise."""
        scale = self._parts.loss_scale
        return None if scale is None else scale.scale

    def state_bytes(self) -> dict[str, int]:
        """Bytes of model state on this rank by row of the ledger (memory/ledger.py): ``weights``, ``gradients``,
        ``master``, ``moments``, ``tables``, ``dynamic tables``. Gradients as they are at the end of a step's backward
        pass."""
        return views.state_bytes(self._parts)

    def held_bytes(self) -> dict[str, int]:
        """All memory of the engine that outlives one operation, by row: model state and what it moves through."""
        return {str(row): size for row, size in self._parts.site.ledger.bytes_by_row().items()}

    @property
    def tables(self) -> dict[str, EmbeddingCollection]:
        """The model's embedding collections, by their names in it."""
        return dict(self._parts.tables.collections)

    @named
    def table_tallies(self) -> dict[str, Tally]:
        """Rows in use, inserted and evicted of each embedding table, over all ranks. Collective."""
        return self._parts.tables.tallies()

    def expert_tallies(self) -> dict[str, ExpertTally]:
        """By name of each mixture of experts: where the tokens of the last step went, over all ranks and microbatches;
        empty before the first one. Pairs kept and dropped are tokens times k."""
        return dict(self._parts.passes.loads.last)

    @named
    def gradients(self) -> dict[str, Tensor]:
        """Full gradients by name after the last backward of a step and before ``step()``: means, as the optimizer
        sees them before clipping. Collective; parameters that no rank used are left out."""
        self._held.away.check("gradients")
        return views.gradients(self._parts)

    def full_parameters(
        self, which: state.Which = None, write: bool = False, from_rank: int | None = None
    ) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """A context in which parameters are whole on every rank, by name: all, or of ``which`` and no others (names,
        parameters, modules, or several of them). Collective: every rank enters, and says the same.

        With ``write`` they may be edited, alike on all ranks; with ``from_rank`` that rank's edits are everybody's, and
        other ranks' are dropped. Edits reach weights and masters, so that the next step goes on from them; an element
        that stays as it was keeps its master. Where nothing but data is cut they are the model's own parameters; under
        tp, pp and ep whole copies of them on every rank, also of what other stages hold, which are named (pp: by names
        alone).
        Contexts may lie one in another.
        Errors: UsageError where all do not fit the memory that is free, with their bytes; for names that the model has
        not, for edits without ``write``, and for edits that differ between ranks without ``from_rank``.
        """
        self._held.check("full_parameters", reads_weights_alone=not write and from_rank is None)
        opened = state.full_parameters(self._parts, which, write, from_rank)
        return within(self.clock, "engine.full_parameters()", opened)

    @named
    def full_tensor(self, name: str, of: str = "master") -> Tensor | None:
        """What belongs to one parameter, whole, a copy on every rank; nothing else is gathered. Collective.

        ``of``: ``parameter`` (in the compute dtype), ``master`` (what the optimizer updates), ``gradient`` (the mean
        before clipping, after the last backward of a step and before ``step()``), or a moment of the optimizer by
        torch's name (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``). None where there is none: of a frozen
        parameter, or a gradient of one that no rank used.
        Errors: UsageError for an unknown name or moment; as ``gradients`` for gradients.
        """
        self._held.away.check("full_tensor")
        return single_tensors.full_tensor(self._parts, name, of)

    @named
    def set_full_tensor(self, name: str, value: Tensor, of: str = "master") -> None:
        """Write what ``full_tensor`` reads, from the same whole ``value`` on all ranks. Collective.

        A master is rounded into its weight; a parameter is written as its master is. A gradient counts in this step's
        norm, and as used.
        Errors: UsageError for another shape, for values that differ between ranks, and for a frozen parameter's
        gradient or moments.
        """
        self._held.away.check("set_full_tensor")
        single_tensors.set_full_tensor(self._parts, name, value, of)
        self._forget_check(of)

    def local_tensor(self, name: str, of: str = "master") -> Tensor | None:
        """This rank's own elements of what ``full_tensor`` gives, flat, a copy; they may be none. None where this rank
        holds no part of the parameter, on another stage of a pipeline, and as there. Of a master and of moments it is
        what an update under way makes of them (``offload.step: delayed``), which ``full_tensor`` lets count first."""
        self._held.away.check("local_tensor")
        return single_tensors.local_tensor(self._parts, name, of)

    def set_local_tensor(self, name: str, value: Tensor, of: str = "master") -> None:
        """Write what ``local_tensor`` reads: each rank its own elements. Collective. Ranks that own the same elements
        (stage 0, replicas) bring the same values."""
        self._held.away.check("set_local_tensor")
        single_tensors.set_local_tensor(self._parts, name, value, of)
        self._forget_check(of)

    def _forget_check(self, of: str) -> None:
        """Gradients are not those of the uncut model any more, nor are weights in the middle of a step."""
        if self._parts.accumulation.passes and of in ("gradient", "master", "parameter"):
            self._record.check = None

    def gathered(self) -> AbstractContextManager[None]:
        """A context for many passes without gradients: the weights that this rank computes with are gathered once.
        Collective; slices and stages stay cut, so that it takes 1/(tp·pp) of what ``full_parameters`` takes.
        Errors: UsageError where they do not fit, with their bytes."""
        self._held.check("gathered", reads_weights_alone=True)
        return within(self.clock, "engine.gathered()", state.summoned_parameters(self._parts))

    @together
    def state_dict(self, trained_only: bool = False) -> dict[str, Tensor]:
        """The whole model on the CPU of every rank, under the model's own names (tied names both); one Unit's memory
        beside. Where it does not fit: ``mapped_state_dict``, ``full_tensor``, ``save``. Collective.

        ``trained_only``: of the parameters that train and nothing else, such as the adapters of a frozen base.
        Errors: UsageError where the model does not fit the host's free memory, with its bytes.
        """
        self._held.away.check("state_dict", reads_weights_alone=True)
        self._held.known.check("state_dict")
        return state.state_dict(self._parts, trained_only)

    @together
    def mapped_state_dict(
        self, folder: str | Path, trained_only: bool = False, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """As ``state_dict``, for a model that no memory holds: rank 0 gets tensors in a map of a file, which may be
        read and not written, and other ranks nothing. Collective.

        ``folder``: where the file has room; its name is gone at once, and its bytes with the last tensor. ``dtype``: of
        those that hold fractions (default: their own).
        Errors: CheckpointError where it cannot be written.
        """
        self._held.away.check("mapped_state_dict", reads_weights_alone=True)
        self._held.known.check("mapped_state_dict")
        return mapped_state.mapped_state_dict(self._parts, Path(folder), trained_only, dtype)

    @together
    def load_state_dict(self, tensors: Mapping[str, Tensor], strict: bool = True) -> None:
        """Weights and buffers from whole tensors under the model's own names, the same on all ranks. Collective.

        Masters take them in their own dtype; the optimizer's moments stay. Parameters that are not among the names
        stay too where ``strict`` is false.
        Errors: MismatchError where names or shapes are those of another model.
        """
        self._held.away.check("load_state_dict")
        state.load_state_dict(self._parts, tensors, strict)

    @together
    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """The whole model as a folder that transformers opens, from any mesh and stage. Collective.

        For models with a ``save_pretrained`` of their own, which the first rank calls with the whole state, mapped and
        not in memory; ``options`` go to it (``max_shard_size``: what is in memory at a time).
        """
        self._held.away.check("save_pretrained", reads_weights_alone=True)
        self._held.known.check("save_pretrained")
        views.save_pretrained(self._parts, folder, options)

    def __repr__(self) -> str:
        """The mesh and the model in a few lines; ``print(engine.plan)`` shows the whole Plan."""
        return views.in_words(self._parts)
