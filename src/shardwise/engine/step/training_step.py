"""The training step as a caller drives it: backward passes, the end of a step, and the work after its update.

    backward ... step()      one microbatch; the last one of a step runs the end of the Plan's list (engine/step/end.py)
    train_step(batches)      all microbatches of a step; the only way with a pipeline
    accumulation             the number of microbatches of a step, or a boundary that the caller sets

After an exception in one of these calls the engine stands between two steps again (``StepDiscard``).
"""

import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.base.errors import CommError, NonFiniteError, UsageError
from shardwise.engine.parts import metrics
from shardwise.engine.parts.accumulation import Accumulation
from shardwise.engine.parts.inputs import find_loss
from shardwise.engine.parts.out_of_memory import in_a_step, is_out_of_memory
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.parts.sums import Number, filled_like
from shardwise.engine.parts.weighing import MicrobatchWeights
from shardwise.engine.state import state
from shardwise.engine.state.loaders import EngineLoaders
from shardwise.engine.step.alike import check_alike, loss_tolerance
from shardwise.engine.step.end import (
    LocalTotals,
    StepEndHandlers,
    StepResult,
    StepTotals,
    UpdateDecision,
    gradient_norm,
)
from shardwise.engine.step.forward import ForwardRunner
from shardwise.engine.step.last_pass import end_passes
from shardwise.engine.step.nonfinite import origin
from shardwise.engine.step.pipeline import PipelineRunner
from shardwise.engine.step.plain_backward import PlainBackward
from shardwise.engine.step.record import StepInputs
from shardwise.engine.step.scaled import check_unscaled
from shardwise.engine.step.unstepped import UnsteppedWarning
from shardwise.memory.pinned import check_copies
from shardwise.optim.clip import clip_factor
from shardwise.optim.groups import mark_of
from shardwise.parallel.embedding.step_keys import StepKeys
from shardwise.passes.recompute import told_again
from shardwise.plan.action import Action

_log = logging.getLogger(__name__)


def _is_update(action: Action) -> bool:
    return action.kind.updates


@dataclass
class StopRequest:
    """A request to stop the run: this rank's own, and the result of all ranks' requests after the last step."""

    wanted: bool = False
    seen: bool = False


class StepDiscard:
    """The discarding of one engine's running step."""

    def __init__(
        self, parts: EngineParts, end: StepEndHandlers, record: StepInputs, weighing: MicrobatchWeights
    ) -> None:
        self._parts = parts
        self._end = end
        self._record = record
        self._weighing = weighing

    def __call__(self) -> None:
        """Drop the microbatches of the running step and their gradients. Implements ``Engine.discard``."""
        # Slices must be given back before the hooks release weights, which changes the same parameters.
        for follower in self._parts.followers:
            follower.drop()
        self._parts.passes.replay.scale = 1.0  # a plain backward pass that failed leaves its scale behind
        for hooks in self._parts.hooks:
            hooks.abandon()
        self._parts.program.begin(self._parts.program.microbatches)
        self._end.forget()
        self._parts.accumulation.clear()
        self._weighing.take_guesses()
        self._record.discard()

    @contextmanager
    def on_error(self) -> Iterator[None]:
        """Discard the running step if the body raises, so that the engine stands between two steps again.

        Raises:
            OutOfMemoryError: in place of an allocator's error.
        """
        try:
            yield
        except CommError:
            raise  # a collective in flight would wait for the lost rank once more
        except Exception as error:
            told = in_a_step(self._parts, error) if is_out_of_memory(error) else None
            self()
            if told is None:
                raise
            raise told from None


