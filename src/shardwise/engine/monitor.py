"""Where the engine's numbers go after every step, without a word of the loop: ``monitor:`` of the configuration.

    a loop of your own   what is set under ``monitor:``; nothing is written unless asked
    shardwise train      all of ``monitor:``, defaults included, with records of its own (evaluations, tokens, MFU)

Rank 0 alone writes. Files are opened with the first step, when it is known which one that is: a run that was resumed
goes on in its ``metrics.csv``, and so does one that loads a step in between.
"""

import time
from collections.abc import Mapping

import torch
from rich.console import Console

from shardwise.config.run import RunConfig
from shardwise.engine.step import StepResult
from shardwise.memory.leftovers import LEFTOVERS
from shardwise.observe.memory import taken
from shardwise.observe.metrics import NO_SCALARS, ClickRecord, Record, Sink, StepRecord
from shardwise.observe.progress import PrintedLines, open_progress
from shardwise.observe.sinks import MonitorPolicy, Naming, Sinks, open_sinks
from shardwise.optim.schedule_policy import RangeTestPolicy
from shardwise.parallel.expert.loads import ExpertSummary
from shardwise.plan.errors import ConfigError, UsageError
from shardwise.plan.policy import nearest
from shardwise.plan.trace import Trace


class Monitor:
    """See the module's docstring; ``engine.monitor``."""

    def __init__(self, config: RunConfig, is_main: bool, device: torch.device) -> None:
        self._config, self._is_main, self._device = config, is_main, device
        self._naming = _naming(config)
        self._total_steps = _total_steps(config)
        self._asked = config.monitor.asked()
        self._watches = is_main and not self._asked.is_silent
        self._sinks = Sinks([], [])
        self._close = LEFTOVERS.keep(self, self._sinks.close, at_exit=True)
        self._last: tuple[int, float] | None = None
        """The last step that was noted, and when it was over."""
        self._resumed_from: int | None = None
        """Step that the next record goes on from, until that record is written."""
        self._unit_norms: Mapping[str, float] = {}
        """Gradient norms of the step that was over last, until its record is written."""

    def open(self, step: int, kind: type[Record] = StepRecord, best_auc: float | None = None) -> None:
        """Whoever calls this ``write``s the records itself: all that ``monitor:`` says, after ``step``."""
        self._watches = False
        self._open(self._config.monitor, step, kind, best_auc)

    def add(self, sink: Sink) -> None:
        """One more that is handed each record."""
        self._sinks.add(sink)

    def write(self, record: Record) -> None:
        """Hand a record to all sinks; the first one after a resume says which step it goes on from."""
        if self._resumed_from is not None:
            record = record._replace(resumed_from=self._resumed_from)
            self._resumed_from = None
        self._sinks.write(record)
        if self._unit_norms:
            self._sinks.write_unit_norms(record.step, self._unit_norms)
            self._unit_norms = {}

    def send(self, scalars: Mapping[str, float], step: int | None = None) -> None:
        """Numbers of your own to all monitors but ``metrics.csv``, under their own names, at ``step`` (left out:
        the last one). Nothing on ranks other than 0."""
        numbers: dict[str, float] = {}
        for tag, number in scalars.items():
            try:
                numbers[tag] = float(number)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"monitor.send: expected a number for {tag!r}, given {number!r:.100}"
                ) from None
        if self._watches and self._last is None:
            self._begin(0 if step is None else step)
        self._sinks.send(numbers, self._naming.place((self._last or (0, 0.0))[0] if step is None else step))

    def close(self) -> None:
        """Write out what is held back."""
        self._close()

    def note(
        self, result: StepResult, trace: Trace, loss_scale: float | None, experts: ExpertSummary | None
    ) -> None:
        """A step is over, in a loop that keeps no records itself."""
        if self._is_main and self._config.monitor.unit_norms:
            self._unit_norms = result.unit_norms
        if not self._watches:
            return
        now = time.perf_counter()
        if self._last is None or self._last[0] != result.step - 1:
            self._begin(result.step - 1)
            step_s = None
        else:
            step_s = now - self._last[1]
        self.write(
            StepRecord(
                step=result.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                step_s=step_s,
                **taken(self._device)._asdict(),
                loss_scale=loss_scale,
                **trace.seconds()._asdict(),
                **({} if experts is None else experts._asdict()),
            )
        )
        self._last = result.step, time.perf_counter()

    def _begin(self, step: int) -> None:
        self._open(self._asked, step, StepRecord, None)
        self._last = step, time.perf_counter()
        if self._is_main and self._total_steps is not None:
            every, breakdown = self._asked.print_every, self._asked.breakdown
            self.add(open_progress(Console(), self._total_steps, step, every, breakdown))
        elif self._asked.print_every is not None:
            self.add(PrintedLines(self._asked.print_every, self._asked.breakdown))

    def _open(self, policy: MonitorPolicy, step: int, kind: type[Record], best_auc: float | None) -> None:
        self._close()
        self._resumed_from = step or None
        if not self._is_main:
            return
        config = self._config
        self._sinks = open_sinks(
            config.output_dir,
            policy,
            step,
            config.model_dump(mode="json"),
            kind,
            best_auc,
            self._naming,
            isinstance(config.schedule, RangeTestPolicy),
        )
        self._close = LEFTOVERS.keep(self, self._sinks.close, at_exit=True)


def _total_steps(config: RunConfig) -> int | None:
    """Return the steps that ``monitor.progress`` counts up to, None without it.

    Raises:
        ConfigError: if ``monitor.progress`` is true and nobody gave ``train.steps``.
    """
    progress = config.monitor.progress
    if progress is False:
        return None
    if progress is not True:
        return progress
    if "steps" not in config.train.model_fields_set:
        raise ConfigError(
            "monitor.progress: true counts up to train.steps, which is not given; give train.steps, or the number of "
            "steps itself (monitor.progress: 1000), as loader.count_steps(epochs) returns it"
        )
    return config.train.steps


def _naming(config: RunConfig) -> Naming:
    monitor, samples = config.monitor, config.batch.global_size
    columns = {*StepRecord._fields, *ClickRecord._fields} - NO_SCALARS
    for column in monitor.tags:
        if column not in columns:
            raise ConfigError(f"monitor.tags: metrics.csv has no column {column!r}{nearest(column, columns)}")
    if monitor.axis == "steps":
        return Naming(monitor.tags)
    if samples is None:
        raise ConfigError(
            "monitor.axis: samples cannot be counted without a batch size; give batch.global_size or batch.micro_size, "
            "or axis: steps"
        )
    return Naming(monitor.tags, samples)
