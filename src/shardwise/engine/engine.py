"""The engine: a model, its shards and its optimizer, behind five calls.

    engine = shardwise.initialize(model, config="run.yaml")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()                # ends a microbatch; updates after the last one of a step
    engine.save("checkpoints")

``train_step(batches)`` runs all microbatches of one optimizer step and is the only way on meshes with a pipeline.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Clock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.data.adopt import Collate
from shardwise.data.evaluation import Weighted
from shardwise.data.loader import Loader
from shardwise.data.passes import Passes
from shardwise.engine import metrics, single_tensors, state, views
from shardwise.engine.accumulation import Accumulation
from shardwise.engine.alike import check_alike, loss_tolerance
from shardwise.engine.check import Check
from shardwise.engine.forward import Forward
from shardwise.engine.held import Held
from shardwise.engine.inputs import Loss, find_loss
from shardwise.engine.loaders import Loaders
from shardwise.engine.monitor import Monitor
from shardwise.engine.nonfinite import origin
from shardwise.engine.original import Original
from shardwise.engine.parts import Parts
from shardwise.engine.pipeline import Pipeline
from shardwise.engine.plain_backward import PlainBackward
from shardwise.engine.prefetch import Prefetcher, PrefetcherMaker
from shardwise.engine.record import StepInputs
from shardwise.engine.saves import Saves
from shardwise.engine.step import Local, StepEnd, StepResult, Totals, Update, gradient_norm
from shardwise.engine.weighing import Weighing
from shardwise.observe.lanes_picture import Lanes
from shardwise.observe.module_profile import ModuleTree
from shardwise.optim.clip import clip_factor
from shardwise.optim.groups import mark_of
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.rows import Tally
from shardwise.plan.action import Action
from shardwise.plan.errors import CommError, NonFiniteError, UsageError
from shardwise.plan.plan import Plan
from shardwise.plan.timeline import Timeline
from shardwise.plan.trace import Trace

_log = logging.getLogger(__name__)

OnStep = Callable[["Engine", StepResult], None]


def _is_update(action: Action) -> bool:
    return action.kind.updates


@dataclass
class _Stop:
    """A request to stop: this rank's, and what all ranks knew after the last step."""

    wanted: bool = False
    seen: bool = False