class TrainingStep:
    """The training step of one engine: backward passes, the end of a step, and the update.

    Args:
        parts: The running parts of the engine.
        end: The handlers of the Actions that end a step.
        pipeline: The pipeline, or None if ``mesh.pp`` is 1.
        forward: Forward passes of the model.
        record: The record of the running step's inputs.
        weighing: Weights of microbatches for which the caller gives none.
        discard: Discards the running step.
        ended: Callback with the result of each step.
    """

    def __init__(
        self,
        parts: EngineParts,
        end: StepEndHandlers,
        pipeline: PipelineRunner | None,
        forward: ForwardRunner,
        record: StepInputs,
        weighing: MicrobatchWeights,
        discard: StepDiscard,
        ended: Callable[[StepResult], None],
    ) -> None:
        self._parts = parts
        self._end = end
        self._pipeline = pipeline
        self._forward = forward
        self._record = record
        self._weighing = weighing
        self._discard = discard
        self._ended = ended
        self._loss_tolerance = loss_tolerance(parts, parts.config)
        self._plain: PlainBackward | None = None
        self._has_told_of_nothing = False
        self._unstepped = UnsteppedWarning(parts.accumulation, parts.world.rank == 0)
        is_together = pipeline is None and parts.config.tables.prefetch_steps > 0
        self._keys = StepKeys([each.placed for each in parts.tables.collections.values() if is_together])
        self.stop = StopRequest()
        """Requests to stop, which the ranks exchange with the numbers of a step."""

    @property
    def _accumulation(self) -> Accumulation:
        return self._parts.accumulation

    @property
    def _number(self) -> int:
        """The number of the running step."""
        return self._parts.progress.step_count + 1

    # Backward passes -------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: float | None = None, retain_graph: bool = False) -> None:
        """Run the backward pass of a loss. Implements ``Engine.backward``."""
        step, parts = self._accumulation, self._parts
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"backward: expected a loss of one number, given {shape}; take its mean or sum")
        if not loss.requires_grad:
            raise UsageError(
                "backward: the loss has no graph: it was computed under torch.no_grad(), detached, or from nothing "
                "that trains; return the tensor that the model computed (a rank without data runs any batch with "
                "weight 0)"
            )
        if self._record.is_first_step and parts.config.batch.scaled_losses == "error":
            check_unscaled(loss, self._record.loss_node, step.microbatches)
        batch = self._record.batch(step.passes)
        counted, scale = self._enter_backward(
            None if weight is None else self._weighing.of_given(float(weight), batch),
            lambda: self._weighing.of_loss(loss, batch),
        )
        if self._record.check is not None:
            self._record.check.begins(loss)
        # After an error some gradients may have been added already; the next step must not start from them.
        scaled = parts.passes.replay.scaled(scale)
        with (
            self._discard.on_error(),
            parts.passes.backward(),
            scaled,
            told_again(parts.passes.replay),
        ):
            parts.hooks[0].run_backward(
                lambda: loss.backward(filled_like(loss, scale), retain_graph=retain_graph)
            )
        self._leave_backward(loss, counted, scale)

    def adopt_backward(self) -> None:
        """Count the script's own calls of ``loss.backward()``. Implements ``Engine.adopt_backward``."""
        if self._pipeline is not None:
            raise UsageError(
                "adopt_backward: with mesh.pp above 1 train_step(batches) runs the backward passes"
            )
        if self._plain is None:
            parts = self._parts
            self._plain = PlainBackward(
                parts.model,
                parts.hooks[0],
                self._begin_plain_backward,
                self._end_plain_backward,
            )

    def _begin_plain_backward(self) -> float:
        _, scale = self._enter_backward(1.0, lambda: 1.0)
        self._parts.passes.replay.scale = scale
        return float(scale)

    def _end_plain_backward(self) -> None:
        self._parts.passes.replay.scale = 1.0
        self._parts.hooks[0].end_backward()
        self._leave_backward(None, 1.0, 1.0)

    def _enter_backward(self, weight: float | None, found: Callable[[], Number]) -> tuple[Number, Number]:
        """Prepare the engine for a backward pass.

        Args:
            weight: The caller's weight of the microbatch, if any.
            found: Computes the weight if the caller gave none.

        Returns:
            (weight of the pass, factor by which its loss is multiplied).
        """
        step, parts = self._accumulation, self._parts
        if step.is_summed:
            raise UsageError(
                "backward: engine.gradients() has summed up the gradients of this step; call engine.step() first"
            )
        if step.passes == 0:
            parts.clock.step = self._number
        self._unstepped.watch()
        counted = step.weight_of(None if weight is None else float(weight), found)
        scale = step.scale_of(counted)
        for follower in parts.followers:
            follower.begin_backward(step.passes, counted)
        hooks = parts.hooks[0]
        hooks.recover()
        is_last = step.is_last_backward
        parts.program.follow(
            step.passes + step.left if step.is_last else max(parts.program.microbatches, step.passes + 2)
        )
        hooks.begin_backward(last=is_last)
        return counted, scale

    def _leave_backward(self, loss: Tensor | None, weight: Number, scale: Number) -> None:
        """Count a backward pass that has run."""
        self._parts.hooks[0].marks.set()
        self._record.counts(weight)
        if self._record.check is not None:
            if loss is None:
                self._record.check.ends_outside()
            else:
                self._record.check.counts(loss, float(weight), float(scale))
        self._accumulation.count(loss, weight)

    # The update ------------------------------------------------------------------------------------------------

    def step(self, weight: float | None = None) -> StepResult | None:
        """Count a microbatch, and update the weights if the step ends. Implements ``Engine.step``."""
        parts, end, step = self._parts, self._end, self._accumulation
        if step.backwards == 0:
            raise UsageError(
                "step: there was no backward since the last step; call engine.backward(loss) first"
            )
        if step.holds_back:
            raise UsageError(
                "step: inside engine.no_sync(), where no backward is the last one; call it outside"
            )
        check_copies()
        if not step.is_last:
            self._record.end_microbatch(step.microbatches)
            step.end_microbatch()
            return None
        with self._discard.on_error():
            rates = parts.optimizer_groups.rates(parts.progress.applied_steps)
            totals, divisor, norm = self._summed(step.weight if weight is None else weight, rates)
        self._record.compared()
        check_copies()  # the norm has been read, so the copies of all batches are over and may be forgotten
        finite = math.isfinite(norm)
        applies = finite and not math.isnan(totals.loss)
        if not applies:
            self._allow_skip(finite)
        if applies and not totals.weight:
            applies = False
            self._tell_of_nothing()
        if applies:
            factor = parts.optimizer_groups.tables_factor(parts.progress.applied_steps)
            clip = clip_factor(norm, parts.config.max_grad_norm)
            end.update = UpdateDecision(divisor / clip, rates, factor, parts.progress.applied_steps)
            parts.walker.run()  # STEP, and UNSHARD of what was updated in pieces
            self._finish_gathers()
            end.check_waits()
        else:
            parts.walker.end_with(parts.program.plan.own.skipped)
            self._finish_gathers()
        for follower in parts.followers:
            follower.end_step(applies)
        parts.progress.count(applies)
        if applies:
            parts.optimizer_groups.note_step()
        if parts.loss_scale is not None:
            parts.loss_scale.update(finite)
        if totals.orders_agree:
            parts.program.adopt_order()
        if self._pipeline is not None:
            self._pipeline.measured.follow()
        self.stop.seen = totals.flags > 0
        fields: dict[str, Any] = {}
        for follower in parts.followers:
            fields |= follower.results(totals.weight, divisor)
        return self._close_step(totals, norm, float(rates[0]["lr"]), not applies, fields)

    def _finish_gathers(self) -> None:
        for hooks in self._parts.hooks:
            hooks.windows.finish_updates()

    def _summed(self, weight: Number, rates: Sequence[Mapping[str, Any]]) -> tuple[StepTotals, float, float]:
        """Run the list up to its first update.

        Returns:
            (sums over all ranks, divisor of summed gradients, norm of the mean gradient).
        """
        parts, end = self._parts, self._end
        end_passes(parts)
        state.take_up_edits(parts)
        for hooks in parts.hooks:
            hooks.marks.clear(at_step=True)
        stops = float(self.stop.wanted)
        draws = parts.passes.replay.draws
        end.local = LocalTotals(
            weight,
            parts.accumulation.loss,
            stops,
            mark_of(rates),
            self._record.fingerprint,
            bool(draws.drew),
            self._weighing.take_guesses(),
        )
        parts.walker.run(until=_is_update)  # DELIVER, SUM and NORM
        totals = end.totals
        assert totals is not None, "NORM has run"
        divisor = parts.accumulation.divisor_of(totals.weight)
        norm = gradient_norm(totals, divisor)
        finite = math.isfinite(norm)
        draws.note(totals.draws)
        check_alike(totals, parts.config.batch.duplicates, finite, self._loss_tolerance, parts.mesh.cp)
        if self._record.check is not None and finite and totals.weight and not math.isnan(totals.loss):
            self._record.check.compare(self._number, totals, divisor)
            self._record.end_check()
        return totals, divisor, norm

    def train_step(self, batches: Sequence[Any], weights: Sequence[float] | None = None) -> StepResult:
        """Run all microbatches of a step and its update. Implements ``Engine.train_step``."""
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
            with self._discard.on_error():
                is_whole = self._pipeline.accumulate(batches, weights, self._weighing, self._record.check)
            # If ranks bring parts of batches, fingerprints of the batches cannot be compared.
            for i, batch in enumerate(batches if is_whole else ()):
                self._record.counts(None if weights is None else weights[i], [batch])
            self._record.passes = {i: ((batch,), {}) for i, batch in enumerate(batches)}
            result = self.step()
            assert result is not None, "the last microbatch ends the step"
            return result
        self._check_between_steps("train_step")
        result = None
        with self._discard.on_error(), self._keys.of_step(batches):
            for i, batch in enumerate(batches):
                loss = find_loss(self._forward.loss((batch,), {}))
                self.backward(loss, None if weights is None else weights[i])
                result = self.step()
        assert result is not None, "the last microbatch ends the step"
        return result

    def _close_step(
        self, totals: StepTotals, norm: float, lr: float, skipped: bool, fields: Mapping[str, Any]
    ) -> StepResult:
        parts, walker = self._parts, self._parts.walker
        for bucket, _ in parts.trained:
            bucket.gradient.drop_gradients()
        progress = parts.progress
        loss = totals.loss / totals.weight if totals.weight else math.nan
        self._record.end_step()
        news = walker.trace.news(walker.last)
        skips = progress.step_count - progress.applied_steps
        result = StepResult(
            progress.step_count, loss, norm, lr, totals.weight, skipped, news, skips, **fields
        )
        walker.close()
        for hooks in parts.hooks:
            hooks.end_step()
        parts.program.begin(self._accumulation.end_step())
        self._end.forget()
        parts.clock.step_ended()
        for follower in parts.followers:
            follower.after_step(progress.step_count, walker.last)
        self._ended(result)
        return result

    def _tell_of_nothing(self) -> None:
        if self._has_told_of_nothing or self._parts.world.rank:
            return
        self._has_told_of_nothing = True
        _log.warning(
            "step %d is skipped: nothing counts in it. No batch of any rank has a label that is not -100, or all "
            "weights are 0; the loss of such a step is nan, and the weights stay as they are. Look at the data: prompts"
            " and padding may fill whole batches",
            self._number,
        )

    def _allow_skip(self, is_loss_alone: bool) -> None:
        """Allow a step that is not finite to be skipped, or discard the step and raise an error.

        A step may be skipped while the loss scale can fall or the configuration allows it. No loss scale helps a NaN
        loss of
        finite gradients: the NaN does not come from a weight that trains, so it would recur step after step.

        Args:
            is_loss_alone: True if the loss is NaN but every gradient is finite.

        Raises:
            NonFiniteError: if the step may not be skipped.
        """
        scale, policy = self._parts.loss_scale, self._parts.config.precision
        in_a_row = self._parts.progress.skipped_in_a_row
        can_fall = scale is not None and not scale.is_spent and not is_loss_alone
        if (can_fall or policy.nonfinite == "skip") and in_a_row < policy.max_skipped_steps:
            if not can_fall and self._parts.world.rank == 0:
                what = "the loss is nan" if is_loss_alone else "gradients are not finite"
                text = "step %d is skipped: %s (%d in a row; precision.max_skipped_steps: %d)"
                _log.warning(text, self._number, what, in_a_row + 1, policy.max_skipped_steps)
            return
        where = origin(self._parts, self._forward.again)
        self._discard()
        what = "gradients are not finite"
        if scale is not None:
            how = "at its minimum," if scale.is_spent and scale.policy.dynamic else "at"
            what = f"gradients are not finite, and the loss scale is {how} {scale.scale}"
        if is_loss_alone:
            what = "the loss is nan while every gradient is finite, so what is nan in it trains no weight"
        if in_a_row:
            what += f", after {in_a_row} steps in a row that were skipped"
        raise NonFiniteError(
            f"step {self._number}: {what}; {where}. The weights are those of step {self._number - 1}. "
            "Look at the data of this step, lower the learning rate, clip gradients, or widen precision.compute"
        )

    # Where a step ends -----------------------------------------------------------------------------------------

    def set_accumulation(self, microbatches: int, loaders: EngineLoaders) -> None:
        """Set the number of microbatches of a step. Implements ``Engine.set_accumulation``."""
        self._check_between_steps("set_accumulation")
        try:
            microbatches = operator.index(microbatches)
        except TypeError:
            raise UsageError(
                f"set_accumulation: expected a whole number of microbatches, given {microbatches!r}"
            ) from None
        if not metrics.are_alike(self._parts, microbatches):
            raise UsageError(
                f"set_accumulation: {microbatches} microbatches here, another number on other ranks; all ranks must "
                "say the same"
            )
        if microbatches < 1:
            raise UsageError(f"set_accumulation: expected at least 1 microbatch, given {microbatches}")
        loaders.set_accumulation(microbatches)
        self._parts.program.begin(microbatches)
        self._accumulation.microbatches = microbatches
        self._accumulation.per_microbatch = 1

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the running microbatch ends the step. Implements ``Engine.set_boundary``."""
        if self._pipeline is not None and is_boundary is not None:
            raise UsageError(
                "set_boundary: with mesh.pp above 1 train_step(batches) runs all microbatches of a step; say how many "
                "with engine.set_accumulation(n)"
            )
        self._accumulation.boundary = None if is_boundary is None else bool(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold back the end of the step for backward passes inside. Implements ``Engine.no_sync``."""
        before, self._accumulation.holds_back = self._accumulation.holds_back, True
        try:
            yield
        finally:
            self._accumulation.holds_back = before

    def tell_of_unstepped(self, is_calm: bool) -> None:
        """Warn of microbatches that were never stepped, when the engine closes."""
        self._unstepped.close(is_calm)

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

    def close(self) -> None:
        """Stop counting backward passes that the script runs itself."""
        if self._plain is not None:
            self._plain.remove()
