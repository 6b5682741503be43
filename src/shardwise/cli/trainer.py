"""The training loop of ``shardwise train`` on one rank: what runs over text and over clicks have in common.

    made        data, model on meta, engine, loader
    each step   batches -> engine.train_step -> evaluation? -> one record -> checkpoint?
    the end     all steps, or the last epoch of the data, or evaluations that no longer get better

A signal is acted on between two steps: the ranks learn of it in the reduction that every step has anyway, so that all
stop after the same one.
"""

import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import nn

import shardwise
from shardwise.cli.profile import StepProfile
from shardwise.cli.run_folder import RunFolder
from shardwise.comm.world import World
from shardwise.config.auto import Resolved
from shardwise.config.run import RunConfig
from shardwise.data import Loader, evaluation_batches
from shardwise.data.batched import Watch
from shardwise.engine.engine import Engine
from shardwise.engine.step import StepResult
from shardwise.observe.early_stop import EarlyStop
from shardwise.observe.metrics import Record, Sink
from shardwise.observe.progress import bytes_text, count_text
from shardwise.plan.errors import CheckpointError, DataError, UsageError
from shardwise.plan.timeline import Timeline

_log = logging.getLogger(__name__)
_READING_LINE_S = 5.0


class Reading:
    """Shows the progress of a conversion of data every few seconds; nothing if it ends before that."""

    def __init__(self, what: str) -> None:
        self._what, self._said_at = what, time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if time.monotonic() - self._said_at >= _READING_LINE_S:
            self._said_at = time.monotonic()
            _log.info("%s: %.0f%% of %s", self._what, 100 * done_bytes / total_bytes, bytes_text(total_bytes))


class Opened(NamedTuple):
    """Training and validation data, and the configuration with what follows from them."""

    config: RunConfig
    train: Any
    validation: Any | None
    fingerprint: str | None
    """Equal on ranks that read the same data; None where that is the user's affair."""


