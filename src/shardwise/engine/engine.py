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
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shardwise.data.adopt import Collate
from shardwise.data.batched import BatchedDataset
from shardwise.data.evaluation import Weighted
from shardwise.data.loader import Loader
from shardwise.data.passes import Passes
from shardwise.engine import metrics
from shardwise.engine.averaging import averaged
from shardwise.engine.away import AwayTier, StateKind
from shardwise.engine.check import Check
from shardwise.engine.forward import Forward
from shardwise.engine.held import Held
from shardwise.engine.inputs import Loss
from shardwise.engine.loaders import Loaders
from shardwise.engine.monitor import Monitor
from shardwise.engine.original import Original
from shardwise.engine.out_of_memory import tells_out_of_memory
from shardwise.engine.parts import Parts
from shardwise.engine.pipeline import Pipeline
from shardwise.engine.prefetch import Prefetcher, PrefetcherMaker
from shardwise.engine.record import StepInputs
from shardwise.engine.saves import Saves
from shardwise.engine.state_access import StateAccess
from shardwise.engine.step import StepEnd, StepResult
from shardwise.engine.together import named, together
from shardwise.engine.training_step import StepDiscard, TrainingStep
from shardwise.engine.weighing import Weighing
from shardwise.memory.recompute import recomputed
from shardwise.observe.lanes_picture import Lanes
from shardwise.parallel.expert.loads import summary_of
from shardwise.plan.errors import UsageError

_log = logging.getLogger(__name__)

OnStep = Callable[["Engine", StepResult], None]


