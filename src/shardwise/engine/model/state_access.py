"""The state of an engine as a user may read it and, for tensors, write it.

    plan, trace, timeline            the Actions to run, the Actions that ran, and their times
    action_ranges                    the names of the Actions in a profile
    lr, loss_scale                   numbers of the next step
    state_bytes, held_bytes          memory on this rank
    gradients, full_tensor           whole tensors on every rank, and their pieces (``local_tensor``)
    full_parameters, gathered        contexts in which parameters are whole
    state_dict, save_pretrained      the whole model

``StateAccess`` is a base class of ``Engine``, which trains; nothing in this module depends on training.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.engine.model import single_tensors, views
from shardwise.engine.model.held import ModelHandle
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.parts.rank_phases import Reported
from shardwise.engine.parts.step_meter import measured_memory
from shardwise.engine.state import mapped_state, state
from shardwise.engine.state.together import named, together, within
from shardwise.engine.step.check import FirstStepCheck
from shardwise.engine.step.pipeline import PipelineRunner
from shardwise.engine.step.record import StepInputs
from shardwise.observe import action_ranges
from shardwise.observe.module_profile import ModuleTree
from shardwise.observe.stragglers import SlowestRank
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.rows.keyed_rows import RowTally
from shardwise.parallel.expert.loads import ExpertTally
from shardwise.plan.norm_numbers import PhaseSeconds
from shardwise.plan.plan import Plan
from shardwise.plan.timeline import Timeline
from shardwise.plan.trace import Trace
from shardwise.tiers.row_cache import CacheFigures


class StateAccess:
    """Read and write access to the state of an engine; a base class of ``Engine``."""

    def __init__(
        self, parts: EngineParts, pipeline: PipelineRunner | None, record: StepInputs, held: ModelHandle
    ) -> None:
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
        """The resolved configuration."""
        return self._parts.config

    @property
    def check(self) -> FirstStepCheck | None:
        """The comparison of a cut model's first step with the uncut model; None after that step."""
        return self._record.check

    @property
    def step_count(self) -> int:
        """Optimizer steps done."""
        return self._parts.progress.step_count

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that were not skipped; the learning rate schedule counts these steps."""
        return self._parts.progress.applied_steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped."""
        return self.step_count - self.applied_steps

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, score) of the best step that was saved with a score."""
        best = self._parts.progress.best
        return best[0] if best else None

    @property
    def is_closed(self) -> bool:
        """True after ``close``."""
        return self._held.is_over

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return self._parts.device

    @property
    def dp_index(self) -> int:
        """The index of this rank's share of the data among the ``dp_size`` data-parallel ranks.

        The ranks of one model have the same index.
        """
        return self._parts.data.index

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks: of models that train side by side."""
        return self._parts.data.size

    @property
    def is_main(self) -> bool:
        """True on rank 0 only."""
        return self.world.rank == 0

    @property
    def plan(self) -> Plan:
        """The Plan, its Actions in the order that the ranks follow now."""
        return views.plan(self._parts, self._pipeline)

    @property
    def traffic(self) -> Traffic:
        """The bytes that this rank has sent so far."""
        return self._parts.traffic

    @property
    def clock(self) -> StepClock:
        """The step in which collectives run."""
        return self._parts.clock

    def timeline(self) -> tuple[Timeline, Timeline]:
        """Return the predicted and the measured timeline of the last step. Collective with a pipeline.

        The prediction is the schedule with the median seconds of each stage's passes, as if messages took no time. The
        measured timeline of a pipeline also contains messages, and the waits for other ranks if they are measured.
        Without a pipeline it contains all Actions of this rank, the passes of Units, exchanges and updates too.

        Returns:
            (predicted, measured), each by index on "pp", which is 0 without a pipeline; both are empty before the first
            step.
        """
        return views.timeline(self._parts, self._pipeline)

    @property
    def trace(self) -> Trace:
        """The Actions that this rank ran in its last step, and their departures from the Plan."""
        return self._parts.walker.last

    def measure_waits(self) -> None:
        """Measure from now on how long this rank's computation waits for other ranks.

        ``shardwise train``, every key of ``monitor:`` that writes a record of each step, and ``prefetch`` with lanes
        call this function. Results are bitwise equal to those without. On a device a wait takes two events, and the
        host waits for none of them.

        Example:
            engine.measure_waits()
            engine.train_step(batches)
            print(engine.trace.waits.seconds())   # {'dp_shard': 0.0021, 'dp': 0.0003}
        """
        self._parts.measure_waits()

    def count_seconds(self, phase: Reported, seconds: float) -> None:
        """Count seconds that the loop around the engine waited for data or for a save in the running step.

        Does nothing without ``monitor.rank_seconds``.

        Args:
            phase: ``data`` or ``save``.
            seconds: Seconds of the wait.
        """
        if self._parts.phases is not None:
            self._parts.phases.count(phase, seconds)

    def rank_seconds(self) -> list[PhaseSeconds]:
        """Return the mean seconds of a step by phase, for each rank; an empty list without ``monitor.rank_seconds``.

        The first step of a process and the last step before this call are left out.
        """
        return [] if self._parts.phases is None else self._parts.phases.mean()

    @property
    def slowest_rank(self) -> SlowestRank | None:
        """The rank whose own work took longest in the step before the last one, and by what; equal on all ranks.

        None without ``monitor.rank_seconds``, before the third step, and if no two ranks compute the same part of the
        model.
        """
        return None if self._parts.phases is None else self._parts.phases.slowest

    @property
    def measured_steps(self) -> int:
        """Number of steps in :meth:`rank_seconds`."""
        return 0 if self._parts.phases is None else self._parts.phases.steps

    def action_ranges(self) -> AbstractContextManager[None]:
        """Return a context that names the Actions of this rank's steps in a running ``torch.profiler.profile``.

        Inside the ``with`` block every Action runs in a ``record_function`` range, and on a CUDA device in an NVTX
        range too, such as ``UNSHARD(u3,0) Unit 3 'blocks.2'``. The block begins and ends between two steps. Results
        are bitwise equal to those without ranges.

        Example:
            with torch.profiler.profile() as profile, engine.action_ranges():
                engine.train_step(batches)
        """
        parts = self._parts
        return action_ranges.action_ranges(parts.walker, parts.program.plan.own.units, parts.device)

    @property
    def module_costs(self) -> ModuleTree | None:
        """Parameters, FLOPs and seconds of every module in the step that ``module_profile:`` names; None before it."""
        return self._parts.passes.profile.tree

    @property
    def graph_breaks(self) -> dict[str, int]:
        """The graph breaks of ``compile: blocks`` in this process so far, by reason; the aim is an empty dict."""
        return views.graph_breaks(self.config)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._parts.optimizer_groups.rates(self.applied_steps)[0]["lr"])

    @property
    def weight_reference(self) -> float:
        """The number by which all weights of microbatches are divided.

        The number is the first microbatch's weight times a power of two, near the weight of the first global batch.
        """
        return self._parts.accumulation.reference

    @property
    def loss_scale(self) -> float | None:
        """The factor by which losses are multiplied under fp16; None otherwise."""
        scale = self._parts.loss_scale
        return None if scale is None else scale.scale

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of model state on this rank, by row of the ledger (memory/ledger.py).

        The rows are ``weights``, ``gradients``, ``master``, ``moments``, ``tables`` and ``dynamic tables``. Gradients
        count as at the end of a step's backward pass.
        """
        return views.state_bytes(self._parts)

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of all memory of the engine that outlives one operation, by row of the ledger.

        Beside model state this counts the buffers through which the state moves. After a step inside
        :meth:`measure_memory` it also has what that step held when it held most: ``kept``, ``received``, ``at work``.
        """
        ledger = self._parts.site.ledger
        return {str(row): size for row, size in {**ledger.bytes_by_row(), **ledger.of_a_step}.items()}

    def expect_bytes(self, rows: Mapping[str, int]) -> None:
        """Store the bytes that were foreseen for this rank, by row.

        An error of a rank that is out of memory then names the row that outgrew its forecast most.

        Args:
            rows: Bytes by row of the ledger. With ``found = shardwise.foresee(...)`` those of a rank of the first
                pipeline stage are ``found.rows(found.steps[0])``.
        """
        self._parts.site.ledger.foreseen = dict(rows)

    def count_batches_ahead(self, size: Callable[[], int]) -> None:
        """Count the batches that a loader reads before their use, in the row ``batches ahead``.

        Args:
            size: Function that returns the present bytes, such as ``lambda: loader.ahead_bytes``.
        """
        self._parts.site.ledger.take("batches ahead", "loader", size)

    def measure_memory(self, batches: Any = ()) -> AbstractContextManager[None]:
        """Return a context that measures what the step inside it keeps, receives and works with. Not collective.

        The block contains one whole step; ``held_bytes`` then has the rows ``kept``, ``received`` and ``at work``, at
        the moment at which the step held most on this rank's device. Results are bitwise equal to those without. The
        step takes some 10 µs longer for each of its operations; other steps take as long as before. Nothing is
        measured with ``compile: blocks``, because compiled code allocates memory that torch's dispatcher does not see.

        Args:
            batches: The microbatches of the step. The largest counts as kept, unless the step copies it to a device.

        Example:
            with engine.measure_memory(batches):
                engine.train_step(batches)
            print(engine.held_bytes()["kept"])
        """
        return measured_memory(self._parts, batches)

    @property
    def tables(self) -> dict[str, EmbeddingCollection]:
        """The model's embedding collections, by their names in the model."""
        return dict(self._parts.tables.collections)

    @named
    def table_tallies(self) -> dict[str, RowTally]:
        """Return the rows in use, inserted and evicted of each embedding table, over all ranks. Collective."""
        return self._parts.tables.tallies()

    def take_tier_figures(self) -> CacheFigures | None:
        """Return the counts of rows in memory and on a disk on this rank since the last call, for tables with tiers.

        None if no table on this rank has tiers.
        """
        return self._parts.tables.take_figures()

    def expert_tallies(self) -> dict[str, ExpertTally]:
        """Return the token counts of the last step by name of each mixture of experts, over all ranks and microbatches.

        Pairs kept and dropped are counted as tokens times k. The dict is empty before the first step.
        """
        return dict(self._parts.passes.loads.last)

    @named
    def gradients(self) -> dict[str, Tensor]:
        """Return the full gradients by name, as the optimizer sees them before clipping. Collective.

        Call this after the last backward pass of a step and before ``step()``. The gradients are means. Parameters that
        no rank used are left out.
        """
        self._held.away.check("gradients")
        return views.gradients(self._parts)

    def full_parameters(
        self, which: state.Which = None, write: bool = False, from_rank: int | None = None
    ) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """Return a context in which parameters are whole on every rank, by name. Collective.

        Every rank enters the context with the same arguments. Edits reach weights and masters, so the next step
        continues from them; an element that is not changed keeps its master. If only data is cut, the parameters are
        the model's own. Under tp, pp and ep they are whole copies on every rank, also of the parameters that other
        stages hold. Contexts may be nested.

        Args:
            which: Names, parameters, modules, or several of them; None for all. Under pp only names.
            write: True if the parameters may be edited, alike on all ranks.
            from_rank: Rank whose edits reach all ranks; the edits of other ranks are dropped.

        Raises:
            UsageError: if the parameters do not fit the free memory (the error names their bytes), for names that the
                model
                does not have, for edits without ``write``, and for edits that differ between ranks without
                ``from_rank``.
        """
        self._held.check("full_parameters", reads_weights_alone=not write and from_rank is None)
        opened = state.full_parameters(self._parts, which, write, from_rank)
        return within(self.clock, "engine.full_parameters()", opened)

    @named
    def full_tensor(self, name: str, of: str = "master") -> Tensor | None:
        """Return a whole tensor of one parameter, as a copy on every rank. Collective.

        No other tensor is gathered.

        Args:
            name: Name of the parameter.
            of: ``parameter`` (in the compute dtype), ``master`` (the tensor that the optimizer updates), ``gradient``
                (the mean before clipping, after the last backward pass of a step and before ``step()``), or a moment of
                the optimizer by torch's name (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``).

        Returns:
            The tensor; None for state of a frozen parameter, and for the gradient of a parameter that no rank used.

        Raises:
            UsageError: for an unknown name or moment, and for gradients if ``gradients`` would raise.
        """
        self._held.away.check("full_tensor")
        return single_tensors.full_tensor(self._parts, name, of)

    @named
    def set_full_tensor(self, name: str, value: Tensor, of: str = "master") -> None:
        """Write the tensor that ``full_tensor`` returns, from the same whole ``value`` on all ranks. Collective.

        A master is rounded into its weight; a parameter is written as its master is. A gradient counts in this step's
        norm, and its parameter counts as used.

        Args:
            name: Name of the parameter.
            value: The whole tensor, equal on all ranks.
            of: The tensor to write, as in ``full_tensor``.

        Raises:
            UsageError: for another shape, for values that differ between ranks, and for a frozen parameter's gradient
                or
                moments.
        """
        self._held.away.check("set_full_tensor")
        single_tensors.set_full_tensor(self._parts, name, value, of)
        self._forget_check(of)

    def local_tensor(self, name: str, of: str = "master") -> Tensor | None:
        """Return this rank's own elements of the tensor that ``full_tensor`` returns, as a flat copy; possibly empty.

        With ``offload.step: delayed`` the elements of a master or a moment are the result of the update that is in
        flight, while ``full_tensor`` first makes that update count.

        Args:
            name: Name of the parameter.
            of: The tensor to read, as in ``full_tensor``.

        Returns:
            The elements; None if this rank holds no part of the parameter because another stage of a pipeline does, and
            if
            ``full_tensor`` returns None.
        """
        self._held.away.check("local_tensor")
        return single_tensors.local_tensor(self._parts, name, of)

    def set_local_tensor(self, name: str, value: Tensor, of: str = "master") -> None:
        """Write this rank's own elements of the tensor that ``local_tensor`` reads. Collective.

        Ranks that own the same elements (stage 0, replicas) must pass the same values.

        Args:
            name: Name of the parameter.
            value: This rank's elements, flat.
            of: The tensor to write, as in ``full_tensor``.
        """
        self._held.away.check("set_local_tensor")
        single_tensors.set_local_tensor(self._parts, name, value, of)
        self._forget_check(of)

    def _forget_check(self, of: str) -> None:
        """Drop the comparison with the uncut model if the user edits state in the middle of a step.

        Gradients, and weights in the middle of a step, are then no longer those of the uncut model.
        """
        if self._parts.accumulation.passes and of in ("gradient", "master", "parameter"):
            self._record.check = None

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context that gathers the weights of this rank once for many passes without gradients. Collective.

        Slices and stages stay cut, so the context takes 1/(tp·pp) of the memory of ``full_parameters``.

        Raises:
            UsageError: if the weights do not fit the free memory; the error names their bytes.
        """
        self._held.check("gathered", reads_weights_alone=True)
        return within(self.clock, "engine.gathered()", state.summoned_parameters(self._parts))

    @together
    def state_dict(self, trained_only: bool = False) -> dict[str, Tensor]:
        """Return the whole model on the CPU of every rank, under the model's own names. Collective.

        Tied parameters stand under each of their names. The memory of one Unit is needed beside the result. For a model
        that does not fit use ``mapped_state_dict``, ``full_tensor`` or ``save``.

        Args:
            trained_only: True for only the parameters that train, such as the adapters of a frozen base.

        Raises:
            UsageError: if the model does not fit the host's free memory; the error names its bytes.
        """
        self._held.away.check("state_dict", reads_weights_alone=True)
        self._held.known.check("state_dict")
        return state.state_dict(self._parts, trained_only)

    @together
    def mapped_state_dict(
        self, folder: str | Path, trained_only: bool = False, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return the whole model as tensors that map a file, for a model larger than memory. Collective.

        Args:
            folder: A folder with room for the file. The file's name is removed at once, its bytes with the last tensor.
            trained_only: True for only the parameters that train.
            dtype: The dtype of tensors that hold fractions (default: their own).

        Returns:
            On rank 0 the tensors by name, which may be read but not written; an empty dict on other ranks.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        self._held.away.check("mapped_state_dict", reads_weights_alone=True)
        self._held.known.check("mapped_state_dict")
        return mapped_state.mapped_state_dict(self._parts, Path(folder), trained_only, dtype)

    @together
    def load_state_dict(self, tensors: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load weights and buffers from whole tensors under the model's own names. Collective.

        Masters take the values in their own dtype; the optimizer's moments stay.

        Args:
            tensors: Whole tensors by name, the same on all ranks.
            strict: If False, parameters that are not among the names stay as they are.

        Raises:
            MismatchError: if names or shapes are those of another model.
        """
        self._held.away.check("load_state_dict")
        state.load_state_dict(self._parts, tensors, strict)

    @together
    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Save the whole model as a folder that transformers opens, from any mesh and stage. Collective.

        The model must have its own ``save_pretrained``. Rank 0 calls that method with the whole state, which is mapped
        from a file instead of held in memory.

        Args:
            folder: The folder to write.
            **options: Passed to the model's method (``max_shard_size``: the most bytes in memory at a time).
        """
        self._held.away.check("save_pretrained", reads_weights_alone=True)
        self._held.known.check("save_pretrained")
        views.save_pretrained(self._parts, folder, options)

    def __repr__(self) -> str:
        """Return the mesh and the model in a few lines; ``print(engine.plan)`` shows the whole Plan."""
        return views.in_words(self._parts)
