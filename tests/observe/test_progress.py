import io
import logging

import pytest
from rich.console import Console

from shardwise.observe import progress
from shardwise.observe.metrics import ClickRecord, StepRecord
from shardwise.observe.progress import BarSink, ConsoleHandler, LineSink, open_progress


class Pipe:
    """A console that writes into a pipe, and a clock that the test turns."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.console = Console(file=self.text, width=40)
        self.now = 0.0

    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()


def steps_printed(pipe: Pipe) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in pipe.lines()]


def test_a_pipe_gets_the_first_step_the_last_and_one_line_every_few_seconds() -> None:
    pipe = Pipe()
    lines = LineSink(pipe.console, 100, every_s=5.0, clock=lambda: pipe.now)
    for step in range(1, 101):
        pipe.now += 1.0
        lines.write(StepRecord(step, 1.0))
    lines.close()
    assert steps_printed(pipe) == [1, *range(6, 100, 5), 100]


def test_the_step_at_which_a_run_stopped_early_is_printed() -> None:
    pipe = Pipe()
    lines = LineSink(pipe.console, 100, clock=lambda: 0.0)
    for step in (1, 2, 3):
        lines.write(StepRecord(step, 1.0))
    lines.close()
    assert steps_printed(pipe) == [1, 3]


def test_every_evaluation_is_printed() -> None:
    pipe = Pipe()
    lines = LineSink(pipe.console, 100, clock=lambda: 0.0)
    for step in range(1, 6):
        lines.write(StepRecord(step, 1.0, 2.5 if step == 3 else None))
    assert steps_printed(pipe) == [1, 3]
    assert "val 2.5000" in pipe.lines()[1]


def test_a_line_says_what_is_known_and_nothing_else() -> None:
    pipe = Pipe()
    lines = LineSink(pipe.console, 20, every_s=0.0, clock=lambda: pipe.now)
    lines.write(StepRecord(1, 2.34567))
    pipe.now = 2.0
    lines.write(StepRecord(2, 2.0, tokens_per_s=12345, step_s=0.08251, memory=3 * 2**30, mfu=0.4136))
    assert pipe.lines() == [
        "step 1/20  loss 2.3457",
        "step 2/20  loss 2.0000  12.3k tokens/s  82.5 ms/step  memory 3.0 GiB  MFU 41.4%  0:00:36 left",
    ], "18 steps of 2 s; no line is broken at the width of a terminal that is not there"


def test_a_pipe_gets_lines_and_a_terminal_gets_a_bar() -> None:
    assert isinstance(open_progress(Console(file=io.StringIO()), 10), LineSink)
    bar = open_progress(Console(file=io.StringIO(), force_terminal=True, width=120), 10)
    bar.close()
    assert isinstance(bar, BarSink)


def test_the_bar_shows_the_step_and_the_last_validation_loss() -> None:
    text = io.StringIO()
    bar = BarSink(Console(file=text, force_terminal=True, width=160), 10, clock=lambda: 0.0)
    bar.write(StepRecord(1, 3.0, 2.75))
    bar.write(StepRecord(2, 2.5, step_s=1.5))
    bar.close()
    last = text.getvalue()
    assert "step 2/10" in last and "loss 2.5000" in last and "val 2.7500" in last and "1.50 s/step" in last
    assert "\x1b[?25h" in last, "the cursor is given back"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_bar_keeps_to_one_line_and_never_cuts_the_step(width: int) -> None:
    text = io.StringIO()
    ticks = iter(range(100))
    bar = BarSink(
        Console(file=text, force_terminal=True, width=width, color_system=None),
        1000,
        clock=lambda: float(next(ticks)),
    )
    bar.write(StepRecord(1, 3.0, 2.75))
    bar.write(StepRecord(400, 2.5, None, 1.0, 1e-3, 4096, 12345.0, 0.25, 2**30, 1e12, 0.1, 0.4))
    bar.close()
    lines = text.getvalue().rpartition("\r")[2].splitlines()
    line = lines[0]
    assert len(lines) == 2, "the second holds the cursor alone"
    assert "step 400/1000" in line and "loss 2.5000" in line
    assert ("val 2.7500" in line) == (width >= 80)
    assert ("MFU 40.0%" in line and "1.0 GiB" in line) == (width >= 120)


def test_log_lines_pass_through_the_console_as_plain_text() -> None:
    pipe = Pipe()
    handler = ConsoleHandler(pipe.console)
    for level, text in ((logging.INFO, "saved [bold]x[/bold]"), (logging.WARNING, "slow")):
        handler.handle(logging.LogRecord("shardwise", level, "", 0, text, None, None))
    assert pipe.lines() == ["saved [bold]x[/bold]", "warning: slow"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1234, "1.23k"), (999_600, "1000k"), (2.5e6, "2.5M"), (1e9, "1G")],
)
def test_counts(value: float, text: str) -> None:
    assert progress.count_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (90000, "25:00:00")]
)
def test_durations(value: float, text: str) -> None:
    assert progress.duration_text(value) == text


def test_a_click_through_model_s_words() -> None:
    said = progress.words(ClickRecord(3, 0.5, 0.45, 0.78125, samples_per_s=163e3, step_s=0.025, rows=5), 61.0)
    assert list(said.values()) == [
        "loss 0.5000", "log loss 0.4500", "AUC 0.7812", "163k samples/s", "25 ms/step", "0:01:01 left",
    ]  # fmt: skip
    assert progress.fitting(said, 40) == "loss 0.5000  AUC 0.7812  0:01:01 left", "the AUC goes last but one"


def test_the_bar_keeps_the_last_auc() -> None:
    text = io.StringIO()
    bar = BarSink(Console(file=text, force_terminal=True, width=160), 10, clock=lambda: 0.0)
    bar.write(ClickRecord(1, 0.6, 0.55, 0.75))
    bar.write(ClickRecord(2, 0.5))
    bar.close()
    assert "loss 0.5000  log loss 0.5500  AUC 0.7500" in text.getvalue()


def test_an_evaluation_counts_in_the_time_left_by_its_share() -> None:
    now = 0.0
    pace = progress.StepPace(100, lambda: now)
    for step in range(1, 52):
        now += 1.0 if step != 51 else 26.0  # one evaluation of 25 s
        left_s = pace.left_s(step, 1.0)
    assert left_s == pytest.approx(49 * (1.0 + 25.0 / 50))
