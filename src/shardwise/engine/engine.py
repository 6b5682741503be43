"""The engine: a model, its shards and its optimizer, behind five calls.

    engine = shardwise.initialize(model, config="run.yaml")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()                # ends a microbatch; updates after the last one of a step
    engine.save("checkpoints")

``train_step(batches)`` runs all microbatches of one optimizer step. Meshes with a pipeline require it.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shardwise.base.errors import DivergedError, UsageError
from shardwise.data.adopt import Collate
from shardwise.data.batched import BatchedDataset
from shardwise.data.evaluation import WeightedBatch
from shardwise.data.loader import Loader
from shardwise.data.passes import DataPasses
from shardwise.engine.model.held import ModelHandle
from shardwise.engine.model.original import OriginalAttributes
from shardwise.engine.model.state_access import StateAccess
from shardwise.engine.parts import metrics
from shardwise.engine.parts.inputs import Loss
from shardwise.engine.parts.out_of_memory import tells_out_of_memory
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.parts.weighing import MicrobatchWeights
from shardwise.engine.state.averaging import averaged
from shardwise.engine.state.away import AwayTier, StateKind
from shardwise.engine.state.loaders import EngineLoaders
from shardwise.engine.state.saves import StepSaves
from shardwise.engine.state.together import named, together
from shardwise.engine.step.check import FirstStepCheck
from shardwise.engine.step.end import StepEndHandlers, StepResult
from shardwise.engine.step.forward import ForwardRunner
from shardwise.engine.step.monitor import Monitor
from shardwise.engine.step.pipeline import PipelineRunner
from shardwise.engine.step.prefetch import Prefetcher
from shardwise.engine.step.record import StepInputs
from shardwise.engine.step.training_step import StepDiscard, TrainingStep
from shardwise.observe.lanes_picture import LaneRecorder
from shardwise.parallel.expert.loads import summary_of
from shardwise.passes.recompute import recomputed

_log = logging.getLogger(__name__)

OnStep = Callable[["Engine", StepResult], None]


class Engine(StateAccess):
    """A model, its shards and its optimizer, with the calls that train, evaluate, save and load.

    Made by ``shardwise.initialize``. The module's docstring shows a training loop.
    """

    def __init__(
        self,
        parts: EngineParts,
        original: OriginalAttributes,
        loss: Loss | None,
        on_step: Sequence[OnStep],
        end: StepEndHandlers,
        pipeline: PipelineRunner | None = None,
        check: FirstStepCheck | None = None,
    ):
        record = StepInputs(check, parts.world.size > 1, parts.mesh.cp > 1)
        super().__init__(
            parts, pipeline, record, ModelHandle(parts, original, self.close, record.before_pass)
        )
        self.on_step: list[OnStep] = list(on_step)
        """Callbacks, called with (engine, result) after every optimizer step."""
        self.weighing = MicrobatchWeights(
            parts.config.batch.weigh_by, parts.model, parts.passes.share_of, parts.passes.share_of_loss
        )
        """Weights of microbatches for which the caller gives none."""
        self.monitor = Monitor(parts.config, parts.world.rank == 0, parts.device)
        """Sinks that receive the step's loss, norm, learning rate and timings after every step."""
        if self.monitor.records_steps:
            parts.measure_waits()
        self._discard = StepDiscard(parts, end, record, self.weighing)
        self._forward = ForwardRunner(parts, loss, pipeline, record, self.weighing, self._discard.on_error)
        self._training = TrainingStep(
            parts, end, pipeline, self._forward, record, self.weighing, self._discard, self._step_ended
        )
        self._loaders = EngineLoaders(
            parts.config, parts.data, parts.accumulation.microbatches, parts.groups["world"], parts.device
        )
        self._saves = StepSaves(parts, self._loaders)

    # Training --------------------------------------------------------------------------------------------------

    @overload
    def __call__(self, batch: Tensor | tuple[Any, ...] | list[Any], /) -> Tensor: ...

    @overload
    def __call__(
        self, *args: Any, **kwargs: Any
    ) -> Any: ...  # for a mapping: the output object of a Hugging Face model

    @tells_out_of_memory
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one microbatch, or the model's output for other arguments.

        ``engine(batch)`` returns the loss that the user's loss function or the model itself computes. Any other
        arguments are passed to the model unchanged, and its output is returned. Floating inputs are cast to the
        compute dtype.

        Raises:
            UsageError: if mesh.pp is above 1, or if the weights are offloaded (``offload_states``).
        """
        self._held.away.check("engine(batch)", reads_weights_alone=True)
        return self._forward.loss(args, kwargs)

    @tells_out_of_memory
    def backward(self, loss: Tensor, weight: float | None = None, retain_graph: bool = False) -> None:
        """Accumulate the gradients of one microbatch.

        Args:
            loss: the loss, a tensor of one element.
            weight: how much the microbatch counts (tokens, samples). None: the number of labels that a cross entropy
                in ``loss`` averages over, so that ignored labels (-100) and short batches are weighted correctly;
                without a cross entropy, microbatches count alike (``batch.weigh_by``). A rank without data runs any
                batch with weight 0.
            retain_graph: keep the autograd graph for another backward pass, as in torch.

        Raises:
            UsageError: if ``loss`` is not one number, or has no graph.
        """
        self._held.check("backward")
        self._training.backward(loss, weight, retain_graph)

    def adopt_backward(self) -> None:
        """Let ``loss.backward()`` act as ``engine.backward(loss, weight=1)``, for scripts that call it themselves.

        The change holds for the rest of the engine's life. A backward pass may start at any tensor that the model
        returned.

        Raises:
            UsageError: if mesh.pp is above 1.
        """
        self._training.adopt_backward()

    @tells_out_of_memory
    def step(self, weight: float | None = None) -> StepResult | None:
        """End a microbatch; after the last microbatch of a step, update the weights.

        Losses of several ``backward`` calls since the last ``step()`` add up.

        Args:
            weight: the divisor of this rank's sums of gradients and losses, in place of the weights of its
                microbatches; for losses that are parts of a fixed number.

        Returns:
            The result of the optimizer step; None if more microbatches follow.

        Raises:
            UsageError: if no backward pass came before, and inside ``no_sync``.
        """
        self._held.away.check("step")
        if self._parts.accumulation.is_last:
            self._held.known.check("step")
        try:
            return self._training.step(weight)
        except DivergedError as error:
            raise self._saves.restore(error) from None

    @tells_out_of_memory
    def train_step(self, batches: Sequence[Any], weights: Sequence[float] | None = None) -> StepResult:
        """Run all microbatches of one optimizer step, and update the weights.

        With mesh.pp above 1 all ranks that share a model pass the same batches. If the model is a list of layers
        (``Layers``, without ``initialize(loss=...)``), the first stage reads ``inputs`` and the last stage
        ``targets``, and a rank may pass None for what its stage does not read: ``(inputs, None)``, ``(None,
        targets)``, None.

        Args:
            batches: the microbatches of this rank, as many as the accumulation.
            weights: one weight per microbatch, each as in ``backward``.

        Raises:
            UsageError: if the number of batches is not the accumulation, in the middle of a step, and if a stage
                lacks an input that it reads.
        """
        self._held.check("train_step")
        self._held.known.check("train_step")
        try:
            return self._training.train_step(batches, weights)
        except DivergedError as error:
            raise self._saves.restore(error) from None

    def _step_ended(self, result: StepResult) -> None:
        experts = summary_of(self.expert_tallies().values())
        self.monitor.note(result, self.trace, self.loss_scale, experts, self.slowest_rank)
        for callback in self.on_step:
            callback(self, result)

    # Where a step ends -----------------------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """The number of microbatches of a step."""
        return self._parts.accumulation.microbatches

    @property
    def open_microbatches(self) -> int:
        """The number of microbatches of the running step that ``step()`` has ended."""
        return self._parts.accumulation.done

    @property
    def open_backwards(self) -> int:
        """The number of backward passes since the last ``step()``."""
        return self._parts.accumulation.backwards

    def set_accumulation(self, microbatches: int) -> None:
        """Change the number of microbatches of a step, and so the global batch. Collective, between two steps.

        The engine's loaders deal out the new global batch; their positions count samples and do not move.
        ``engine.config`` keeps the configured value, and a resumed run starts with that value.

        Args:
            microbatches: the number of microbatches of every step from the next one on, equal on all ranks.

        Raises:
            UsageError: if the ranks pass different values, and in the middle of a step.
            DataError: if the data of a loader is smaller than a step.
        """
        self._held.check("set_accumulation")
        self._training.set_accumulation(microbatches, self._loaders)

    @property
    def is_boundary(self) -> bool:
        """True if the running microbatch is the last one of its step, so that ``step()`` updates the weights."""
        return self._parts.accumulation.is_last

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the running microbatch, and all that follow, end a step.

        Call this before the microbatch's backward pass, on all ranks alike. A later call gives the same result, but
        the reduction of gradients then does not overlap with the backward pass.

        Args:
            is_boundary: True if each microbatch ends a step, False if none does; None returns to counting
                microbatches.

        Raises:
            UsageError: if mesh.pp is above 1, because ``train_step`` is then given the whole step.
        """
        self._held.check("set_boundary")
        self._training.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which no backward pass is the last of its step, because others follow before ``step()``.

        At ZeRO stages 0 and 1, where gradients stay whole between microbatches, no gradients are exchanged inside.
        The backward passes inside and those that follow up to the next ``step()`` add up to one microbatch. A call of
        ``step()`` inside the context raises UsageError.
        """
        return self._training.no_sync()

    @property
    def is_in_a_pass(self) -> bool:
        """True while a microbatch passes through the model."""
        return self._parts.passes.replay.is_running

    def recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with activation checkpointing, for a model that calls it in its forward pass.

        Intermediate results of ``function`` are not kept; they are computed again in the backward pass, with the same
        dropout and the same experts, which torch's own checkpoint does not ensure. The key ``recompute`` of the
        configuration wraps whole blocks without a call.
        """
        return recomputed(function, self._parts.passes.replay)

    def prefetch(
        self, steps: Iterable[Any] | Loader, depth: int | None = None, lanes: LaneRecorder | None = None
    ) -> Prefetcher:
        """Return an iterator over ``steps`` that exchanges the keys of embedding tables ahead of time, in a thread.

        Results are bitwise equal to those without prefetching. Every rank passes the same number of steps. Keys are
        host tensors on every device; beside NCCL, gloo exchanges them.

        Args:
            steps: an iterable of steps, each a list of microbatches; or a ``Loader``, whose position is that of the
                last step that the iterator returned. Iterables other than loaders may yield any structure of batches,
                such as those of an evaluation.
            depth: the number of steps between the exchange of a step's keys and its computation; None:
                ``tables.prefetch_steps``.
            lanes: a recorder of what ran when, or None.
        """
        depth = self._parts.config.tables.prefetch_steps if depth is None else depth
        return Prefetcher(self._parts, self.on_step, steps, depth, lanes)

    # Evaluation ------------------------------------------------------------------------------------------------

    @tells_out_of_memory
    @together
    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Any, float | None]] | DataLoader[Any] | Dataset[Any]) -> float:
        """Return the mean loss over all ranks' batches, without gradients and in ``eval`` mode.

        Every rank passes the same number of pairs; a rank that has run out of data repeats any batch with weight 0.

        Args:
            batches: (batch, weight) pairs, or data, of which each rank takes a share as by ``evaluation_loader``. If
                a weight is None, the batch's labels are counted, as in training, and a batch without labels has
                weight 1. Batches of ``evaluation_loader`` are also weighted by their labels, and by samples if they
                have no labels.

        Returns:
            The mean loss, equal on all ranks; NaN if all weights are 0.

        Raises:
            UsageError: if an item is no pair of a batch and a number or None, and for ``engine.loader``, whose
                position belongs to training.
        """
        self._held.away.check("evaluate", reads_weights_alone=True)
        self._held.known.follow("evaluate")
        self._parts.groups["world"].meet()
        if isinstance(batches, DataPasses | Loader):
            raise UsageError(
                "evaluate: engine.loader is for training, and its position would move; give "
                "engine.evaluation_loader(data), or the DataLoader or Dataset itself"
            )
        if isinstance(batches, DataLoader | Dataset | BatchedDataset):
            batches = self._loaders.for_evaluation(batches, None, None, 0)
        was_training = self.module.training
        self.eval()
        try:
            with self.evaluated_weights():
                return self._forward.mean_loss(batches)
        finally:
            self.train(was_training)

    def ema(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are their moving average (``ema: {decay: ...}``), on any mesh and tier.

            with engine.ema():
                outputs = engine.predict(batches)
                engine.save_pretrained("averaged")

        Forward passes, ``state_dict`` and exports read the average inside. ``evaluate`` enters the context by itself
        unless ``ema.evaluate`` is false. Afterwards the weights are bitwise equal to those before. Collective.
        Contexts can be nested.

        Raises:
            UsageError: if the configuration has no ``ema``, in the middle of a step, and for training, saving and
                loading inside.
        """
        return averaged(self._parts, self._held.away)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Return the context of ``ema`` if ``ema.evaluate`` is set, else an empty one. Collective.

        It serves evaluation loops that do not call ``evaluate``.
        """
        policy = self._parts.config.ema
        return nullcontext() if policy is None or not policy.evaluate else self.ema()

    @tells_out_of_memory
    @named
    @torch.no_grad()
    def predict(
        self,
        batches: Sequence[Any],
        call: Callable[[nn.Module, Any], Any] | None = None,
        everywhere: bool = True,
    ) -> list[Any]:
        """Return what the model returns for each batch, on any mesh, on every rank that shares the model.

        The passes run without gradients and in the mode that the model is in. With a pipeline the batches follow one
        another through the stages.

        Args:
            batches: the batches of this rank.
            call: function of (model, batch) that is called in place of the model, or None.
            everywhere: False: with a pipeline only the last stage gets the list, and the others get an empty one.
        """
        self._held.away.check("predict", reads_weights_alone=True)
        self._held.known.follow("predict")
        return self._forward.predict(batches, call, everywhere)

    @tells_out_of_memory
    def run(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model other than ``forward``, or a function, as one forward pass.

        The weights outside the repeated blocks are gathered while it runs, and gradients flow as after
        ``engine(batch)``. ``engine.run("generate", tokens, max_new_tokens=20)`` returns the tokens of one process on
        every rank of any mesh without a pipeline.

        Args:
            method: the name of a method of the model, or a function.
            args: positional arguments of the method.
            kwargs: keyword arguments of the method.

        Raises:
            UsageError: if mesh.pp is above 1, and under sequence parallelism if the result requires gradients,
                because only the model's own forward defines where the sequence is cut.
        """
        self._held.away.check("run", reads_weights_alone=True)
        self._held.known.follow("run")
        return self._forward.run(method, args, kwargs)

    @tells_out_of_memory
    def log_probs(self, batch: Any, targets: Tensor) -> Tensor:
        """Return the log-probability of each of the ``targets`` under the model, from the logits at the same place.

        Under tensor parallelism a causal model of transformers never computes the whole logits for this call. For
        distillation and other uses of whole logits, call the model without labels.

            loss = -(advantage * engine.log_probs({"input_ids": tokens[:, :-1]}, tokens[:, 1:])).mean()
            engine.backward(loss)

        Args:
            batch: the model's input, without labels.
            targets: token indices, [B, T]. ``logits[:, t]`` predict the token after token t, so a causal model takes
                ``engine.log_probs({"input_ids": tokens[:, :-1]}, tokens[:, 1:])``.

        Returns:
            Log-probabilities, [B, T], with gradients outside of ``torch.no_grad()``; 0 if a target is -100; fp32, or
                fp64 for an fp64 model.

        Raises:
            UsageError: if mesh.pp is above 1, and if the model returns no logits of that shape.
        """
        self._held.away.check("log_probs", reads_weights_alone=True)
        return self._forward.log_probs(batch, targets)

    def train(self, mode: bool = True) -> "Engine":
        """Set the model to training mode, or to evaluation mode if ``mode`` is False, and return the engine."""
        self.module.train(mode)
        for stage in self._parts.stages:
            stage.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """Set the model to evaluation mode, and return the engine."""
        return self.train(False)

    # Offloading between two steps ------------------------------------------------------------------------------

    @named
    def offload_states(
        self,
        to: AwayTier = "host",
        folder: str | Path | None = None,
        include: Collection[StateKind] | None = None,
    ) -> None:
        """Move weights, masters and moments off the device until ``reload_states()``. Collective, between two steps.

        Another model can use the memory meanwhile; ``reload_states()`` restores every bit. State that ``offload``
        keeps off the device stays where it is, and so do tables and buffers. Until ``reload_states()``, a call that
        needs offloaded state raises UsageError, and the message names that state. If offloading fails, all state is
        as before.

        Args:
            to: ``host`` for host memory, or ``disk`` for files in ``folder``. On CPU ranks state lies in host memory
                already, so only ``disk`` frees memory.
            folder: folder of the files; None: ``offload.disk_path``.
            include: some of ``weights``, ``masters`` and ``moments``; None: all. While weights stay, forward passes
                can run. Masters of the weights' dtype are the weights themselves.

        Raises:
            UsageError: in the middle of a step, and if state is offloaded already.
            ConfigError: if the folder cannot be used.
            TierError: if the disk fails.
            CommError: on the ranks that did not fail, if another rank failed.
        """
        self._held.check("offload_states")
        self._held.away.leave(to, None if folder is None else Path(folder), include)

    @named
    def reload_states(self) -> None:
        """Bring back what ``offload_states`` has moved; do nothing if nothing is offloaded.

        Raises:
            TierError: if a file cannot be read.
            DamagedError: if a file has other contents than were written.
        """
        self._held.away.come()

    # Stopping together -----------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Request that all ranks stop after the running step; safe in a signal handler."""
        self._training.stop.wanted = True

    @property
    def stop_requested(self) -> bool:
        """True, on all ranks alike, after the step in which any rank had called ``request_stop``."""
        return self._training.stop.seen

    def agree(self, flag: bool) -> bool:
        """Return True on all ranks if ``flag`` is true on any rank. Collective."""
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
    ) -> DataPasses:
        """Return a loop over this rank's share of a data set; each ``for`` over it is one pass.

        Data-parallel ranks get different samples, and the ranks of one model the same samples. The order is drawn
        from (train.seed, pass) and does not depend on the number of ranks. The position is saved and loaded with the
        engine, so a run can resume in the middle of a pass; make loaders in the same order in every run. ``len`` of
        the result is the number of microbatches of a pass, and its ``count_steps(passes)`` the number of optimizer
        steps, as a scheduler needs.

        Args:
            data: a Dataset, a DataLoader or an IterableDataset. Of a DataLoader, its collate_fn, workers and
                shuffling are kept; a DataLoader with its own sampler is read as a stream of batches, which are dealt
                to the ranks.
            batch_size: samples per rank and forward pass, if ``batch.micro_size`` and ``batch.global_size`` do not
                determine that number. All three override the DataLoader's own batch size.
            shuffle: draw a new order for every pass.
            collate_fn: function that makes a batch of a list of samples, or None.
            workers: number of worker processes.
            epochs: number of passes after which a ``BatchedDataset`` ends.

        Raises:
            ConfigError: if there is no batch size, or ``batch_size`` contradicts the configuration.
            DataError: if the data cannot be used.
        """
        return self._loaders.make(data, batch_size, shuffle, collate_fn, workers, epochs)

    def evaluation_loader(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collate_fn: Collate | None = None,
        workers: int = 0,
    ) -> Iterator[WeightedBatch]:
        """Return (batch, number of samples that count) pairs for one ``engine.evaluate`` or an evaluation loop.

        The pairs contain every sample once over all ranks, in order. Every rank gets the same number of pairs; in a
        pair that only fills up, 0 samples count. ``engine.gather_metrics`` takes that number as ``samples``.

        Args:
            data: a Dataset or a DataLoader.
            batch_size: samples of a batch; None: that of the DataLoader, else ``batch.micro_size``, else 1.
            collate_fn: function that makes a batch of a list of samples, or None.
            workers: number of worker processes.
        """
        return self._loaders.for_evaluation(data, batch_size, collate_fn, workers)

    # Around a loop ---------------------------------------------------------------------------------------------

    def print(self, *values: Any, **options: Any) -> None:
        """Print ``values`` on rank 0 only; ``options`` are those of Python's ``print``."""
        if self.is_main:
            print(*values, **options)

    @named
    def barrier(self) -> None:
        """Wait until every rank has called this method. Collective."""
        self.agree(False)

    @overload
    def gather_metrics(self, value: Tensor, /, *, samples: int | None = None) -> Tensor: ...

    @overload
    def gather_metrics(
        self, first: Tensor, second: Tensor, /, *more: Tensor, samples: int | None = None
    ) -> tuple[Tensor, ...]: ...

    @named
    def gather_metrics(self, *values: Tensor, samples: int | None = None) -> Tensor | tuple[Tensor, ...]:
        """Return the rows of each tensor from all data-parallel ranks, [B, ...] -> [ΣB, ...]. Collective.

        Every rank gets all rows, in the order of the ranks.

        Args:
            values: tensors; a scalar counts as one row. Ranks may pass different numbers of rows, also none.
            samples: the number of rows that count, as ``evaluation_loader`` yields it; rows that only fill up are
                dropped. None: all rows.

        Returns:
            One tensor, or a tuple if several tensors are given.

        Raises:
            UsageError: if a tensor has fewer rows than ``samples``.
        """
        found = tuple(metrics.gather_rows(self._parts.data, self.device, value, samples) for value in values)
        return found[0] if len(found) == 1 else found

    @property
    def not_loaded(self) -> list[str]:
        """The names that the last ``load`` left at their initial values (``missing``)."""
        return self._saves.not_loaded

    # Saving ----------------------------------------------------------------------------------------------------

    @together
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
        """Save a step under ``directory``. Collective.

        The call returns when the state is copied to host memory; the files are written in the background, unless
        ``asynchronous`` is false.

        Args:
            directory: folder of the run's steps.
            trainer: JSON data of the user, which ``load`` returns.
            asynchronous: write in the background; None: ``checkpoint.asynchronous``.
            texts: contents of small files to store with the step, by name.
            score: result of an evaluation of this step, equal on all ranks. The steps with the best scores so far are
                kept whatever ``checkpoint.keep_last`` is, also after a resume: ``checkpoint.keep_best`` of them, at
                least the first (``best``).
            higher_is_better: True if a larger score is better.

        Raises:
            CheckpointError: if more saves in a row have failed than ``checkpoint.tolerate_failures`` allows.
        """
        self._held.away.check("save")
        self._held.known.check("save")
        self._saves.save(directory, trainer, score, higher_is_better, asynchronous=asynchronous, texts=texts)

    def is_best(self, score: float, higher_is_better: bool = False) -> bool:
        """Return True if a step saved now with ``score`` would be among the best; False for NaN and infinities.

        There are ``checkpoint.keep_best`` best steps, at least one. Of equal scores, the earlier step's is better.

        Args:
            score: the score to compare.
            higher_is_better: True if a larger score is better.
        """
        return self._saves.is_best(score, higher_is_better)

    @together
    def load(
        self,
        directory: str | Path,
        weights_only: bool = False,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        required: bool | None = None,
    ) -> dict[str, Any] | None:
        """Load a step, or the newest complete step of a folder, whatever layout saved it. Collective.

        The running step ends: its microbatches and their gradients are dropped, as by ``discard()``. A warning lists
        the names that matched ``missing`` and ``unexpected``; ``not_loaded`` keeps the former.

        Args:
            directory: a step, or a folder of steps.
            weights_only: load only the weights, as at the start of a fresh run.
            missing: patterns of names (``head.*``, ``tables.user``; ``*`` matches anything) of weights, buffers and
                embedding tables that the step may lack or hold in another shape. These keep their initial values,
                with fresh optimizer state, and all else is restored exactly; of a table that only grew, the first
                rows are loaded.
            unexpected: patterns of names that the step may hold and the model lacks.
            required: True if a folder without a step is an error; False if a folder that does not exist yet counts as
                a folder without a step, for a run that resumes from its own folder if possible.

        Returns:
            The data that ``save`` was given as ``trainer``; None if the folder holds no step.

        Raises:
            CheckpointError: if the path does not exist or is a file.
            MismatchError: if tensors differ, or a pattern matches nothing; the message names the first of them.
            DamagedError: if a file is damaged; the message names the file and the tensor.
        """
        self._held.away.check("load")
        if self._parts.accumulation.passes:
            _log.warning(
                "load: %d backward passes of the running step are dropped", self._parts.accumulation.passes
            )
        self._discard()
        return self._saves.load(directory, weights_only, missing, unexpected, required)

    def wait_for_save(self) -> None:
        """Wait until a save that runs in the background is committed; raise its error if it failed."""
        self._parts.folders.wait()

    @together
    def export(self, directory: str | Path) -> bool:
        """Write the vectors of the embedding tables and the dense part for serving, at this step. Collective.

        The first export writes full vectors, and later ones increments: the rows that came, changed and went since the
        export before. Each has the parameters and buffers of the model beside the tables. ``shardwise.Scorer`` and
        ``shardwise.Vectors`` read the folder, and their ``refresh`` follows the increments. Full vectors are written
        again after ``export.full_every`` increments, after a load, and if more rows were evicted since the last export
        than the tables have. The key ``export`` must be in the configuration, because the tables then keep marks of the
        rows that change.

        Args:
            directory: folder of the vectors, which all ranks share.

        Returns:
            True if full vectors were written, False for an increment, or if this step was exported before.

        Raises:
            UsageError: if the model has no embedding tables, or the configuration has no ``export``.
            CheckpointError: if the vectors cannot be written; training may go on, and the next export is full.
        """
        self._held.away.check("export")
        return self._saves.exports.write(Path(directory))

    @together
    def close(self, whole: bool = True) -> None:
        """Finish background work and give the model back as plain torch.

        The model is again without hooks, with its own dropout, forward passes and dtypes, and with whole weights, as
        precise as the masters that the optimizer updated. It can train on in plain torch, or be passed to
        ``initialize`` again. A second call does nothing. Embedding tables keep their rows if all of them are in this
        process's memory; tables on several ranks or in tiers refuse every later use, so save before.

        Collective if weights or masters are cut (stage 3; stages 1 and 2 with masters of a wider dtype than the
        weights), because every rank gathers them. The weights stay cut, with a warning, if whole weights do not fit
        the free memory. They also stay cut while an exception propagates (``finally: engine.close()``), because other
        ranks may not reach the call. Under tp, pp and ep a rank keeps its own part of the model in any case.

        Batches that loaders have read ahead are dropped and their threads end; a loop over a loader can continue, and
        starts the threads again.

        torch's switches for ``deterministic: true`` and ``attention.backend`` become what they were, unless another
        engine needs them.

        Args:
            whole: False leaves the weights as they are, for a model that is not used any more.
        """
        if self.is_closed:
            return
        self.wait_for_save()
        self._training.tell_of_unstepped(sys.exc_info()[0] is None)
        if self._parts.accumulation.passes:  # else their gradients would stay on the model
            self.discard()
        self._record.close()
        self._training.close()
        self.monitor.close()
        is_calm = sys.exc_info()[0] is None
        # The collections are without rows again once the model is given back.
        tables = [each.placed for each in self._parts.tables.collections.values()]
        try:
            self._held.give_back(whole and is_calm)
        finally:  # release files and threads also if a disk could not be read
            if self._parts.site.tiers is not None:
                self._parts.site.tiers.close()
            for each in tables:
                each.close()
            if self._parts.site.deterministic is not None:
                self._parts.site.deterministic.end()
            if self._parts.site.attention is not None:
                self._parts.site.attention.end()
        if is_calm:  # after an error a reader thread may hang on what failed, and close() would wait for it
            self._loaders.close()
        if self.world.ends_with_engine:
            self.world.release()

    def discard(self) -> None:
        """Drop the running step's microbatches and their gradients, as ``zero_grad()`` does in a plain loop.

        All ranks must call this method alike.
        """
        self._discard()
