"""Forward passes that the engine's methods run: training loss, mean loss, outputs, other methods, log-probabilities."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.base.pytree import tensors_in
from shardwise.data.evaluation import WeightedBatch
from shardwise.engine.parts.inputs import Loss, apply, call_model, cast_inputs, find_loss
from shardwise.engine.parts.metrics import are_alike
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.parts.weighing import MicrobatchWeights
from shardwise.engine.state.state import settle
from shardwise.engine.step.nonfinite import NonFiniteProbe
from shardwise.engine.step.pipeline import PipelineRunner
from shardwise.engine.step.record import StepInputs
from shardwise.parallel.tensor.log_probs import log_probs_of

_NONE = object()


def _is_weight(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) >= 0


def _words_of(value: Any) -> str:
    """Return a description of an item of an evaluation, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {list(value)}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"({', '.join(map(_words_of, value))})"
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


class ForwardRunner:
    """Runs the forward passes of one engine.

    Args:
        parts: the parts of the engine.
        loss: the user's loss function, or None.
        pipeline: the pipeline, or None.
        record: the record of the running step.
        weighing: weights of microbatches for which the caller gives none.
        discards: returns a context that discards the running step after an exception.
    """

    def __init__(
        self,
        parts: EngineParts,
        loss: Loss | None,
        pipeline: PipelineRunner | None,
        record: StepInputs,
        weighing: MicrobatchWeights,
        discards: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._parts = parts
        self._loss = loss
        self._pipeline = pipeline
        self._record = record
        self._weighing = weighing
        self._discards = discards

    def loss(self, args: Any, kwargs: Any) -> Any:
        """Run one microbatch; see ``Engine.__call__``."""
        step, record = self._parts.accumulation, self._record
        if self._pipeline is not None:
            raise UsageError(
                "engine(batch): with mesh.pp above 1 the stages work on different microbatches at a time; call "
                "engine.train_step(batches), engine.evaluate(...) or engine.predict(batches)"
            )
        trains = torch.is_grad_enabled()
        if trains:
            self._make_room()
            record.sees(step.passes, args, kwargs)
        with self._weighing.seen_through(args, kwargs) if trains else nullcontext():
            output = self._called(args, kwargs, step.passes)
        if trains:
            if record.check is not None:
                output = record.check.returned(output, step.passes)
            record.returned(output)
            if self._parts.mesh.tp > 1:
                # Until the backward pass: the user may compute on the loss with weights.
                self._parts.passes.own_use.begin()
        return output

    def _make_room(self) -> None:
        """Extend the step's list by one microbatch if the next forward pass is beyond the expected number."""
        step, program = self._parts.accumulation, self._parts.program
        if step.passes >= program.microbatches and not step.is_summed:
            self._parts.hooks[0].recover()
            program.follow(step.passes + 1)

    def _at(self, batch: Any, microbatch: int) -> AbstractContextManager[None]:
        return self._parts.passes.at(self._parts.progress.step_count + 1, microbatch, batch)

    def _called(self, args: Any, kwargs: Any, microbatch: int) -> Any:
        with self._at((args, kwargs), microbatch):
            if len(args) == 1 and not kwargs:
                return call_model(self._parts.model, self._loss, args[0], self._parts.device)
            return self._parts.model(*args, **kwargs)

    def again(self, look: NonFiniteProbe) -> None:
        """Run the passes of the running step again, without gradients, and pass batches and losses to ``look``."""
        if self._pipeline is not None:
            self._pipeline.look_again([args[0] for args, _ in self._record.passes.values()], look)
            return
        for i, (args, kwargs) in self._record.passes.items():
            look.batch(i, (args, kwargs))
            look.loss(i, self._called(args, kwargs, i), self._record.batch(i))

    def mean_loss(self, batches: Iterable[tuple[Any, float | None]]) -> float:
        """Return the mean loss of an evaluation, in the mode that the model is in; see ``Engine.evaluate``."""
        settle(self._parts)
        # The sum stays on the device: a read for each batch would stop the host there.
        total = torch.zeros(2, dtype=torch.float64, device=self._parts.device)
        for loss, weight in self._losses(batches):
            if weight and loss is not None:
                total[0] += loss.detach().reshape(()).to(total) * weight
                total[1] += weight
        total *= self._parts.brings_loss
        self._parts.groups["world"].all_reduce(total, "the validation loss", purpose="control").wait()
        summed, weights = total.tolist()
        return summed / weights if weights else math.nan

    def _losses(self, batches: Iterable[tuple[Any, float | None]]) -> Iterator[tuple[Tensor | None, float]]:
        pairs = map(self._weighted, self._together(batches))
        if self._pipeline is not None:
            with self._discards():
                yield from self._pipeline.losses(pairs)
            return
        for batch, weight in pairs:
            yield find_loss(self.loss((batch,), {})), weight

    def _together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield ``batches``; with expert parallelism, check before each batch that all ranks have one.

        Raises:
            UsageError: on all ranks alike, if the ranks have different numbers of batches.
        """
        rest = iter(batches)
        while True:
            batch = next(rest, _NONE)
            if self._meets_others and not are_alike(self._parts, int(batch is not _NONE)):
                raise self._uneven("evaluate")
            if batch is _NONE:
                return
            yield batch

    @property
    def _meets_others(self) -> bool:
        """True if a pass exchanges tokens with ranks that have other batches and hold experts of the model."""
        return self._parts.mesh.ep > 1

    def _uneven(self, call: str) -> UsageError:
        return UsageError(
            f"{call}: the ranks were given unlike numbers of batches; with mesh.ep: {self._parts.mesh.ep} each pass "
            "uses experts of other ranks, so all bring as many: a rank that has run out of data repeats any batch "
            "(engine.evaluate: with weight 0)"
        )

    def _weighted(self, pair: Any) -> tuple[Any, float]:
        """Return (batch, weight) of an item of an evaluation.

        Raises:
            UsageError: if the item is no pair of a batch and a weight.
        """
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not (pair[1] is None or _is_weight(pair[1])):
            raise UsageError(
                f"evaluate: expected pairs (batch, weight) whose weight is a number or None, given {_words_of(pair)}; "
                "give the DataLoader or Dataset itself, engine.evaluation_loader(data), or [(batch, None), ...], where "
                "None counts the labels of the batch"
            )
        batch, weight = pair
        if isinstance(
            pair, WeightedBatch
        ):  # an item of evaluation_loader: weight is its number of samples, 0 if the batch only fills up
            counted = self._weighing.of_batch(batch) if weight else 0.0
            return batch, float(self._weighing.of_given(weight, batch) if counted is None else counted)
        if weight is not None:
            return batch, self._weighing.of_given(weight, batch)
        counted = self._weighing.of_batch(batch)
        return batch, self._weighing.of_given(1.0, batch) if counted is None else counted

    def predict(self, batches: Sequence[Any], call: Loss | None = None, everywhere: bool = True) -> list[Any]:
        """Return the outputs for ``batches``; see ``Engine.predict``."""
        settle(self._parts)
        batches = list(batches)
        if self._meets_others and not are_alike(self._parts, len(batches)):
            raise self._uneven("predict")
        if self._pipeline is not None:
            with self._discards():
                return self._pipeline.predict(batches, call or apply, everywhere)
        outputs = []
        for i, batch in enumerate(batches):
            with self._at(batch, i):
                outputs.append(
                    (call or apply)(self._parts.model, cast_inputs(batch, self._parts.device, None))
                )
        return outputs

    def run(self, method: str | Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a method of the model as one forward pass; see ``Engine.run``."""
        if self._pipeline is not None:
            raise UsageError(
                "run: with mesh.pp above 1 only forward is cut into stages; use engine.predict(batches)"
            )
        parts = self._parts
        function = getattr(parts.model, method) if isinstance(method, str) else method
        device, dtype = parts.device, parts.config.precision.compute_dtype
        args, kwargs = cast_inputs(args, device, dtype), cast_inputs(kwargs, device, dtype)
        if torch.is_grad_enabled():
            self._make_room()
        with self._at((args, kwargs), parts.accumulation.passes), parts.passes.replay.whole():
            output = parts.hooks[0].run_as_forward(function, args, kwargs)
        context = parts.passes.context
        if context is not None and torch.is_grad_enabled():
            context.outputs.loss_is_whole = True  # also of a method that does not call the model's forward
        cuts = parts.groups["tp"].size > 1 and parts.config.tensor.sequence_parallel
        if cuts and any(each.requires_grad for each in tensors_in(output)):
            raise UsageError(
                "run: under sequence parallelism gradients begin and end with the model's own forward, which decides "
                "where the sequence is cut; set tensor.sequence_parallel: false, call engine(batch) or "
                "engine.log_probs(batch, targets), or run it under torch.no_grad()"
            )
        return output

    def log_probs(self, batch: Any, targets: Tensor) -> Tensor:
        """Return log-probabilities of ``targets``; see ``Engine.log_probs``."""
        parts = self._parts
        step = parts.accumulation
        if self._pipeline is not None:
            raise UsageError(
                "log_probs: with mesh.pp above 1 the last stage alone knows the logits; compute them in the function "
                "given as initialize(loss=...), or from the logits of engine.predict(batches)"
            )
        if torch.is_grad_enabled():
            self._make_room()
            self._record.passes[step.passes] = ((batch,), {})
        context = parts.passes.context

        def call() -> Any:
            return apply(parts.model, cast_inputs(batch, parts.device, None))

        with self._at(batch, step.passes):
            if context is None:
                return log_probs_of(parts.model, call, targets)
            with context.outputs.keep_parts():  # whole logits may not fit the memory
                found = log_probs_of(parts.model, call, targets, context.outputs.own_targets)
            return context.outputs.join(found)
