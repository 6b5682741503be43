"""Work of the lanes of a run with embedding tables over time: reading, keys, compute, and the waits of compute.

    read       reader threads       a batch from its file              several steps ahead
    keys       one thread           to the device, distinct keys,      one step ahead
                                    their exchange
    disk       the keys' thread     rows of tables with tiers, read    one step ahead; only where there are any
    compute    the main thread      vectors, forward, backward, step
    waits      the main thread      for other ranks, inside compute    exposed communication (plan/waits.py)

    Loader(..., watch=lanes.watch)         engine.prefetch(loader, lanes=lanes)
    spans = lanes.window()
    draw_picture({"rank 0": spans}, "lanes.png", lanes.rows_text(spans))
    print(draw_text(lanes.figures(spans)))

A ring keeps the last steps, so that recording costs a microsecond a span and no memory that grows. A picture shows one
range of time: all that the lanes did in it, for whichever step. The table shows steps: all that the lanes did for them,
at whatever time. Times are those of ``time.perf_counter``.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Literal, NamedTuple, get_args

from shardwise.observe.bars import PALETTE, PicturePanel, SpanBar, draw_bars

LaneName = Literal["read", "keys", "disk", "compute", "waits"]
_ALL_LANES: tuple[LaneName, ...] = get_args(LaneName)
LANES: tuple[LaneName, ...] = tuple(lane for lane in _ALL_LANES if lane != "disk")
"""The lanes of every run."""
_KEPT_STEPS = 64
_KEPT_SPANS = 32 * _KEPT_STEPS
"""Spans kept of reading and of keys: a step is read in as many pieces as it has microbatches, some time before it
computes.
"""
_STEPS = 6
"""Steps in a picture."""
_KEPT_WAITS = 256 * _KEPT_STEPS
"""Spans kept of waits: a step waits once for every collective and message."""


class LaneSpan(NamedTuple):
    """Work of one lane for one step, in seconds of one clock."""

    lane: LaneName
    step: int
    start_s: float
    stop_s: float
    asked_s: float | None = None
    """Time at which compute, done with the step before and all work in between, requested this step; None in other
    lanes.
    """


class StepFigures(NamedTuple):
    """Milliseconds that the lanes spent on one step. None: no work, or none was recorded."""

    step: int
    read_ms: float | None
    keys_ms: float | None
    compute_ms: float | None
    keys_ahead_ms: float | None
    """Time between the end of the step's keys and the start of its compute."""
    waited_ms: float | None
    """Time between the request for the step and the start of its compute."""
    exposed_ms: float | None = None
    """Time of compute in which it waited for other ranks."""
    hits: int | None = None
    """Rows of tables with tiers that were in memory when the step needed them; None, as the next two, without any."""
    misses: int | None = None
    """Rows that the step waited for, because they were on a disk or new."""
    stall_ms: float | None = None
    """Time of compute in which it waited for these rows."""


_OF_ROWS = ("hits", "misses", "stall_ms")
"""Columns that the table has only if there are tables with tiers."""


class LaneRows(NamedTuple):
    """Rows of tables with tiers in one step of a rank."""

    hits: int
    misses: int
    stall_s: float


