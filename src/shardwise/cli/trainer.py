"""The training loop of ``shardwise train`` on one rank: the common part of runs over all kinds of data.

    made        data, model on meta, engine, loader
    each step   batches -> engine.train_step -> evaluation? -> one record -> checkpoint?
    the end     all steps, or the last epoch of the data, or evaluations that no longer improve

A signal takes effect between two steps: the ranks exchange it in the reduction that every step has anyway, so that all
stop after the same step.
"""

import contextlib
import functools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import nn

import shardwise
from shardwise.base.errors import CheckpointError, DataError, DivergedError, MismatchError, UsageError
from shardwise.base.words import bytes_text
from shardwise.checkpoint.policy import HIGHER_IS_BETTER
from shardwise.cli.best_metric import BestMetric
from shardwise.cli.evaluations import RunEvaluations
from shardwise.cli.outlook.forecast import RunOutlook
from shardwise.cli.outlook.model_copy import ModelCopy
from shardwise.cli.profile import NO_PROFILE, ProfileRequest, step_windows
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.cli.runs.run_saves import RunSaves
from shardwise.comm.collectives import Group
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.config.auto import ResolvedConfig
from shardwise.config.run import RunConfig
from shardwise.data import Loader, evaluation_batches
from shardwise.data.batched import Watch
from shardwise.engine.engine import Engine
from shardwise.engine.fit.foresee import examine_step
from shardwise.engine.step.end import StepResult
from shardwise.observe.metrics import Record, Sink, exposed_columns, slowest_columns
from shardwise.observe.progress import count_text
from shardwise.plan.placement import Tier
from shardwise.plan.plan import bytes_by_tier
from shardwise.plan.timeline import Timeline

_log = logging.getLogger(__name__)
_READING_LINE_S = 5.0
_NAMED = 5
"""Most names that a suggested command contains."""
_WHERE: dict[Tier, str] = {"device": "on this rank", "host": "in host memory", "disk": "on a disk"}


class ConversionProgress:
    """Logs the progress of a conversion of data every few seconds; nothing if it ends before that."""

    def __init__(self, what: str) -> None:
        self._what, self._said_at = what, time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Log the progress if some seconds have passed since the last line."""
        if time.monotonic() - self._said_at >= _READING_LINE_S:
            self._said_at = time.monotonic()
            _log.info("%s: %.0f%% of %s", self._what, 100 * done_bytes / total_bytes, bytes_text(total_bytes))


class Throughput:
    """Speed of the steps of this process, in samples of a kind such as ``pictures``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._samples, self.seconds = 0, 0.0

    def count(self, result: StepResult, step_s: float) -> dict[str, Any]:
        """Count one more step and return the columns that all records by samples have.

        Args:
            result: Result of the step.
            step_s: Seconds of the step.
        """
        samples = int(result.weight)
        self._samples += samples
        self.seconds += step_s
        return {
            "step": result.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "samples": samples,
            "samples_per_s": samples / step_s,
            "step_s": step_s,
        }

    def lines(self) -> list[str]:
        """Return the lines for the end of a run; none before the first step."""
        if not self._samples:
            return []
        rate = count_text(self._samples / self.seconds)
        return [
            f"{count_text(self._samples)} {self._kind} in {self.seconds:.1f} s of steps: {rate} {self._kind}/s"
        ]


def nothing_left(done: int, steps: int) -> str:
    """Return the sentence for a run that is resumed at its end."""
    return (
        f"step {done} is at or beyond train.steps {steps}: nothing to train; train.steps counts from the run's first "
        f"step, so set it above {done} to go on"
    )