class Trainer(ABC):
    """One rank's run. Subclasses say what its data, model, evaluation and records are."""

    record_kind: ClassVar[type[Record]]
    """Of the records that ``step`` makes."""
    higher_is_better: ClassVar[bool] = False
    """Of the value that ``early_stop`` looks at."""

    def __init__(self, world: World, resolved: Resolved, folder: RunFolder, profile_steps: int = 0) -> None:
        self.world, self.folder = world, folder
        self.profile_steps = profile_steps
        self.mesh = resolved.mesh
        opened = self.open_data(resolved.config)
        self.config, self.validation = opened.config, opened.validation
        self._check_data(opened.fingerprint)
        self.engine: Engine = shardwise.initialize(self.make_model(), self.config, world=world)
        registry = self.engine.plan.registry
        self.parameters = sum(math.prod(info.shape) for info in registry.of_kind("parameter"))
        batch, data = self.config.batch, self.config.data
        assert batch.global_size and batch.micro_size, "Request.load refuses a run without a batch size"
        self.micro_size = batch.micro_size
        self.dp_index, self.dp_size = self.mesh.index("dp", world.rank), self.mesh.size("dp")
        self.loader = Loader(
            opened.train,
            global_batch=batch.global_size,
            micro_batch=batch.micro_size,
            dp_index=self.dp_index,
            dp_size=self.dp_size,
            seed=self.config.train.seed,
            shuffle=data.shuffle,
            workers=data.workers,
            epochs=self.epochs,
            watch=self.watch,
        )
        self.saved_step: int | None = None
        self._failed_saves = 0
        """In a row, of saves that training waited for."""
        self.evaluated_step: int | None = None
        self.judged: float | None = None
        """What that evaluation gave, if it is of this run."""
        self.timelines: tuple[Timeline, Timeline] | None = None
        """The last step of a pipeline, predicted and measured."""
        stop = self.config.train.early_stop
        self.early_stop: EarlyStop | None = None
        if stop is not None:
            self.early_stop = EarlyStop(stop.patience, stop.min_delta, self.higher_is_better)

    # What a subclass says ----------------------------------------------------------------------------------------

    @abstractmethod
    def open_data(self, config: RunConfig) -> Opened:
        """The first thing that happens."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """On meta where the model allows it: the engine then draws each weight on the rank that keeps it."""

    @abstractmethod
    def weights(self, batches: Sequence[Any]) -> list[float] | None:
        """What each microbatch counts; None: all alike."""

    @abstractmethod
    def record(self, result: StepResult, step_s: float, is_weighted: bool) -> Record:
        """The row of metrics.csv; ``is_weighted``: ``result.weight`` is a sum of ``weights``."""

    @abstractmethod
    def evaluate(self) -> float:
        """Evaluate on the held-out data and keep the result; returns what ``early_stop`` looks at. Collective."""

    @abstractmethod
    def with_evaluation(self, record: Any) -> Record:
        """The record of a step with the evaluation after it."""

    @abstractmethod
    def last_words(self) -> list[str]:
        """Lines on the trained model and the last evaluation. Collective."""

    @property
    def epochs(self) -> int | None:
        """Passes over the data after which the run ends; None: steps alone count."""
        return None

    @property
    def watch(self) -> Watch | None:
        """Told by threads that read clicks what they did, and when."""
        return None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside all that every run has, as JSON. Collective."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""

    # The run -----------------------------------------------------------------------------------------------------

    def description(self) -> str:
        """The model, how it is cut, and what it takes, in a line."""
        config = self.config
        said = [f"{count_text(self.parameters)} parameters", f"ZeRO-{config.zero.stage}"]
        if self.mesh.tp > 1:
            said.append(f"tp {self.mesh.tp}" + " with sequence parallelism" * config.tensor.sequence_parallel)
        if self.mesh.pp > 1:
            here = range(self.mesh.index("pp", self.world.rank), self.stages, self.mesh.pp)
            said.append(
                f"{config.pipeline.schedule} with {config.batch.accumulation} microbatches through {self.stages} "
                f"stages, here {', '.join(map(str, here))}"
            )
        if config.recompute.scope != "none":
            said.append(f"recompute {config.recompute.scope}")
        state = self.engine.state_bytes()
        return ", ".join(said) + f"; model state {bytes_text(sum(state.values()))} on this rank"

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.mesh.pp * self.config.pipeline.virtual_stages

    @property
    def is_done(self) -> bool:
        """True where there is nothing left to train."""
        is_over = self.early_stop is not None and self.early_stop.is_over
        return is_over or self.is_last_step

    @property
    def is_last_step(self) -> bool:
        """True after the last step that there can be."""
        return self.engine.step_count >= self.config.train.steps or self.loader.steps_left == 0

    def go_on_from(self, start: Path) -> None:
        """Load the step at ``start``, or the newest whole one in it, with the position in the data."""
        state = self.engine.load(start)
        if state is None:
            return
        if "loader" not in state:
            raise UsageError(
                f"{start}: its newest step was not saved by shardwise train and has no place in the data to go on "
                f"from; begin with its weights: init_from: {start}"
            )
        self.loader.load_state(state["loader"])
        if self.early_stop is not None and "early_stop" in state:
            self.early_stop.load_state(state["early_stop"])
        self.load_state(state)
        if self.folder.checkpoints.resolve() in (start.resolve(), start.resolve().parent):
            self.saved_step = self.engine.step_count
        _log.info("resuming from step %d of %s", self.engine.step_count, start)

    def run(self, sink: Sink) -> bool:
        """All steps that remain; False where a signal ended them early."""
        trace = self.folder.profile / f"rank_{self.world.rank:05d}.json"
        profile = StepProfile(trace, self.profile_steps, self.world.device)
        with contextlib.closing(self.steps()) as steps:
            try:
                while not self.is_done:
                    profile.before_step()
                    record = self.step(steps)
                    profile.after_step()
                    sink.write(record)
                    if self.engine.stop_requested:
                        self.save()
                        return False
                    every = self.config.checkpoint.every
                    if (every is not None and record.step % every == 0) or self._is_best:
                        self.save()
            finally:
                profile.close()
        self.save()
        return True

    def steps(self) -> Generator[list[Any]]:
        """This rank's microbatches, step by step; without end, or as many steps on every rank."""
        while self.loader.steps_left != 0:
            yield self.loader.step_batches()

    def step(self, steps: Iterator[list[Any]]) -> Record:
        """One optimizer step and, where it is due, an evaluation."""
        started = time.perf_counter()
        batches = next(steps)
        weights = self.weights(batches)
        result = self.train_step(batches, weights)
        step_s = time.perf_counter() - started
        if self.is_last_step or self.engine.stop_requested:
            self.timelines = self.engine.timeline()  # before an evaluation, which is another walk
        record = self.record(result, step_s, weights is not None)
        every = self.config.train.eval_every
        if self.validation is not None and ((every and result.step % every == 0) or self.is_last_step):
            self._judge(self.evaluate())
            record = self.with_evaluation(record)
        return record

    def train_step(self, batches: list[Any], weights: Sequence[float] | None) -> StepResult:
        """The engine's."""
        return self.engine.train_step(batches, weights)

    def _judge(self, value: float) -> None:
        """Whether evaluations still get better: all ranks see the same value, so all decide alike."""
        step, stop = self.engine.step_count, self.early_stop
        self.evaluated_step, self.judged = step, value
        if stop is not None and stop.update(step, value):
            _log.info(
                "the last %d evaluations were no better than %.5f after step %d: the run ends",
                stop.waited,
                stop.best,
                stop.best_step,
            )

    @property
    def _has_score(self) -> bool:
        """This step was evaluated, and the best one is to be kept."""
        keeps = self.config.checkpoint.keep_best and self.judged is not None
        return keeps and self.evaluated_step == self.engine.step_count

    @property
    def _is_best(self) -> bool:
        return (
            self._has_score
            and self.judged is not None
            and self.engine.is_best(self.judged, self.higher_is_better)
        )

    def close(self) -> list[str]:
        """What is said at the end of a run that went through. Collective."""
        if self.validation is not None and self.evaluated_step != self.engine.step_count:
            self.evaluate()  # a run that was resumed at its end
        return self.last_words()

    def validation_batches(self) -> Iterator[tuple[Any, int]]:
        """This rank's part of the held-out data, with the number of samples that count."""
        yield from evaluation_batches(
            self.validation,
            self.dp_index,
            self.dp_size,
            self.micro_size,
            workers=self.config.data.workers,
            samples=self.config.data.validation_samples,
            seed=self.config.train.seed,
        )

    def save(self, is_last: bool = False) -> None:
        """Save this step, unless it lies in the run folder already. A save that fails does not end the run, unless
        ``checkpoint.tolerate_failures`` of them have failed in a row. Errors: CheckpointError."""
        if self.saved_step != self.engine.step_count:
            trainer = {
                "loader": self.loader.state(),
                "config": self.config.model_dump(mode="json", exclude_none=True),
                **self.state(),
            }
            if self.early_stop is not None:
                trainer["early_stop"] = self.early_stop.state()
            try:
                score = self.judged if self._has_score else None
                self.engine.save(
                    self.folder.checkpoints, trainer, score=score, higher_is_better=self.higher_is_better
                )
            except CheckpointError as error:
                policy = self.config.checkpoint
                self._failed_saves += 1
                if is_last or policy.asynchronous or self._failed_saves > policy.tolerate_failures:
                    raise  # behind training they are counted where they fail
                _log.warning("%s; training continues and the next save tries again", error)
                return
            self._failed_saves = 0
            self.saved_step = self.engine.step_count

    def finish_saving(self) -> None:
        """Wait for the last save, which a run cannot do without: one that failed is tried once more. Collective."""
        try:
            self.engine.wait_for_save()
        except CheckpointError as error:
            _log.warning("the last save of the run is tried once more: %s", error)
            self.saved_step = None
        self.save(is_last=True)
        self.engine.wait_for_save()

    def _check_data(self, fingerprint: str | None) -> None:
        """Every rank reads the same data."""
        if self.world.size == 1:
            return
        key = f"trainer/{self.world.next_engine()}/data"  # a key of its own: what was once posted stays
        self.world.post(key, fingerprint or "")
        told = self.world.collect(key, self.config.checkpoint.timeout_s)
        others = [rank for rank, each in enumerate(told) if each != told[0]]
        if others:
            raise DataError(
                f"data: ranks {others} read other data than rank 0; every rank must see the same files, "
                f"and data.cache, if given, must not hold conversions of other files"
            )
