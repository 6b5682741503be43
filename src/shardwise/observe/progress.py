"""Progress of the run on a terminal: a live bar on a terminal, one line every few seconds in a pipe.

Both are sinks (``metrics.py``) that only rank 0 opens, and both show the same words. Time left is the mean time of
recent steps, with a share of the evaluations and checkpoints so far, times the steps that remain.
"""

import logging
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from shardwise.base.words import bytes_text
from shardwise.observe.log import PrintableFormatter, RankFormatter
from shardwise.observe.metrics import Record, Sink

_PACE_MEMORY = 0.95
"""Weight of the past in the mean time per step: the last 20 steps or so."""

_LEAST_BAR = 11
"""Fewest characters of the bar, with the space after it."""


def count_text(value: float) -> str:
    """Return a count in about three figures: ``12.3k``."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return (
                f"{value / factor:.3g}{letter}" if value < 999.5 * factor else f"{value / factor:.0f}{letter}"
            )
    return f"{value:.3g}"


def duration_text(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds: ``0:01:23``."""
    whole = int(seconds + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def step_time_text(seconds: float) -> str:
    """Return seconds as text: ``82 ms`` or ``1.84 s``."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


_SAID: Mapping[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "val_loss": lambda value: f"val {value:.4f}",
    "log_loss": lambda value: f"log loss {value:.4f}",
    "auc": lambda value: f"AUC {value:.4f}",
    "accuracy": lambda value: f"accuracy {value:.4f}",
    "tokens_per_s": lambda value: f"{count_text(value)} tokens/s",
    "samples_per_s": lambda value: f"{count_text(value)} samples/s",
    "step_s": lambda value: f"{step_time_text(value)}/step",
    "stalled": lambda value: f"waits {100 * value:.0f}%",
    "expert_load": lambda value: f"expert load {value:.2f}",
    "expert_drops": lambda value: f"drops {100 * value:.1f}%",
    "router_entropy": lambda value: f"entropy {value:.2f}",
    "memory": lambda value: f"memory {bytes_text(value)}",
    "memory_allocated": lambda value: f"allocated {bytes_text(value)}",
    "memory_reserved": lambda value: f"reserved {bytes_text(value)}",
    "mfu": lambda value: f"MFU {100 * value:.1f}%",
}
"""Text of each column, in the order of the output."""
_BREAKDOWN: Mapping[str, Callable[[float], str]] = {
    "forward_s": lambda value: f"forward {step_time_text(value)}",
    "backward_s": lambda value: f"backward {step_time_text(value)}",
    "update_s": lambda value: f"update {step_time_text(value)}",
    "exposed_s": lambda value: f"exposed {step_time_text(value)}",
}
"""Text of the columns that ``monitor.breakdown`` adds."""

_OF_EVALUATIONS = ("val_loss", "log_loss", "auc", "accuracy")
_NEEDED_LEAST_FIRST = (
    "exposed_s", "update_s", "backward_s", "forward_s", "memory_allocated", "memory_reserved", "memory",
    "step_s", "mfu", "stalled", "val_loss", "log_loss",
    "router_entropy", "expert_drops", "expert_load", "tokens_per_s", "samples_per_s", "auc", "accuracy", "left",
)  # fmt: skip


def words(record: Record, left_s: float | None, breakdown: bool = False) -> dict[str, str]:
    """Return the texts of one step by column, in order; unknown columns are left out.

    Args:
        record: Record of the step.
        left_s: Seconds left; None: unknown.
        breakdown: Add the seconds of the parts of a step.
    """
    known = record._asdict()
    texts = {**_SAID, **_BREAKDOWN} if breakdown else _SAID
    said = {name: text(known[name]) for name, text in texts.items() if known.get(name) is not None}
    if left_s is not None:
        said["left"] = f"{duration_text(left_s)} left"
    return said


def fitting(said: dict[str, str], width: int) -> str:
    """Return as many texts of ``said`` as fit into ``width`` characters, dropping the least needed first."""
    said = dict(said)
    for name in _NEEDED_LEAST_FIRST:
        if len("  ".join(said.values())) <= width:
            break
        said.pop(name, None)
    return "  ".join(said.values())


class StepPace:
    """Wall time per step and time left; the first step, which warms everything up, only starts the clock.

    The time of steps is a mean with more weight on recent steps. The time between steps (evaluations, checkpoints) is a
    mean over the whole run, because a recent evaluation does not mean that more will follow soon.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self._total_steps, self._clock = total_steps, clock
        self._last: float | None = None
        self._weight = self._sum = 0.0
        self._between_s, self._steps = 0.0, 0

    def left_s(self, step: int, step_s: float | None = None) -> float | None:
        """Record that ``step`` is done and return the seconds that the rest will take; None while unknown.

        Args:
            step: The step.
            step_s: Seconds of the step itself; None: all time since the last call.
        """
        now = self._clock()
        if self._last is not None:
            wall_s = now - self._last
            own_s = wall_s if step_s is None else min(step_s, wall_s)
            self._weight = _PACE_MEMORY * self._weight + 1
            self._sum = _PACE_MEMORY * self._sum + own_s
            self._between_s += wall_s - own_s
            self._steps += 1
        self._last = now
        if not self._steps:
            return None
        return max(0, self._total_steps - step) * (self._sum / self._weight + self._between_s / self._steps)


class ConsoleHandler(logging.Handler):
    """Handler that prints log lines above the bar: plain text, or with ``rank`` the lines of that rank's log file."""

    def __init__(self, console: Console, rank: int | None = None) -> None:
        super().__init__(logging.INFO)
        self._console, self._is_log = console, rank is not None
        self.setFormatter(PrintableFormatter() if rank is None else RankFormatter(rank))

    def emit(self, record: logging.LogRecord) -> None:
        """Print one log record; a warning is marked as a warning."""
        is_plain = self._is_log or record.levelno < logging.WARNING
        label = "" if is_plain else f"{record.levelname.lower()}: "
        self._console.print(label + self.format(record), markup=False, highlight=False, soft_wrap=True)


class LineSink:
    """Sink for a pipe: the first step, the last, every evaluation, and a line at intervals between them.

    Args:
        console: Console to print to.
        total_steps: Steps of the run.
        every_s: Seconds between two lines.
        clock: Function that returns seconds.
        every_steps: Steps between two lines, instead of ``every_s``.
        breakdown: Add the seconds of the parts of a step.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        every_steps: int | None = None,
        breakdown: bool = False,
    ) -> None:
        self._console, self._total_steps, self._every_s, self._clock = console, total_steps, every_s, clock
        self._every_steps, self._breakdown = every_steps, breakdown
        self._pace = StepPace(total_steps, clock)
        self._printed_at: float | None = None
        self._held_back: str | None = None

    def write(self, record: Record) -> None:
        """Print the step, or hold it back in case it is the last."""
        said = words(record, self._pace.left_s(record.step, record.step_s), self._breakdown)
        line = f"step {record.step}/{self._total_steps}  " + "  ".join(said.values())
        due = self._printed_at is None or self._is_due(record.step, self._clock() - self._printed_at)
        if due or record.validation is not None or record.step == self._total_steps:
            self._print(line)
        else:
            self._held_back = line

    def _is_due(self, step: int, since_s: float) -> bool:
        return since_s >= self._every_s if self._every_steps is None else step % self._every_steps == 0

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._printed_at, self._held_back = self._clock(), None

    def close(self) -> None:
        """Print the last step if it was held back."""
        if self._held_back is not None:
            self._print(self._held_back)


class BarSink:
    """Sink for a terminal, with one live line."""

    def __init__(
        self,
        console: Console,
        total_steps: int,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        breakdown: bool = False,
    ) -> None:
        self._breakdown = breakdown
        self._pace = StepPace(total_steps, clock)
        self._total_steps = total_steps
        self._evaluated: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=_LEAST_BAR - 1)),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            console=console,
            refresh_per_second=5,
            expand=True,
        )
        self._task: TaskID = self._progress.add_task("starting", total=total_steps, completed=first_step)
        self._progress.start()

    def write(self, record: Record) -> None:
        """Move the bar and update its text."""
        known = record._asdict()
        self._evaluated |= {name: known[name] for name in _OF_EVALUATIONS if known.get(name) is not None}
        left_s = self._pace.left_s(record.step, record.step_s)
        said = words(record._replace(**self._evaluated), left_s, self._breakdown)  # type: ignore[arg-type]
        taken = len(f"step {record.step}/{self._total_steps} ") + _LEAST_BAR
        text = fitting(said, self._progress.console.width - taken)
        self._progress.update(self._task, completed=record.step, description=text)

    def close(self) -> None:
        """Draw the bar once more and show the cursor again."""
        self._progress.stop()


class PrintedLines:
    """Sink for a user's own loop, which prints a line every few steps."""

    def __init__(self, every_steps: int, breakdown: bool = False) -> None:
        self._every_steps, self._breakdown = every_steps, breakdown

    def write(self, record: Record) -> None:
        """Print the step if its number divides by the interval."""
        if record.step % self._every_steps == 0:
            said = words(record, None, self._breakdown)
            rate = "" if record.lr is None else f"  lr {record.lr:.3g}"
            print(f"step {record.step}{rate}  " + "  ".join(said.values()), flush=True)

    def close(self) -> None:
        """Do nothing, because no line is held back."""


def open_progress(
    console: Console,
    total_steps: int,
    first_step: int = 0,
    every_steps: int | None = None,
    breakdown: bool = False,
) -> Sink:
    """Return a bar for a terminal, or lines for any other console.

    Args:
        console: Console to print to.
        total_steps: Steps of the run.
        first_step: Step at which the run starts.
        every_steps: Steps between two lines; None: lines by time.
        breakdown: Add the seconds of the parts of a step.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        return BarSink(console, total_steps, first_step, breakdown=breakdown)
    return LineSink(console, total_steps, every_steps=every_steps, breakdown=breakdown)