class Engine(StateAccess):
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
        record = StepInputs(check, parts.world.size > 1)
        super().__init__(parts, pipeline, record, Held(parts, original, self.close, record.before_pass))
        self.on_step: list[OnStep] = list(on_step)
        """Called with (engine, result) after every optimizer step."""
        self.weighing = Weighing(parts.config.batch.weigh_by, parts.model)
        """What microbatches count where nothing is said."""
        self.monitor = Monitor(parts.config, parts.world.rank == 0, parts.device)
        """Where numbers go after every step."""
        self._discard = StepDiscard(parts, end, record, self.weighing)
        self._forward = Forward(parts, loss, pipeline, record, self.weighing, self._discard.on_error)
        self._training = TrainingStep(
            parts, end, pipeline, self._forward, record, self.weighing, self._discard, self._step_ended
        )
        self._prefetcher = PrefetcherMaker(parts, self.on_step)
        self._loaders = Loaders(
            parts.config, parts.dp, parts.accumulation.microbatches, parts.groups["world"]
        )
        self._saves = Saves(parts, self._loaders)

    # Training --------------------------------------------------------------------------------------------------

    @overload
    def __call__(self, batch: Tensor | tuple[Any, ...] | list[Any], /) -> Tensor: ...

    @overload
    def __call__(
        self, *args: Any, **kwargs: Any
    ) -> Any: ...  # a mapping: the output object of a model of a hub

    @tells_out_of_memory
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``engine(batch)``: the loss of a microbatch, from the user's loss function or from the model itself.

        Any other arguments go to the model as they are. Floating inputs are cast to the compute dtype.
        """
        self._held.away.check("engine(batch)", reads_weights_alone=True)
        return self._forward.loss(args, kwargs)

    @tells_out_of_memory
    def backward(self, loss: Tensor, weight: float | None = None, retain_graph: bool = False) -> None:
        """Accumulate the gradients of one microbatch.

        ``weight``: how much it counts (tokens, samples). Left out, it is the number of labels that a cross entropy in
        ``loss`` is the mean of, so that ignored labels (-100) and short batches need no word; without one, microbatches
        count alike (``batch.weigh_by``). A rank without data runs any batch with weight 0.
        Errors: UsageError where ``loss`` is not one number.
        """
        self._held.check("backward")
        self._training.backward(loss, weight, retain_graph)

    def adopt_backward(self) -> None:
        """From here on ``loss.backward()`` is ``engine.backward(loss, weight=1)``, for scripts that call it themselves.

        Gradients of any tensor that the model returned will do. Errors: UsageError with mesh.pp above 1.
        """
        self._training.adopt_backward()

    @tells_out_of_memory
    def step(self, weight: float | None = None) -> StepResult | None:
        """End a microbatch. After the last one of a step: update the weights; else return None.

        Losses of several ``backward`` calls since the last ``step()`` add up. ``weight``: what sums of gradients and
        losses are divided by on this rank, in place of the weights of its microbatches, for losses that are parts of a
        fixed number.
        Errors: UsageError where there was none, and inside ``no_sync``.
        """
        self._held.away.check("step")
        if self._parts.accumulation.is_last:
            self._held.known.check("step")
        return self._training.step(weight)

    @tells_out_of_memory
    def train_step(self, batches: Sequence[Any], weights: Sequence[float] | None = None) -> StepResult:
        """All microbatches of one optimizer step. ``weights``: as ``backward``'s, one per microbatch.

        With mesh.pp above 1 all ranks that share a model bring the same batches. Of a list of layers (``Layers``,
        without ``initialize(loss=...)``) the first stage reads ``inputs`` and the last one ``targets``, and a rank may
        bring None for what it does not read: ``(inputs, None)``, ``(None, targets)``, None.

        Errors: UsageError where the number of batches is not the accumulation, in the middle of a step, and where a
        stage lacks what it reads.
        """
        self._held.check("train_step")
        self._held.known.check("train_step")
        return self._training.train_step(batches, weights)

    def _step_ended(self, result: StepResult) -> None:
        self.monitor.note(result, self.trace, self.loss_scale, summary_of(self.expert_tallies().values()))
        for callback in self.on_step:
            callback(self, result)

    # Where a step ends -----------------------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """Microbatches of a step."""
        return self._parts.accumulation.microbatches

    @property
    def open_microbatches(self) -> int:
        """Microbatches of the running step that ``step()`` has ended."""
        return self._parts.accumulation.done

    @property
    def open_backwards(self) -> int:
        """Backward passes since the last ``step()``."""
        return self._parts.accumulation.backwards

    def set_accumulation(self, microbatches: int) -> None:
        """From the next step on, as many microbatches make one: another global batch. Collective, between two steps.

        Loaders of the engine deal by it; a position counts samples, and stays. ``engine.config`` keeps what was
        configured, and so begins a run that is resumed.
        Errors: UsageError where the ranks say unlike numbers, and in the middle of a step; DataError where a loader's
        data holds less than a step.
        """
        self._held.check("set_accumulation")
        self._training.set_accumulation(microbatches, self._loaders)

    @property
    def is_boundary(self) -> bool:
        """Whether the running microbatch is the last one of its step: ``step()`` will update."""
        return self._parts.accumulation.is_last

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Say yourself whether the running microbatch, and all that follow, end a step; None counts them again.

        Say it before the microbatch's backward pass, on all ranks alike: afterwards it is as exact, but the reduction
        of gradients does not overlap with the backward pass.
        Errors: UsageError with mesh.pp above 1, where ``train_step`` has the whole step.
        """
        self._held.check("set_boundary")
        self._training.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which no backward pass is the last of its step, for more of them follow before ``step()``.

        Where gradients stay whole between microbatches (stages 0 and 1) none travel inside. What is computed inside
        adds up with what follows up to the next ``step()``: one microbatch.
        Errors: UsageError for ``step()`` inside.
        """
        return self._training.no_sync()

    @property
    def is_in_a_pass(self) -> bool:
        """Whether a microbatch goes through the model now."""
        return self._parts.passes.replay.is_running

    def recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, for a model that calls it in its forward pass: what it computes on the way is not kept, and
        runs again in the backward pass, with the same dropout and the same experts, which torch's own checkpoint does
        not know. ``recompute`` of the configuration wraps whole blocks without a call."""
        return recomputed(function, self._parts.passes.replay)

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

    # Evaluation ------------------------------------------------------------------------------------------------

    @tells_out_of_memory
    @together
    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Any, float | None]] | DataLoader[Any] | Dataset[Any]) -> float:
        """Return the mean loss over all ranks' batches, without gradients and in ``eval`` mode.

        Every rank brings the same number of pairs; a rank that ran out of data repeats any batch with weight 0.

        Args:
            batches: (batch, weight) pairs, or data, of which each rank takes a share as by ``evaluation_loader``. A
                weight of None stands for the labels of the batch that are counted, as in training, or 1 where it has
                none. Batches of ``evaluation_loader`` count by their labels too, and by samples where they have none.

        Returns:
            The mean loss, equal on all ranks; NaN where nothing counts.

        Raises:
            UsageError: if an item is no pair of a batch and a number or None, and for ``engine.loader``, whose position
                belongs to training.
        """
        self._held.away.check("evaluate", reads_weights_alone=True)
        self._held.known.follow("evaluate")
        self._parts.groups["world"].meet()
        if isinstance(batches, Passes | Loader):
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
        """A context in which the weights are their moving average (``ema: {decay: ...}``), on any mesh and tier.

            with engine.ema():
                outputs = engine.predict(batches)
                engine.save_pretrained("averaged")

        Forward passes, ``state_dict`` and exports read the average inside; ``evaluate`` does so by itself unless
        ``ema.evaluate`` is false. Afterwards the weights are as before, to the bit. Collective. Contexts can be nested.

        Raises:
            UsageError: if the configuration has no ``ema``, in the middle of a step, and for training, saving and
                loading inside.
        """
        return averaged(self._parts, self._held.away)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """A context for an evaluation of one's own: that of ``ema`` where ``ema.evaluate`` asks for it. Collective."""
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
        """What the model returns for each batch, on any mesh and on every rank that shares the model; without gradients
        and in the mode that the model is in. With a pipeline the batches follow one another through the stages.

        ``call``: function of (model, batch) that is asked in place of the model. ``everywhere=False``: with a pipeline
        the last stage alone gets the list, and the others an empty one.
        """
        self._held.away.check("predict", reads_weights_alone=True)
        self._held.known.follow("predict")
        return self._forward.predict(batches, call, everywhere)

    @tells_out_of_memory
    def run(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call another method of the model than ``forward`` (by name), or a function of it, as one forward pass.

        The weights outside the repeated blocks are there while it runs, and gradients flow as after ``engine(batch)``.
        ``engine.run("generate", tokens, max_new_tokens=20)`` gives the tokens of one process on every rank of any mesh
        without a pipeline. Under sequence parallelism its result may not ask for gradients: where the cut of the
        sequence begins and ends is known of the model's own forward alone.
        """
        self._held.away.check("run", reads_weights_alone=True)
        self._held.known.follow("run")
        return self._forward.run(method, args, kwargs)

    @tells_out_of_memory
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
        self._held.away.check("log_probs", reads_weights_alone=True)
        return self._forward.log_probs(batch, targets)

    def train(self, mode: bool = True) -> "Engine":
        """The model's training mode."""
        self.module.train(mode)
        for stage in self._parts.stages:
            stage.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """The model's evaluation mode."""
        return self.train(False)

    # Another model's turn ---------------------------------------------------------------------------------------

    @named
    def offload_states(
        self,
        to: AwayTier = "host",
        folder: str | Path | None = None,
        include: Collection[StateKind] | None = None,
    ) -> None:
        """Between two steps: weights, masters and moments leave the device, for another model to have its memory, until
        ``reload_states()`` brings them back to the bit. Collective.

        ``to``: ``host`` memory, or files on a ``disk`` in ``folder`` (default: ``offload.disk_path``). On CPU ranks
        ``host`` is where state lies, so a disk alone gives memory back. ``include``: some of ``weights``, ``masters``
        and ``moments``; while weights stay, forward passes go on. Masters of the weights' dtype are the weights. State
        that ``offload`` keeps off the device stays where it is, and so do tables and buffers. Until
        ``reload_states()`` everything else that needs what has left is a UsageError which names it.
        Errors: UsageError in the middle of a step and where it is away already; ConfigError, TierError of the folder
        and the disk, CommError on ranks whose own did not fail; all state is as it was then.
        """
        self._held.check("offload_states")
        self._held.away.leave(to, None if folder is None else Path(folder), include)

    @named
    def reload_states(self) -> None:
        """End of ``offload_states``; without one it does nothing. Errors: TierError, DamagedError."""
        self._held.away.come()

    # Stopping together -----------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask all ranks to stop after the running step; safe in a signal handler."""
        self._training.stop.wanted = True

    @property
    def stop_requested(self) -> bool:
        """True on all ranks alike after the step in which any rank had called ``request_stop``."""
        return self._training.stop.seen

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

        ``batch_size``: samples per rank and forward pass, where ``batch.micro_size`` and ``batch.global_size`` do not
        say it; all of them win over the DataLoader's own. ``len`` of the result counts microbatches of a pass, its
        ``count_steps(passes)`` optimizer steps, as a scheduler does. Of a DataLoader its collate_fn, workers and
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

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` on rank 0 alone."""
        if self.is_main:
            print(*values, **options)

    @named
    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        self.agree(False)

    @overload
    def gather_metrics(self, value: Tensor, /, *, samples: int | None = None) -> Tensor: ...

    @overload
    def gather_metrics(
        self, first: Tensor, second: Tensor, /, *more: Tensor, samples: int | None = None
    ) -> tuple[Tensor, ...]: ...

    @named
    def gather_metrics(self, *values: Tensor, samples: int | None = None) -> Tensor | tuple[Tensor, ...]:
        """The rows of a tensor from all data-parallel ranks, in their order, on every rank: [B, ...] -> [ΣB, ...].

        Ranks may bring unlike numbers of rows, and none; a number [] counts as one row. ``samples``: how many of the
        rows count, as ``evaluation_loader`` says; what only fills up is left out. Several tensors give a tuple.
        Collective. Errors: UsageError where there are fewer rows than ``samples``.
        """
        found = tuple(metrics.gather_rows(self._parts.dp, self.device, value, samples) for value in values)
        return found[0] if len(found) == 1 else found

    @property
    def not_loaded(self) -> list[str]:
        """Names that the last ``load`` left as they start (``missing``)."""
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
        """Save a step under ``directory``. Collective. Returns when the state is copied to host memory and writes on
        behind training, unless ``asynchronous`` (default: ``checkpoint.asynchronous``) is false.

        ``trainer``: JSON data of the user's, which ``load`` returns; ``texts``: small files to go along. ``score``:
        what an evaluation of this step gave, equal on all ranks; the step with the best one so far (``best``) is kept
        whatever ``checkpoint.keep_last`` says, also after a resume.
        Errors: CheckpointError where `checkpoint.tolerate_failures` saves and one more failed in a row.
        """
        self._held.away.check("save")
        self._held.known.check("save")
        self._saves.save(directory, trainer, score, higher_is_better, asynchronous=asynchronous, texts=texts)

    def is_best(self, score: float, higher_is_better: bool = False) -> bool:
        """Whether ``score`` is better than that of every step saved with one so far; NaN never is."""
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
        """Load a step, or the newest whole one of a folder, whatever layout saved it. Collective.

        A running step ends: its microbatches and their gradients are dropped, as by ``discard()``.

        ``missing``: patterns of names (``head.*``, ``tables.user``; ``*`` stands for anything) of weights, buffers and
        embedding tables that the step may lack or hold in another shape. They stay as they start, their optimizer
        state is fresh, and all else is restored exactly; of a table that only grew, the first rows load.
        ``unexpected``: patterns of names that the step may hold and the model lacks. A warning lists both, and
        ``not_loaded`` the first. ``required``: True if a folder without a step is an error; False if a folder that does
        not exist yet is none, for a run that goes on from its own folder where there is something to go on from.

        Returns what ``save`` got as ``trainer``; None where the folder holds no step.
        Errors: CheckpointError where the path does not exist or is a file; MismatchError names the first tensors that
        differ, or a pattern that matches nothing; DamagedError the damaged file and tensor.
        """
        self._held.away.check("load")
        if self._parts.accumulation.passes:
            _log.warning(
                "load: %d backward passes of the running step are dropped", self._parts.accumulation.passes
            )
        self._discard()
        return self._saves.load(directory, weights_only, missing, unexpected, required)

    def wait_for_save(self) -> None:
        """Return when a save that runs behind training is committed; raises what went wrong with it."""
        self._parts.folders.wait()

    @together
    def close(self, whole: bool = True) -> None:
        """Finish what runs behind training and give the model back as it came: without hooks, its own dropout, forward
        passes and dtypes, and its weights whole again, as precise as the masters that the optimizer updated. It trains
        on in plain torch, and ``initialize`` takes it again.

        Collective where weights or masters lie in pieces (stage 3; stages 1 and 2 with masters of a wider dtype than
        the weights): every rank gathers them. ``whole=False`` leaves the weights as they lie, for a model that is not
        used any more, and so does an exception on its way through (``finally: engine.close()``), for other ranks may
        not come. Where whole weights do not fit the memory that is free they stay so too, with a warning. Under tp, pp
        and ep a rank keeps its own part of the model either way. A second call does nothing.

        What its loaders read ahead is dropped and their threads end; a loop over one goes on, and starts them again.
        """
        if self.is_closed:
            return
        self.wait_for_save()
        self._training.tell_of_unstepped(sys.exc_info()[0] is None)
        if self._parts.accumulation.passes:  # its gradients would stay on the model
            self.discard()
        self._record.close()
        self._training.close()
        self.monitor.close()
        is_calm = sys.exc_info()[0] is None
        try:
            self._held.give_back(whole and is_calm)
        finally:  # a disk that cannot be read is let go of all the same
            if self._parts.site.tiers is not None:
                self._parts.site.tiers.close()
        if is_calm:  # else a reader may hang on what went wrong
            self._loaders.close()
        if self.world.ends_with_engine:
            self.world.release()

    def discard(self) -> None:
        """Drop the microbatches of this step and their gradients, as ``zero_grad()`` does in a plain loop; all ranks
        alike."""
        self._discard()
