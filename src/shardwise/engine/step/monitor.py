"""Monitor: the engine's records of every step, sent to the sinks that ``monitor:`` of the configuration names.

    a loop of your own   the keys that are set under ``monitor:``; without such a key nothing is written
    shardwise train      all of ``monitor:``, defaults included, with its own records (evaluations, tokens, MFU)

Only rank 0 writes. Files are opened after the first step, whose number shows whether the run was resumed: a run that
was resumed, or that has loaded a step in between, continues its ``metrics.csv``.
"""

import time
from collections.abc import Mapping

import torch
from rich.console import Console

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.policy import nearest
from shardwise.config.run import RunConfig
from shardwise.engine.step.end import StepResult
from shardwise.memory.leftovers import LEFTOVERS
from shardwise.observe.memory import taken
from shardwise.observe.metrics import (
    NO_SCALARS,
    ClickRecord,
    Record,
    Sink,
    StepRecord,
    exposed_columns,
    slowest_columns,
)
from shardwise.observe.progress import PrintedLines, open_progress
from shardwise.observe.sinks import AllSinks, MetricNames, MonitorPolicy, open_sinks
from shardwise.observe.stragglers import SlowestRank
from shardwise.optim.schedule_policy import RangeTestPolicy
from shardwise.parallel.expert.loads import ExpertSummary
from shardwise.plan.trace import Trace


class Monitor:
    """Sends the records of every step to files, pictures and services; ``engine.monitor``.

    Args:
        config: the resolved configuration.
        is_main: True on rank 0.
        device: the device of this rank.
    """

    def __init__(self, config: RunConfig, is_main: bool, device: torch.device) -> None:
        self._config, self._is_main, self._device = config, is_main, device
        self._naming = _naming(config)
        self._total_steps = _total_steps(config)
        self._asked = config.monitor.asked()
        self._watches = is_main and not self._asked.is_silent
        self._sinks = AllSinks([], [])
        self._close = LEFTOVERS.keep(self, self._sinks.close, at_exit=True)
        self._last: tuple[int, float] | None = None
        """Number of the last step that was recorded, and the time of its end."""
        self._resumed_from: int | None = None
        """Step that the run was resumed from, until the next record is written."""
        self._unit_norms: Mapping[str, float] = {}
        """Gradient norms of the last step by Unit, until its record is written."""

    @property
    def records_steps(self) -> bool:
        """True if this rank writes a record of every step."""
        return self._watches

    def open(self, step: int, kind: type[Record] = StepRecord, best_auc: float | None = None) -> None:
        """Open all sinks of ``monitor:``, defaults included, for a caller that writes the records itself.

        Args:
            step: the step that the run continues from; 0 for a new run.
            kind: class of the records.
            best_auc: AUC of the best possible model, or None.
        """
        self._watches = False
        self._open(self._config.monitor, step, kind, best_auc)

    def add(self, sink: Sink) -> None:
        """Add a sink, which gets every record from now on."""
        self._sinks.add(sink)

    def write(self, record: Record) -> None:
        """Write a record to all sinks; the first record after a resume contains the step that the run resumed from."""
        if self._resumed_from is not None:
            record = record._replace(resumed_from=self._resumed_from)
            self._resumed_from = None
        self._sinks.write(record)
        if self._unit_norms:
            self._sinks.write_unit_norms(record.step, self._unit_norms)
            self._unit_norms = {}

    def send(self, scalars: Mapping[str, float], step: int | None = None) -> None:
        """Send numbers of your own to all monitors except ``metrics.csv``. Ranks other than 0 send nothing.

        Args:
            scalars: numbers by name; the names are used as they are.
            step: the step of the numbers; None: the last step.

        Raises:
            UsageError: if a value is not a number.
        """
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
        """Write buffered records and close all sinks."""
        self._close()

    def note(
        self,
        result: StepResult,
        trace: Trace,
        loss_scale: float | None,
        experts: ExpertSummary | None,
        slowest: SlowestRank | None = None,
    ) -> None:
        """Record a step that is over, unless the caller of ``open`` writes the records.

        Args:
            result: result of the step.
            trace: the Actions of the step, with their seconds.
            loss_scale: the loss scale under fp16, else None.
            experts: loads of the experts, or None.
            slowest: slowest rank of the step before, or None.
        """
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
                **exposed_columns(trace.waits.seconds()),
                **slowest_columns(slowest),
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
    """Return the number of steps of ``monitor.progress``; None without it.

    Raises:
        ConfigError: if ``monitor.progress`` is true and ``train.steps`` is not given.
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


def _naming(config: RunConfig) -> MetricNames:
    monitor, samples = config.monitor, config.batch.global_size
    columns = {*StepRecord._fields, *ClickRecord._fields} - NO_SCALARS
    for column in monitor.tags:
        if column not in columns:
            raise ConfigError(f"monitor.tags: metrics.csv has no column {column!r}{nearest(column, columns)}")
    if monitor.axis == "steps":
        return MetricNames(monitor.tags)
    if samples is None:
        raise ConfigError(
            "monitor.axis: samples cannot be counted without a batch size; give batch.global_size or batch.micro_size, "
            "or axis: steps"
        )
    return MetricNames(monitor.tags, samples)