class LaneRecorder:
    """Recorder of spans from any thread, which keeps the last spans.

    Args:
        global_batch: Samples of a step, because readers count positions in samples.
    """

    def __init__(self, global_batch: int = 1):
        self._global_batch = global_batch
        kept = {"compute": _KEPT_STEPS, "waits": _KEPT_WAITS}
        self._kept: dict[LaneName, deque[LaneSpan]] = {
            lane: deque(maxlen=kept.get(lane, _KEPT_SPANS)) for lane in _ALL_LANES
        }
        self._rows: deque[tuple[int, LaneRows]] = deque(maxlen=_KEPT_STEPS)
        self.depth = 0
        """Number of steps by which keys go ahead of compute."""

    def record(
        self, lane: LaneName, step: int, start_s: float, stop_s: float, asked_s: float | None = None
    ) -> None:
        """Record one span.

        Args:
            lane: The lane.
            step: The step.
            start_s: Start of the work.
            stop_s: End of the work.
            asked_s: Time at which compute requested the step.
        """
        self._kept[lane].append(LaneSpan(lane, step, start_s, stop_s, asked_s))

    def watch(self, position: int, start_s: float, stop_s: float) -> None:
        """Record a span of a reader of a ``Loader``.

        Args:
            position: Position of the step's first sample.
            start_s: Start of the work.
            stop_s: End of the work.
        """
        self.record("read", position // self._global_batch + 1, start_s, stop_s)

    def note_rows(self, step: int, rows: LaneRows) -> None:
        """Record the rows of tables with tiers that a step needed."""
        self._rows.append((step, rows))

    def rows_text(self, window: Sequence[LaneSpan]) -> str:
        """Return what the steps that computed in ``window`` found in memory, as text; "" without tables with tiers."""
        found = [each for each in self.figures(window) if each.hits is not None]
        hits, misses = sum(each.hits or 0 for each in found), sum(each.misses or 0 for each in found)
        if not hits + misses:
            return ""
        stall_ms = sum(each.stall_ms or 0.0 for each in found) / len(found)
        return (
            f"{hits / (hits + misses):.1%} of the rows in memory, {misses / len(found):.0f} missed and "
            f"{stall_ms:.2g} ms of stalls a step"
        )

    @property
    def spans(self) -> list[LaneSpan]:
        """All spans that are kept, by start."""
        return sorted((span for kept in self._kept.values() for span in list(kept)), key=lambda s: s.start_s)

    def window(self, steps: int = _STEPS) -> list[LaneSpan]:
        """Return all spans in the time of ``steps`` consecutive steps of middle length, chosen from the kept steps.

        The window has fewer steps if the run had no more, or had no more between two evaluations.
        """
        runs = _unbroken(list(self._kept["compute"]))
        steps = min(steps, max(map(len, runs)))
        if not steps:
            return []
        choice = [run[at : at + steps] for run in runs for at in range(len(run) - steps + 1)]
        choice.sort(key=lambda spans: spans[-1].stop_s - spans[0].start_s)
        shown = choice[len(choice) // 2]
        first, last = shown[0].start_s, shown[-1].stop_s
        return [span for span in self.spans if span.start_s < last and span.stop_s > first]

    def figures(self, window: Sequence[LaneSpan]) -> list[StepFigures]:
        """Return the figures of the steps that computed in ``window``.

        Other lanes may have worked for these steps before the window.
        """
        spans, rows_of = self.spans, dict(self._rows)
        found = []
        for span in window:
            if span.lane != "compute":
                continue
            read, keys, waits = (
                [s for s in spans if s.lane == lane and s.step == span.step]
                for lane in ("read", "keys", "waits")
            )
            rows = rows_of.get(span.step)
            found.append(
                StepFigures(
                    span.step,
                    _sum_ms(read),
                    _sum_ms(keys),
                    _sum_ms([span]),
                    (span.start_s - max(s.stop_s for s in keys)) * 1e3 if keys else None,
                    None if span.asked_s is None else (span.start_s - span.asked_s) * 1e3,
                    _sum_ms(waits),
                    *((None, None, None) if rows is None else (rows.hits, rows.misses, rows.stall_s * 1e3)),
                )
            )
        return found


def _unbroken(compute: Sequence[LaneSpan]) -> list[list[LaneSpan]]:
    """Return runs of steps without a long break between them, such as an evaluation or a save.

    A break is long if compute's thread did other work for longer than a step of middle length takes.
    """
    runs: list[list[LaneSpan]] = [[]]
    longest_s = median(span.stop_s - span.start_s for span in compute) if compute else 0.0
    for span in compute:
        aside_s = span.asked_s - runs[-1][-1].stop_s if runs[-1] and span.asked_s is not None else 0.0
        if aside_s > longest_s:
            runs.append([])
        runs[-1].append(span)
    return runs


def draw_text(figures: Sequence[StepFigures]) -> str:
    """Return a table with a row for each step and their means, in milliseconds. With depth 0, compute includes keys."""
    if not figures:
        return ""
    has_rows = any(each.hits is not None for each in figures)
    fields = [name for name in StepFigures._fields if has_rows or name not in _OF_ROWS]
    columns = [name.replace("_", " ") for name in fields]
    shown = [[getattr(each, name) for name in fields] for each in figures]
    body = [[str(row[0]), *map(_number, row[1:])] for row in shown]
    means = [
        [value for value in column if value is not None] for column in list(zip(*shown, strict=True))[1:]
    ]
    body.append(["mean", *(_number(float(mean(each)) if each else None) for each in means)])
    widths = [max(map(len, column)) for column in zip(columns, *body, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [columns, *body]
    )


def draw_picture(
    panels: Mapping[str, Sequence[LaneSpan]], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draw lanes above one another into a PNG file, a panel for each name, with a colour for each step.

    Args:
        panels: Spans by name of the panel; all panels share one scale.
        path: The PNG file.
        title: Title of the picture.
    """
    shown = []
    for name, spans in panels.items():
        start_s, stop_s = _range_of(spans)
        length_ms = (stop_s - start_s) * 1e3
        lanes = _ALL_LANES if any(span.lane == "disk" for span in spans) else LANES
        bars = list(_bars(spans, lanes, start_s, stop_s))
        keys = lanes.index("keys")
        is_inside = bool(spans) and all(bar.row != keys for bar in bars)
        notes = {keys: "found and exchanged inside compute"} if is_inside else {}
        shown.append(PicturePanel(_headline(name, spans), lanes, length_ms, bars, notes))
    draw_bars(shown, path, title, "ms; a colour and a number for each step", 0.42)


def _bars(
    spans: Sequence[LaneSpan], lanes: Sequence[LaneName], start_s: float, stop_s: float
) -> Iterator[SpanBar]:
    """Yield the bars inside the range; readers that work at the same time share the row's height."""
    for place, lane in enumerate(lanes):
        rows = _side_by_side([span for span in spans if span.lane == lane])
        for number, row in enumerate(rows):
            for span in row:
                left, right = max(span.start_s, start_s) - start_s, min(span.stop_s, stop_s) - start_s
                colour = PALETTE[span.step % len(PALETTE)]
                yield SpanBar(
                    place, left * 1e3, right * 1e3, colour, str(span.step), part=(number, len(rows))
                )


def _side_by_side(spans: Sequence[LaneSpan]) -> list[list[LaneSpan]]:
    """Return the fewest rows in which spans do not overlap."""
    rows: list[list[LaneSpan]] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        free = next((row for row in rows if row[-1].stop_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _range_of(spans: Sequence[LaneSpan]) -> tuple[float, float]:
    """Return the first start and the last stop of compute."""
    compute = [span for span in spans if span.lane == "compute"]
    return min((s.start_s for s in compute), default=0.0), max((s.stop_s for s in compute), default=0.0)


def _headline(name: str, spans: Sequence[LaneSpan]) -> str:
    start_s, stop_s = _range_of(spans)
    compute = [span for span in spans if span.lane == "compute"]
    if not compute:
        return f"{name}: nothing was recorded"
    busy = sum(span.stop_s - span.start_s for span in compute) / (stop_s - start_s)
    steps = f"steps {compute[0].step} to {compute[-1].step}"
    each_ms = (stop_s - start_s) / len(compute) * 1e3
    return f"{name}: {steps}, {each_ms:.3g} ms a step, {busy:.0%} of the time in compute"


def _sum_ms(spans: Sequence[LaneSpan]) -> float | None:
    return sum(span.stop_s - span.start_s for span in spans) * 1e3 if spans else None


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.2f}"