def on_command_line(error: MismatchError, resume: Path) -> MismatchError:
    """Return the error with a repair for a command instead of that for a Python program.

    Args:
        error: The error.
        resume: Checkpoint from which the run was to resume.
    """
    way = (
        "Go on with the model and the optimizer that wrote it, or begin another run: --set output_dir=FOLDER"
    )
    if error.missing or error.unexpected:
        names = {"missing": error.missing, "unexpected": error.unexpected}
        allow = " ".join(
            f"--set 'init_from.{key}={list(each) if len(each) <= _NAMED else ['PATTERN', '...']}'"
            for key, each in names.items()
            if each
        )
        way += f", with what fits of its weights by --set init_from.path={resume} {allow}"
    else:
        way += f", with its weights by --set init_from.path={resume}"
    return MismatchError(error.what, way, error.missing, error.unexpected)


class OpenedData(NamedTuple):
    """Training and validation data, and the configuration with the values that follow from them."""

    config: RunConfig
    train: Any
    validation: Any | None
    fingerprint: str | None
    """Fingerprint, equal on ranks that read the same data; None for the user's own data."""


class Trainer(ABC):
    """One rank's run. Subclasses define its data, model, evaluation and records.

    Args:
        world: The ranks.
        resolved: The resolved configuration.
        folder: The run folder.
        profile: What to trace of the first steps.
    """

    record_kind: ClassVar[type[Record]]
    """Class of the records that ``step`` makes."""
    metric: ClassVar[str] = "loss"
    """Metric for ``early_stop``, and by which steps are the best if ``checkpoint.best_metric`` names no other."""

    def __init__(
        self,
        world: World,
        resolved: ResolvedConfig,
        folder: RunFolder,
        profile: ProfileRequest = NO_PROFILE,
    ) -> None:
        self.world, self.folder = world, folder
        self.profile = profile
        self.mesh = resolved.mesh
        opened = self.open_data(resolved.config)
        self.config, self.validation = opened.config, opened.validation
        self._check_data(opened.fingerprint)
        self.config = self.config.model_copy(update={"monitor": self.config.monitor.of_train()})
        model = self.make_model()
        # Before the engine cuts the model.
        copied = ModelCopy.of(model) if world.rank == 0 and self.config.train.forecast else None
        self.engine: Engine = shardwise.initialize(model, self.config, world=world)
        if self.engine.is_main or self.config.monitor.rank_seconds:
            self.engine.measure_waits()
        self.validation = self.to_read(self.validation)
        batch, data = self.config.batch, self.config.data
        assert batch.global_size and batch.micro_size and batch.accumulation, (
            "Request.load refuses a run without a batch size"
        )
        self.loader = Loader(
            self.to_read(opened.train, whole=batch.accumulation),
            global_batch=batch.global_size,
            micro_batch=batch.micro_size,
            dp_index=self.mesh.index("data", world.rank),
            dp_size=self.mesh.size("data"),
            seed=self.config.train.seed,
            shuffle=data.shuffle,
            workers=data.workers,
            epochs=self.epochs,
            watch=self.watch,
            device=world.device,
        )
        self.engine.count_batches_ahead(lambda: self.loader.ahead_bytes)
        self.waited_s = 0.0
        """Seconds of waits for data, in all steps."""
        self.timelines: tuple[Timeline, Timeline] | None = None
        """Timelines of the last step of a pipeline, predicted and measured."""
        self.outlook = RunOutlook(self.engine, folder, self.config, copied)
        """What was foreseen of this run, beside what it takes."""
        self.evaluations = RunEvaluations(self.config.train.early_stop, HIGHER_IS_BETTER[self.metric])
        higher = self._best_by.higher_is_better
        self.saves = RunSaves(self.engine, folder.checkpoints, self._content, higher)

    # What a subclass defines -------------------------------------------------------------------------------------

    @abstractmethod
    def open_data(self, config: RunConfig) -> OpenedData:
        """Open the data; the first call of a run."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Make the model, on meta if it allows that: the engine then draws each weight on the rank that keeps it."""

    def to_read(self, data: Any, whole: int = 0) -> Any:
        """Return the part of ``data`` that this rank's stages need; the engine exists when this is called.

        Args:
            data: The data.
            whole: Number of first batches that are returned in full.
        """
        return data

    @abstractmethod
    def weights(self, batches: Sequence[Any]) -> list[float] | None:
        """Return the weight of each microbatch; None: all are equal."""

    @abstractmethod
    def record(self, result: StepResult, step_s: float, is_weighted: bool) -> Record:
        """Return the row of metrics.csv.

        Args:
            result: Result of the step.
            step_s: Seconds of the step.
            is_weighted: True if ``result.weight`` is a sum of ``weights``.
        """

    @abstractmethod
    def evaluate(self) -> float:
        """Evaluate on the held-out data, keep the result, and return the value for ``early_stop``. Collective."""

    @abstractmethod
    def results(self) -> dict[str, float]:
        """Return the metrics of the last evaluation, by name."""

    @abstractmethod
    def with_evaluation(self, record: Any) -> Record:
        """Return the record of a step with the evaluation after the step."""

    @abstractmethod
    def last_words(self) -> list[str]:
        """Return lines on the trained model and the last evaluation. Collective."""

    @property
    def epochs(self) -> int | None:
        """Passes over the data after which the run ends; None: only the number of steps counts."""
        return None

    @property
    def watch(self) -> Watch | None:
        """Recorder of what threads that read clicks did, and when; None without one."""
        return None

    @property
    def predictions_bytes(self) -> int:
        """Bytes of host memory that an evaluation takes for its predictions behind its passes."""
        return 0

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state of this kind of run for a checkpoint, as JSON values. Collective."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state()`` returned."""

    # For an evaluation of a subclass's own -----------------------------------------------------------------------

    @functools.cached_property
    def ranks(self) -> Group:
        """Group of the data-parallel ranks for evaluations, separate from the steps' order of collectives."""
        policy = self.config.comm
        return self.world.group(self.mesh, "data", policy, self.world.clock(policy), Traffic())

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode inside the ``with`` block, and restore its mode afterwards."""
        was_training = self.engine.module.training
        self.engine.eval()
        try:
            with self.engine.evaluated_weights():
                yield
        finally:
            self.engine.train(was_training)

    # The run -----------------------------------------------------------------------------------------------------

    def description(self) -> str:
        """Return one line on the model, its parallelism and its memory."""
        config = self.config
        registry = self.engine.plan.registry
        parameters = sum(math.prod(info.shape) for info in registry.of_kind("parameter"))
        said = [f"{count_text(parameters)} parameters", f"ZeRO-{config.zero.stage}"]
        if self.mesh.tp > 1:
            said.append(f"tp {self.mesh.tp}" + " with sequence parallelism" * config.tensor.sequence_parallel)
        if self.mesh.pp > 1:
            here = self.mesh.places.stages_of(self.mesh.index("pp", self.world.rank), self.stages)
            said.append(
                f"{config.pipeline.schedule} with {config.batch.accumulation} microbatches through {self.stages} "
                f"stages, here {', '.join(map(str, here))}"
            )
        if config.recompute.scope != "none":
            said.append(f"recompute {config.recompute.scope}")
        tiers = bytes_by_tier(self.engine.state_bytes())
        there = ", ".join(
            f"{bytes_text(tiers[tier])} {where}" for tier, where in _WHERE.items() if tier in tiers
        )
        return ", ".join(said) + f"; model state {there}"

    @property
    def stages(self) -> int:
        """Number of pipeline stages of the whole model."""
        return self.mesh.pp * self.config.pipeline.stages_per_rank

    @property
    def is_done(self) -> bool:
        """True if nothing is left to train."""
        return self.evaluations.is_over or self.is_last_step

    @property
    def is_last_step(self) -> bool:
        """True after the last possible step."""
        return self.engine.step_count >= self.config.train.steps or self.loader.steps_left == 0

    def go_on_from(self, start: Path) -> None:
        """Load the step at ``start``, or the newest whole step in it, with the position in the data.

        Raises:
            MismatchError: if the step belongs to another model.
            UsageError: if the step was not saved by ``shardwise train``.
        """
        try:
            state = self.engine.load(start, required=False)
        except MismatchError:  # the error of another rank came as text, without the names
            try:
                examine_step(self.make_model, self.engine.plan, start)
            except MismatchError as error:
                raise on_command_line(error, start) from None
            raise
        if state is None:
            return
        if "loader" not in state:
            raise UsageError(
                f"{start}: its newest step was not saved by shardwise train and has no place in the data to go on "
                f"from; begin with its weights: init_from: {start}"
            )
        self._take_up(state)
        if self.folder.checkpoints.resolve() in (start.resolve(), start.resolve().parent):
            self.saves.step = self.engine.step_count
        _log.info("resuming from step %d of %s", self.engine.step_count, start)

    def _take_up(self, state: Mapping[str, Any]) -> None:
        """Restore the place in the data and the results so far that were saved with the loaded step."""
        self.loader.load_state(state["loader"])
        self.evaluations.load_state(dict(state))
        self.load_state(dict(state))
        self.outlook.begins_at = self.engine.step_count

    def go_on_after(self, error: DivergedError) -> None:
        """Go on from the step that the engine has loaded after an alarm of ``guard``.

        Raises:
            DivergedError: if nothing was loaded, or if the same step was loaded after the alarm before.
        """
        if error.restored_step is None or not error.trainer or error.restored_step == self.saves.restored:
            raise error
        self.saves.restored = error.restored_step
        self._take_up(error.trainer)
        if self.saves.step is not None and self.saves.step > self.engine.step_count:
            self.saves.step = self.engine.step_count
        if self.world.rank == 0:
            _log.warning("%s", error)

    def notes(self) -> list[str]:
        """Return a sentence if no step is left to train at the start."""
        done, steps = self.engine.step_count, self.config.train.steps
        if done >= steps:
            return [nothing_left(done, steps)]
        return [f"step {done} has read all epochs of the data: nothing to train"] if self.is_last_step else []

    def run(self, sink: Sink) -> bool:
        """Run all remaining steps, and return False if a signal ended them early."""
        windows = step_windows(
            self.profile, self.folder.profile, self.world.rank, self.world.device, self.engine.action_ranges
        )
        with contextlib.closing(self.steps()) as steps, contextlib.ExitStack() as closing:
            for window in windows:
                closing.callback(window.close)
            while not self.is_done:
                for window in windows:
                    window.before_step()
                record = self.step(steps)
                for window in windows:
                    window.after_step()
                sink.write(record)
                if self.engine.stop_requested:
                    self.save()
                    return False
                if self.config.export is not None and record.step % self.config.export.every == 0:
                    self.export()
                every = self.config.checkpoint.every
                if (every is not None and record.step % every == 0) or self._is_best:
                    self.save()
        self.export()
        self.save()
        return True

    def steps(self) -> Generator[list[Any]]:
        """Yield this rank's microbatches, step by step: without end, or equally many steps on every rank."""
        try:
            while self.loader.steps_left != 0:
                yield self.loader.step_batches()
        finally:
            self.loader.close()

    def step(self, steps: Iterator[list[Any]]) -> Record:
        """Run one optimizer step and, if due, an evaluation, and return the record."""
        started = time.perf_counter()
        batches = next(steps)
        waited_s = time.perf_counter() - started
        self.waited_s += waited_s
        self.engine.count_seconds("data", waited_s)
        if batches:
            self.outlook.foresee(batches[0], self.loader.steps_ahead, self.predictions_bytes)
        weights = self.weights(batches)
        with self.outlook.measuring(batches):
            result = self.train_step(batches, weights)
        step_s = time.perf_counter() - started
        if self.is_last_step or self.engine.stop_requested:
            # Before an evaluation, which is another walk with another trace.
            self.timelines = self.engine.timeline() if self.mesh.pp > 1 else None
            self.outlook.look_back()
        trace = self.engine.trace
        columns: dict[str, Any] = {
            **trace.seconds()._asdict(),
            **exposed_columns(trace.waits.seconds()),
            **slowest_columns(self.engine.slowest_rank),
            "stalled": waited_s / step_s,
        }
        record = self.record(result, step_s, weights is not None)._replace(**columns)
        every = self.config.train.eval_every
        if self.validation is not None and ((every and result.step % every == 0) or self.is_last_step):
            value, score = self.evaluate(), None
            if self.config.checkpoint.keep_best:
                score = self._best_by.value_in(self.results(), self.engine.step_count)
            self.evaluations.judge(self.engine.step_count, value, score)
            record = self.with_evaluation(record)
        return record

    def train_step(self, batches: list[Any], weights: Sequence[float] | None) -> StepResult:
        """Run one step of the engine and return its result."""
        return self.engine.train_step(batches, weights)

    @property
    def _best_by(self) -> BestMetric:
        """Metric by which the best steps are kept."""
        return BestMetric.of(self.config.checkpoint, self.metric)

    @property
    def _score(self) -> float | None:
        """Score of this step, if it was evaluated and the best steps are kept."""
        return self.evaluations.score_of(self.engine.step_count)

    @property
    def _is_best(self) -> bool:
        score = self._score
        return score is not None and self.engine.is_best(score, self._best_by.higher_is_better)

    def close(self) -> list[str]:
        """Return the lines for the end of a completed run. Collective."""
        if self.validation is not None and self.evaluations.step != self.engine.step_count:
            self.evaluate()  # a run that was resumed at its end
        return self.last_words()

    def validation_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield this rank's part of the held-out data, with the number of samples that count."""
        share = self.loader.share
        yield from evaluation_batches(
            self.validation,
            share.dp_index,
            share.dp_size,
            share.micro_batch,
            workers=self.config.data.workers,
            samples=self.config.data.validation_samples,
            seed=self.config.train.seed,
        )

    def save(self) -> None:
        """Save this step, unless it is in the run folder already. Collective.

        Raises:
            CheckpointError: if the save fails and may not fail.
        """
        started = time.perf_counter()
        self.saves.save(self._score)
        self.engine.count_seconds("save", time.perf_counter() - started)
        self.outlook.keep()

    def export(self) -> None:
        """Export the vectors of this step if the configuration says so. Collective.

        An export that fails does not end the run: the next one writes full vectors.
        """
        policy = self.config.export
        if policy is None:
            return
        try:
            self.engine.export(policy.folder or self.folder.vectors)
        except CheckpointError as error:
            _log.warning("%s; training continues and the next export writes full vectors", error)

    def finish_saving(self) -> None:
        """Wait for the last save, which must not fail. Collective.

        Raises:
            CheckpointError: if the save fails.
        """
        self.saves.finish(self._score)

    def _content(self) -> dict[str, Any]:
        """Return what a saved step contains of the run."""
        return {
            "loader": self.loader.state(),
            "config": self.config.model_dump(mode="json", exclude_none=True),
            **self.state(),
            **self.evaluations.state(),
        }

    def _check_data(self, fingerprint: str | None) -> None:
        """Check that every rank reads the same data."""
        if self.world.size == 1:
            return
        # A key of its own, because posted texts stay in the store.
        key = f"trainer/{self.world.next_engine()}/data"
        self.world.post(key, fingerprint or "")
        told = self.world.collect(key, self.config.checkpoint.timeout_s)
        others = [rank for rank, each in enumerate(told) if each != told[0]]
        if others:
            raise DataError(
                f"data: ranks {others} read other data than rank 0; every rank must see the same files, "
                f"and data.cache, if given, must not hold conversions of other files"
            )