class Engine:
    """See the module's docstring. Made by ``shardwise.initialize``."""

    def __init__(
        self,
        parts: Parts,
        original: Original,
        loss: Loss | None,
        on_step: Sequence[OnStep],
        end: StepEnd,
        pipeline: Pipeline | None = None,
        check: Check | None = None,
    ):
        self.on_step: list[OnStep] = list(on_step)
        """Called with (engine, result) after every optimizer step."""
        self._parts = parts
        self._end = end
        self._pipeline = pipeline
        self.weighing = Weighing(parts.config.batch.weigh_by, parts.model)
        """What microbatches count where nothing is said."""
        self._record = StepInputs(check, parts.world.size > 1)
        self._forward = Forward(parts, loss, pipeline, self._record, self.weighing, self._discard_on_error)
        self._loss_tolerance = loss_tolerance(parts, parts.config)
        self._prefetcher = PrefetcherMaker(parts, self.on_step)
        self._held = Held(parts, original, self.close, self._record.before_pass)
        self._loaders = Loaders(parts.config, parts.dp, parts.accumulation.microbatches)
        self._saves = Saves(parts, self._loaders)
        self.monitor = Monitor(parts.config, parts.world.rank == 0, parts.device)
        """Where numbers go after every step."""
        self._stop = _Stop()
        self._plain: PlainBackward | None = None

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
    def _accumulation(self) -> Accumulation:
        return self._parts.accumulation

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
    def not_loaded(self) -> list[str]:
        """Names that the last ``load`` left as they start (``missing``)."""
        return self._saves.not_loaded

    @property
    def is_closed(self) -> bool:
        """After ``close``."""
        return self._held.is_over

    # Training --------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``engine(batch)``: the loss of a microbatch, from the user's loss function or from the model itself.

        Any other arguments go to the model as they are. Floating inputs are cast to the compute dtype.
        """
        return self._forward.loss(args, kwargs)

    def backward(self, loss: Tensor, weight: float | None = None, retain_graph: bool = False) -> None:
        """Accumulate the gradients of one microbatch.

        ``weight``: how much it counts (tokens, samples). Left out, it is the number of labels that a cross entropy in
        ``loss`` is the mean of, so that ignored labels (-100) and short batches need no word; without one, microbatches
        count alike (``batch.weigh_by``). A rank without data runs any batch with weight 0.
        Errors: UsageError where ``loss`` is not one number.
        """
        step, parts = self._accumulation, self._parts
        self._held.check("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"backward: expected a loss of one number, given {shape}; take its mean or sum")
        if not loss.requires_grad:
            raise UsageError(
                "backward: the loss has no graph: it was computed under torch.no_grad(), detached, or from nothing "
                "that trains; return the tensor that the model computed (a rank without data runs any batch with "
                "weight 0)"
            )
        weight, scale = self._enter_backward(
            weight, lambda: self.weighing.of_loss(loss, self._record.batch(step.passes))
        )
        # After an error half of the gradients may have landed; the next step may not start from them.
        with self._discard_on_error(), parts.passes.profile.backward():
            parts.hooks[0].run_backward(
                lambda: loss.backward(torch.full_like(loss, scale), retain_graph=retain_graph)
            )
        self._leave_backward(loss, weight)

    def adopt_backward(self) -> None:
        """From here on ``loss.backward()`` is ``engine.backward(loss, weight=1)``, for scripts that call it themselves.

        Gradients of any tensor that the model returned will do. Errors: UsageError with mesh.pp above 1.
        """
        if self._pipeline is not None:
            raise UsageError(
                "adopt_backward: with mesh.pp above 1 train_step(batches) runs the backward passes"
            )
        if self._plain is None:
            parts = self._parts
            self._plain = PlainBackward(
                parts.model,
                parts.hooks[0],
                lambda: self._enter_backward(1.0, lambda: 1.0)[1],
                self._end_plain_backward,
            )

    def _end_plain_backward(self) -> None:
        self._parts.hooks[0].end_backward()
        self._leave_backward(None, 1.0)

    def _enter_backward(self, weight: float | None, found: Callable[[], float]) -> tuple[float, float]:
        """A backward pass begins: (what it counts, what its loss is multiplied by)."""
        step, parts = self._accumulation, self._parts
        if step.is_summed:
            raise UsageError(
                "backward: engine.gradients() has summed up the gradients of this step; call engine.step() first"
            )
        if step.passes == 0:
            parts.clock.step = self.step_count + 1
        weight = step.weight_of(None if weight is None else float(weight), found)
        parts.passes.own_use.end()
        scale = step.scale_of(weight)
        hooks = parts.hooks[0]
        hooks.recover()
        is_last = step.is_last_backward
        parts.program.follow(
            step.passes + step.left if step.is_last else max(parts.program.microbatches, step.passes + 2)
        )
        hooks.begin_backward(last=is_last)
        return weight, scale

    def _leave_backward(self, loss: Tensor | None, weight: float) -> None:
        """It has run."""
        self._parts.hooks[0].marks.set()
        self._record.counts(weight)
        if loss is None:
            self._record.check = None  # there is no loss to compare
        elif self.check is not None:
            self.check.counts(loss, weight)
        self._accumulation.count(loss, weight)

    def step(self, weight: float | None = None) -> StepResult | None:
        """End a microbatch. After the last one of a step: update the weights; else return None.

        Losses of several ``backward`` calls since the last ``step()`` add up. ``weight``: what sums of gradients and
        losses are divided by on this rank, in place of the weights of its microbatches, for losses that are parts of a
        fixed number.
        Errors: UsageError where there was none, and inside ``no_sync``.
        """
        parts, end, step = self._parts, self._end, self._accumulation
        if step.backwards == 0:
            raise UsageError(
                "step: there was no backward since the last step; call engine.backward(loss) first"
            )
        if step.holds_back:
            raise UsageError(
                "step: inside engine.no_sync(), where no backward is the last one; call it outside"
            )
        if not step.is_last:
            self._record.end_microbatch(step.microbatches)
            step.end_microbatch()
            return None
        with self._discard_on_error():
            views.end_passes(parts)
            for hooks in parts.hooks:
                hooks.marks.clear(at_step=True)
            rates = parts.optimizer_groups.rates(self.applied_steps)
            end.local = Local(
                step.weight if weight is None else weight,
                float(step.loss),
                float(self._stop.wanted),
                mark_of(rates),
                self._record.fingerprint,
            )
            parts.walker.run(until=_is_update)  # DELIVER, SUM and NORM
            totals = end.totals
            assert totals is not None, "NORM has run"
            divisor = step.divisor_of(totals.weight)
            norm = gradient_norm(totals, divisor)
            finite = math.isfinite(norm)
            check_alike(totals, self.config.batch.duplicates, finite, self._loss_tolerance)
            if self.check is not None and finite and totals.weight and not math.isnan(totals.loss):
                self.check.compare(self.step_count + 1, totals, divisor)
                self._record.check = None
        self._record.compared()
        applies = finite and not math.isnan(totals.loss)
        if not applies:
            self._allow_skip(finite)
        lr = float(rates[0]["lr"])
        if applies and totals.weight:
            factor = parts.optimizer_groups.tables_factor(self.applied_steps)
            end.update = Update(divisor / clip_factor(norm, self.config.max_grad_norm), rates, factor)
            parts.walker.run()  # STEP, and UNSHARD of what was updated in pieces
            for hooks in parts.hooks:
                hooks.windows.finish_updates()
        else:
            parts.walker.skip_rest()
            parts.tables.drop()
        if applies:
            parts.progress.applied_steps += 1
            parts.optimizer_groups.note_step()
        parts.progress.skipped_in_a_row = 0 if applies else parts.progress.skipped_in_a_row + 1
        if parts.loss_scale is not None:
            parts.loss_scale.update(finite)
        if totals.orders_agree:
            parts.program.adopt_order()
        self._stop.seen = totals.flags > 0
        return self._close_step(totals, norm, lr, skipped=not applies)

    def train_step(self, batches: Sequence[Any], weights: Sequence[float] | None = None) -> StepResult:
        """All microbatches of one optimizer step. ``weights``: as ``backward``'s, one per microbatch.

        With mesh.pp above 1 all ranks that share a model bring the same batches. Of a list of layers (``Layers``,
        without ``initialize(loss=...)``) the first stage reads ``inputs`` and the last one ``targets``, and a rank may
        bring None for what it does not read: ``(inputs, None)``, ``(None, targets)``, None.

        Errors: UsageError where the number of batches is not the accumulation, in the middle of a step, and where a
        stage lacks what it reads.
        """
        self._held.check("train_step")
        batches, wanted = list(batches), self._accumulation.microbatches
        if len(batches) != wanted:
            raise UsageError(
                f"train_step: given {len(batches)} microbatches; the configuration makes {wanted} of them one "
                "optimizer step (batch.global_size / (micro_size × data-parallel ranks)), unless "
                "engine.set_accumulation(n) says otherwise"
            )
        self._check_whole_step("train_step")
        if weights is not None and len(weights) != len(batches):
            raise UsageError(f"train_step: given {len(batches)} microbatches but {len(weights)} weights")
        if self._pipeline is not None:
            with self._discard_on_error():
                is_whole = self._pipeline.accumulate(batches, weights, self.weighing, self.check)
            # Ranks that bring parts of batches cannot be compared by them.
            for i, batch in enumerate(batches if is_whole else ()):
                self._record.counts(None if weights is None else weights[i], [batch])
            self._record.passes = {i: ((batch,), {}) for i, batch in enumerate(batches)}
            result = self.step()
            assert result is not None, "the last microbatch ends the step"
            return result
        self._check_between_steps("train_step")
        result = None
        with self._discard_on_error():
            for i, batch in enumerate(batches):
                loss = find_loss(self(batch))
                self.backward(loss, None if weights is None else weights[i])
                result = self.step()
        assert result is not None, "the last microbatch ends the step"
        return result

    # Where a step ends -----------------------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """Microbatches of a step."""
        return self._accumulation.microbatches

    @property
    def open_microbatches(self) -> int:
        """Microbatches of the running step that ``step()`` has ended."""
        return self._accumulation.done

    @property
    def open_backwards(self) -> int:
        """Backward passes since the last ``step()``."""
        return self._accumulation.backwards

    def set_accumulation(self, microbatches: int) -> None:
        """From the next step on, as many microbatches make one: another global batch. Collective, between two steps.

        Loaders of the engine deal by it; a position counts samples, and stays. ``engine.config`` keeps what was
        configured, and so begins a run that is resumed.
        Errors: UsageError where the ranks say unlike numbers, and in the middle of a step; DataError where a loader's
        data holds less than a step.
        """
        self._held.check("set_accumulation")
        self._check_between_steps("set_accumulation")
        if not metrics.are_alike(self._parts, int(microbatches)):
            raise UsageError(
                f"set_accumulation: {microbatches} microbatches here, another number on other ranks; all ranks must "
                "say the same"
            )
        if microbatches < 1:
            raise UsageError(f"set_accumulation: expected at least 1 microbatch, given {microbatches}")
        self._loaders.set_accumulation(int(microbatches))
        self._parts.program.begin(int(microbatches))
        self._accumulation.microbatches = int(microbatches)
        self._accumulation.per_microbatch = 1

    @property
    def is_boundary(self) -> bool:
        """Whether the running microbatch is the last one of its step: ``step()`` will update."""
        return self._accumulation.is_last

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Say yourself whether the running microbatch, and all that follow, end a step; None counts them again.

        Say it before the microbatch's backward pass, on all ranks alike: afterwards it is as exact, but the reduction
        of gradients does not overlap with the backward pass.
        Errors: UsageError with mesh.pp above 1, where ``train_step`` has the whole step.
        """
        self._held.check("set_boundary")
        if self._pipeline is not None and is_boundary is not None:
            raise UsageError(
                "set_boundary: with mesh.pp above 1 train_step(batches) runs all microbatches of a step; say how many "
                "with engine.set_accumulation(n)"
            )
        self._accumulation.boundary = None if is_boundary is None else bool(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which no backward pass is the last of its step, for more of them follow before ``step()``.

        Where gradients stay whole between microbatches (stages 0 and 1) none travel inside. What is computed inside
        adds up with what follows up to the next ``step()``: one microbatch.
        Errors: UsageError for ``step()`` inside.
        """
        before, self._accumulation.holds_back = self._accumulation.holds_back, True
        try:
            yield
        finally:
            self._accumulation.holds_back = before

    def _check_between_steps(self, call: str) -> None:
        if self._accumulation.passes:
            raise UsageError(
                f"{call}: {self._accumulation.passes} backward passes of a step have run already (or were interrupted, "
                "by Ctrl-C?); call engine.step() to its end, or engine.discard() on all ranks"
            )

    def _check_whole_step(self, call: str) -> None:
        step = self._accumulation
        if step.boundary is not None or step.holds_back:
            raise UsageError(
                f"{call}: it runs all microbatches of a step, but the caller says where one ends; call "
                "engine.set_boundary(None), and leave engine.no_sync()"
            )

    def prefetch(
        self, steps: Iterable[Any] | Loader, depth: int | None = None, lanes: Lanes | None = None
    ) -> Prefetcher:
        """The same steps, each a list of microbatches, with the keys of embedding tables found and exchanged
        ``depth`` steps (default: ``tables.prefetch_steps``) before they are computed, in a thread of its own.

        Results do not change by a bit. Every rank brings the same number of steps. A ``Loader`` is asked for its next
        steps, and its position is that of the step handed out last. Other iterables may yield any structure of
        batches, so also those of an evaluation. ``lanes`` records what ran when. Between accelerators (NCCL) nothing
        goes ahead.
        """
        return self._prefetcher.over(steps, depth, lanes)

    def _close_step(self, totals: Totals, norm: float, lr: float, skipped: bool) -> StepResult:
        for bucket, _ in self._parts.trained:
            bucket.gradient.drop_gradients()
        self._parts.progress.step_count += 1
        loss = totals.loss / totals.weight if totals.weight else 0.0
        self._record.end_step()
        walker = self._parts.walker
        news = walker.trace.news(walker.last)
        result = StepResult(self.step_count, loss, norm, lr, totals.weight, skipped, news, self.skipped_steps)
        walker.close()
        for hooks in self._parts.hooks:
            hooks.end_step()
        self._parts.program.begin(self._accumulation.end_step())
        self._end.forget()
        self._parts.clock.step_ended()
        self._parts.passes.own_use.step_ended()
        self._parts.passes.profile.step_ended(self.step_count, walker.last)
        self.monitor.note(result, walker.last, self.loss_scale)
        for callback in self.on_step:
            callback(self, result)
        return result

    def _allow_skip(self, is_loss_alone: bool) -> None:
        """A step that is not finite is skipped while the loss scale can fall or the configuration says so; else it is
        the end. No scale helps a NaN loss of finite gradients (``is_loss_alone``), which would not move the weights in
        whatever is NaN, step after step."""
        scale, policy = self._parts.loss_scale, self.config.precision
        in_a_row = self._parts.progress.skipped_in_a_row
        can_fall = scale is not None and not scale.is_spent and not is_loss_alone
        if (can_fall or policy.nonfinite == "skip") and in_a_row < policy.max_skipped_steps:
            if not can_fall and self.is_main:
                what = "the loss is nan" if is_loss_alone else "gradients are not finite"
                text = "step %d is skipped: %s (%d in a row; precision.max_skipped_steps: %d)"
                _log.warning(text, self.step_count + 1, what, in_a_row + 1, policy.max_skipped_steps)
            return
        where = origin(self._parts, self._forward.again)
        self.discard()
        what = "gradients are not finite"
        if scale is not None:
            how = "at its minimum," if scale.is_spent and scale.policy.dynamic else "at"
            what = f"gradients are not finite, and the loss scale is {how} {scale.scale}"
        if is_loss_alone:
            what = "the loss is nan while every gradient is finite, so what is nan in it trains no weight"
        if in_a_row:
            what += f", after {in_a_row} steps in a row that were skipped"
        raise NonFiniteError(
            f"step {self.step_count + 1}: {what}; {where}. The weights are those of step {self.step_count}. "
            "Look at the data of this step, lower the learning rate, clip gradients, or widen precision.compute"
        )

    # Evaluation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Any, float | None]]) -> float:
        """Mean loss over (batch, weight) pairs of all ranks, without gradients and in ``eval`` mode.

        A weight of None stands for the labels of the batch that are counted, as in training, or 1 where it has none.
        Every rank brings the same number of pairs; a rank that ran out of data repeats any batch with weight 0.
        """
        was_training = self.module.training
        self.eval()
        try:
            return self._forward.mean_loss(batches)
        finally:
            self.train(was_training)

    @torch.no_grad()
    def predict(
        self,
        batches: Sequence[Any],
        call: Callable[[nn.Module, Any], Any] | None = None,
        everywhere: bool = True,
    ) -> list[Any]:
        """What the model returns for each batch, on any mesh and on every rank that shares the model; without gradients
        and in the mode that the model is in. With a pipeline the batches follow one another through the stages.

        ``call``: function of (model, batch) that is asked in place of the model. ``everywhere=False``: with a pipeline
        the last stage alone gets the list, and the others an empty one.
        """
        return self._forward.predict(batches, call, everywhere)

    def run(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call another method of the model than ``forward`` (by name), or a function of it, as one forward pass.

        The weights outside the repeated blocks are there while it runs, and gradients flow as after ``engine(batch)``.
        ``engine.run("generate", tokens, max_new_tokens=20)`` gives the tokens of one process on every rank of any mesh
        without a pipeline. Under sequence parallelism its result may not ask for gradients: where the cut of the
        sequence begins and ends is known of the model's own forward alone.
        """
        return self._forward.run(method, args, kwargs)

    def log_probs(self, batch: Any, targets: Tensor) -> Tensor:
        """Log-probability of ``targets`` [B, T] under the model, each from the logits at its place: [B, T], with
        gradients outside of ``torch.no_grad()``. 0 where a target is -100; fp32, or fp64 for an fp64 model.

        ``batch`` is what the model is called with, without labels. ``logits[:, t]`` are about what follows token t, so
        for a causal model: ``engine.log_probs({"input_ids": tokens[:, :-1]}, tokens[:, 1:])``. Under tensor parallelism
        a causal model of transformers never makes the whole logits for it. For distillation and other uses of whole
        logits call the model without labels.

            loss = -(advantage * engine.log_probs({"input_ids": tokens[:, :-1]}, tokens[:, 1:])).mean()
            engine.backward(loss)

        Errors: UsageError with mesh.pp above 1, and where the model gives no logits of that shape.
        """
        return self._forward.log_probs(batch, targets)

    # Looking at the state --------------------------------------------------------------------------------------

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
        return self._accumulation.reference

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

    def table_tallies(self) -> dict[str, Tally]:
        """Rows in use, inserted and evicted of each embedding table, over all ranks. Collective."""
        return self._parts.tables.tallies()

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients by name after the last backward of a step and before ``step()``: means, as the optimizer
        sees them before clipping. Collective; parameters that no rank used are left out."""
        return views.gradients(self._parts)

    def full_parameters(
        self, which: state.Which = None, write: bool = False, from_rank: int | None = None
    ) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """A context in which parameters are whole on every rank, by name: all, or of ``which`` and no others (names,
        parameters, modules, or several of them). Collective: every rank enters, and says the same.

        With ``write`` they may be edited, alike on all ranks; with ``from_rank`` that rank's edits are everybody's, and
        other ranks' are dropped. Edits reach weights and masters, so that the next step goes on from them; an element
        that stays as it was keeps its master. Without a pipeline they are the model's own parameters; under tp and pp
        whole copies of them on every rank, also of what other stages hold, which are named (pp: by names alone).
        Contexts may lie one in another.
        Errors: UsageError for names that the model has not, for edits without ``write``, and for edits that differ
        between ranks without ``from_rank``.
        """
        self._held.check("full_parameters")
        return state.full_parameters(self._parts, which, write, from_rank)

    def full_tensor(self, name: str, of: str = "master") -> Tensor | None:
        """What belongs to one parameter, whole, a copy on every rank; nothing else is gathered. Collective.

        ``of``: ``parameter`` (in the compute dtype), ``master`` (what the optimizer updates), ``gradient`` (the mean
        before clipping, after the last backward of a step and before ``step()``), or a moment of the optimizer by
        torch's name (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``). None where there is none: of a frozen
        parameter, or a gradient of one that no rank used.
        Errors: UsageError for an unknown name or moment; as ``gradients`` for gradients.
        """
        return single_tensors.full_tensor(self._parts, name, of)

    def set_full_tensor(self, name: str, value: Tensor, of: str = "master") -> None:
        """Write what ``full_tensor`` reads, from the same whole ``value`` on all ranks. Collective.

        A master is rounded into its weight; a parameter is written as its master is. A gradient counts in this step's
        norm, and as used.
        Errors: UsageError for another shape, for values that differ between ranks, and for a frozen parameter's
        gradient or moments.
        """
        single_tensors.set_full_tensor(self._parts, name, value, of)
        self._forget_check(of)

    def local_tensor(self, name: str, of: str = "master") -> Tensor | None:
        """This rank's own elements of what ``full_tensor`` gives, flat, a copy; they may be none. None where this rank
        holds no part of the parameter, on another stage of a pipeline, and as there."""
        return single_tensors.local_tensor(self._parts, name, of)

    def set_local_tensor(self, name: str, value: Tensor, of: str = "master") -> None:
        """Write what ``local_tensor`` reads: each rank its own elements. Collective. Ranks that own the same elements
        (stage 0, replicas) bring the same values."""
        single_tensors.set_local_tensor(self._parts, name, value, of)
        self._forget_check(of)

    def _forget_check(self, of: str) -> None:
        """Gradients are not those of the uncut model any more, nor are weights in the middle of a step."""
        if self._accumulation.passes and of in ("gradient", "master", "parameter"):
            self._record.check = None

    def gathered(self) -> AbstractContextManager[None]:
        """A context for many passes without gradients: the weights that this rank computes with are gathered once.
        Collective; slices and stages stay cut, so that it takes 1/(tp·pp) of what ``full_parameters`` takes."""
        self._held.check("gathered")
        return state.summoned_parameters(self._parts)

    def state_dict(self, trained_only: bool = False) -> dict[str, Tensor]:
        """The whole model on the CPU, under the model's own names (tied names both). Collective.

        ``trained_only``: of the parameters that train and nothing else, such as the adapters of a frozen base.
        """
        return state.state_dict(self._parts, trained_only)

    def load_state_dict(self, tensors: Mapping[str, Tensor], strict: bool = True) -> None:
        """Weights and buffers from whole tensors under the model's own names, the same on all ranks. Collective.

        Masters take them in their own dtype; the optimizer's moments stay. Parameters that are not among the names
        stay too where ``strict`` is false.
        Errors: MismatchError where names or shapes are those of another model.
        """
        state.load_state_dict(self._parts, tensors, strict)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """The whole model as a folder that transformers opens, from any mesh and stage. Collective.

        For models with a ``save_pretrained`` of their own, which the first rank calls with the whole state;
        ``options`` go to it.
        """
        views.save_pretrained(self._parts, folder, options)

    def train(self, mode: bool = True) -> "Engine":
        """The model's training mode."""
        self.module.train(mode)
        for stage in self._parts.stages:
            stage.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """The model's evaluation mode."""
        return self.train(False)

    # Stopping together -----------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask all ranks to stop after the running step; safe in a signal handler."""
        self._stop.wanted = True

    @property
    def stop_requested(self) -> bool:
        """True on all ranks alike after the step in which any rank had called ``request_stop``."""
        return self._stop.seen

    def agree(self, flag: bool) -> bool:
        """True on all ranks where it is true on any. Collective."""
        return metrics.agree(self._parts, flag)

    # Data ------------------------------------------------------------------------------------------------------

    def loader(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        collate_fn: Collate | None = None,
        workers: int = 0,
        epochs: int | None = None,
    ) -> Passes:
        """This rank's share of a Dataset, a DataLoader or an IterableDataset: each ``for`` over it is one pass.

        Data-parallel ranks get different samples, the ranks of one model the same; the order is drawn from
        (train.seed, pass) and does not depend on the number of ranks. The position is saved and loaded with the
        engine, so a run goes on in the middle of a pass; make loaders in the same order in every run.

        ``batch_size``: samples per rank and forward pass; ``batch.micro_size`` or ``batch.global_size`` of the
        configuration win over it, and it over the DataLoader's own. Of a DataLoader its collate_fn, workers and
        shuffling are kept; one with a sampler of its own is read as a stream of batches, dealt to the ranks.
        ``epochs`` ends a ``BatchedDataset`` after as many passes.
        Errors: ConfigError without a batch size or where it contradicts the configuration, DataError.
        """
        return self._loaders.make(data, batch_size, shuffle, collate_fn, workers, epochs)

    def evaluation_loader(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collate_fn: Collate | None = None,
        workers: int = 0,
    ) -> Iterator[Weighted]:
        """(batch, samples that count) pairs for one ``engine.evaluate``, or a loop with ``engine.gather_metrics``.

        Every sample once over all ranks, in order. Every rank gets as many pairs; in one that fills up, 0 count."""
        return self._loaders.for_evaluation(data, batch_size, collate_fn, workers)

    # Around a loop ---------------------------------------------------------------------------------------------

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

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` on rank 0 alone."""
        if self.is_main:
            print(*values, **options)

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        self.agree(False)

    def gather_metrics(self, *values: Tensor, samples: int | None = None) -> Any:
        """The rows of a tensor from all data-parallel ranks, in their order, on every rank: [B, ...] -> [ΣB, ...].

        Ranks may bring unlike numbers of rows, and none; a number [] counts as one row. ``samples``: how many of the
        rows count, as ``evaluation_loader`` says; what only fills up is left out. Several tensors give a tuple.
        Collective. Errors: UsageError where there are fewer rows than ``samples``.
        """
        found = tuple(metrics.gather_rows(self._parts.dp, self.device, value, samples) for value in values)
        return found[0] if len(found) == 1 else found

    def __repr__(self) -> str:
        """The mesh and the model in a few lines; ``print(engine.plan)`` shows the whole Plan."""
        return views.in_words(self._parts)

    # Saving ----------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        trainer: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool | None = None,
        texts: Mapping[str, str] | None = None,
        score: float | None = None,
        higher_is_better: bool = False,
    ) -> None:
        """Save a step under ``directory``. Collective. Returns when the state is copied to host memory and writes on
        behind training, unless ``asynchronous`` (default: ``checkpoint.asynchronous``) is false.

        ``trainer``: JSON data of the user's, which ``load`` returns; ``texts``: small files to go along. ``score``:
        what an evaluation of this step gave, equal on all ranks; the step with the best one so far (``best``) is kept
        whatever ``checkpoint.keep_last`` says, also after a resume.
        Errors: CheckpointError where `checkpoint.tolerate_failures` saves and one more failed in a row.
        """
        self._saves.save(directory, trainer, score, higher_is_better, asynchronous=asynchronous, texts=texts)

    def is_best(self, score: float, higher_is_better: bool = False) -> bool:
        """Whether ``score`` is better than that of every step saved with one so far; NaN never is."""
        return self._saves.is_best(score, higher_is_better)

    def load(
        self,
        directory: str | Path,
        weights_only: bool = False,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
    ) -> dict[str, Any] | None:
        """Load a step, or the newest whole one of a folder, whatever layout saved it. Collective.

        ``missing``: patterns of names (``head.*``, ``tables.user``; ``*`` stands for anything) of weights, buffers and
        embedding tables that the step may lack or hold in another shape. They stay as they start, their optimizer
        state is fresh, and all else is restored exactly; of a table that only grew, the first rows load.
        ``unexpected``: patterns of names that the step may hold and the model lacks. A warning lists both, and
        ``not_loaded`` the first.

        Returns what ``save`` got as ``trainer``; None where the folder holds no step.
        Errors: MismatchError names the first tensors that differ, or a pattern that matches nothing; DamagedError the
        damaged file and tensor.
        """
        return self._saves.load(directory, weights_only, missing, unexpected)

    def wait_for_save(self) -> None:
        """Return when a save that runs behind training is committed; raises what went wrong with it."""
        self._parts.folders.wait()

    def close(self, whole: bool = True) -> None:
        """Finish what runs behind training and give the model back as it came: without hooks, its own dropout, forward
        passes and dtypes, and its weights whole again, as precise as the masters that the optimizer updated. It trains
        on in plain torch, and ``initialize`` takes it again.

        Collective where weights or masters lie in pieces (stage 3; stages 1 and 2 with masters of a wider dtype than
        the weights): every rank gathers them. ``whole=False`` leaves the weights as they lie, for a model that is not
        used any more, and so does an exception on its way through (``finally: engine.close()``), for other ranks may
        not come. Under tp and pp a rank keeps its own part of the model either way. A second call does nothing.
        """
        if self.is_closed:
            return
        self.wait_for_save()
        if self._accumulation.passes:  # its gradients would stay on the model
            self.discard()
        self._record.close()
        if self._plain is not None:
            self._plain.remove()
        self.monitor.close()
        self._held.give_back(whole and sys.exc_info()[0] is None)
        if self.world.ends_with_engine:
            self.world.release()

    @contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        """After an exception inside, the engine stands between two steps again."""
        try:
            yield
        except CommError:
            raise  # a collective in flight would wait for the lost rank once more
        except Exception:
            self.discard()
            raise

    def discard(self) -> None:
        """Drop the microbatches of this step and their gradients, as ``zero_grad()`` does in a plain loop; all ranks
        alike."""
        self._parts.passes.own_use.end()
        for hooks in self._parts.hooks:
            hooks.abandon()
        self._parts.program.begin(self._parts.program.microbatches)
        self._end.forget()
        self._parts.tables.drop()
        self._accumulation.clear()
        self._record.discard()
