"""A schedule for people: a table for the terminal and a picture, predicted or measured.

Both take a ``Timeline``. In the table a column is a range of time and a pass is written in the column where it starts:

    rank 0   F0 F1 .. .. B0 == B1 ==        F0  forward of microbatch 0     ==  goes on
    rank 1   .. F0 B0 == F1 B1 == ..        B0  backward                    ..  idle

With several stages per rank the stage comes first: ``2F0`` is the forward of stage 2.
"""

import colorsys
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.observe.bars import IDLE, INK, PALETTE, PicturePanel, SpanBar, draw_bars
from shardwise.plan.action import Kind
from shardwise.plan.timeline import Span, Timeline

_SHADE = {Kind.F: 0.55, Kind.I: 0.1, Kind.B: 0.0, Kind.W: -0.35}
"""Shade of each Kind, towards white (1) or black (-1)."""


def draw_text(timeline: Timeline, tick_s: float | None = None, columns: int = 400, row: str = "rank") -> str:
    """Return a table with one row per rank and one column per range of time.

    Args:
        timeline: The timeline.
        tick_s: Seconds of a column; None: the shortest pass.
        columns: Most columns; the ticks grow to fit.
        row: Word in front of the rank's number.
    """
    passes = {rank: timeline.passes(rank) for rank in timeline.spans}
    lengths = [span.stop_s - span.start_s for spans in passes.values() for span in spans]
    if not any(lengths):
        return ""
    tick_s = max(tick_s or min(length for length in lengths if length > 0), timeline.makespan_s / columns)
    ticks = max(1, round(timeline.makespan_s / tick_s))
    with_stage = _has_several_stages(timeline)
    width = max(2, *(len(_label(span, with_stage)) for spans in passes.values() for span in spans))
    name = max(len(f"{row} {rank}") for rank in passes)
    lines = []
    for rank, spans in passes.items():
        cells = ["." * width] * ticks
        for span in spans:
            # A pass takes the columns whose middle lies inside the pass.
            first, stop = (
                math.ceil((time - timeline.start_s) / tick_s - 0.5 - 1e-6)
                for time in (span.start_s, span.stop_s)
            )
            stop = min(stop, ticks)
            cells[first:stop] = [_label(span, with_stage).ljust(width), *["=" * width] * (stop - first - 1)][
                : max(0, stop - first)
            ]
        lines.append(f"{f'{row} {rank}':<{name}}   " + " ".join(cells))
    return "\n".join(lines)


def draw_picture(
    timelines: Mapping[str, Timeline], path: str | os.PathLike[str], title: str = "", row: str = "rank"
) -> None:
    """Draw timelines above one another into a PNG file, with a colour per stage, F light, B dark, idle grey.

    Args:
        timelines: Timelines by name (predicted, measured), on one scale.
        path: The PNG file.
        title: Title of the picture.
        row: Word in front of the rank's number.
    """
    stages = 1 + max((stage for timeline in timelines.values() for stage in _stages(timeline)), default=0)
    longest_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0)
    factor, unit = (1e3, "ms") if longest_s < 1 else (1.0, "s")
    panels = []
    for name, timeline in timelines.items():
        length = timeline.makespan_s * factor
        said = f"{name}: {length:.3g} {unit}, idle {timeline.idle_share:.1%}"
        rows = [f"{row} {rank}" for rank in timeline.spans]
        panels.append(PicturePanel(said, rows, length, list(_bars(timeline, stages, factor))))
    draw_bars(panels, path, title, unit, 0.36, lambda axes: _add_key(axes, timelines, stages))


def _bars(timeline: Timeline, stages: int, factor: float) -> Iterator[SpanBar]:
    """Yield one bar for each pass."""
    with_stage = _has_several_stages(timeline)
    for place, rank in enumerate(timeline.spans):
        for span in timeline.passes(rank):
            start, stop = ((time - timeline.start_s) * factor for time in (span.start_s, span.stop_s))
            kind = span.action.kind
            colour = _colour(max(0, span.action.stage), stages, kind)
            yield SpanBar(
                place, start, stop, colour, _label(span, with_stage), "black" if kind is Kind.F else "white"
            )


def _add_key(axes: Any, timelines: Mapping[str, Timeline], stages: int) -> None:
    """Add the key of the colours above the first panel, at its right."""
    from matplotlib.patches import Patch

    kinds = {s.action.kind for t in timelines.values() for rank in t.spans for s in t.passes(rank)}
    if not kinds or stages > len(PALETTE):  # more than the key has room for
        return
    dark = Kind.B if Kind.B in kinds else Kind.F
    patches = [Patch(color=_colour(stage, stages, dark), label=f"stage {stage}") for stage in range(stages)]
    grey = {Kind.F: "0.78", Kind.I: "0.62", Kind.B: "0.45", Kind.W: "0.25"}
    names = {Kind.F: "forward", Kind.I: "input gradient", Kind.B: "backward", Kind.W: "weight gradient"}
    patches += [Patch(color=grey[kind], label=names[kind]) for kind in names if kind in kinds]
    patches.append(Patch(color=IDLE, label="idle"))
    axes.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(patches), frameon=False, fontsize=8,
        labelcolor=INK, handlelength=1.0, handleheight=1.0, handletextpad=0.4, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _stages(timeline: Timeline) -> set[int]:
    return {span.action.stage for rank in timeline.spans for span in timeline.passes(rank)}


def _has_several_stages(timeline: Timeline) -> bool:
    return any(len({span.action.stage for span in timeline.passes(rank)}) > 1 for rank in timeline.spans)


def _label(span: Span, with_stage: bool) -> str:
    stage = str(span.action.stage) if with_stage else ""
    return f"{stage}{span.action.kind.name}{span.action.microbatch}"


def _colour(stage: int, stages: int, kind: Kind) -> tuple[float, float, float]:
    """Return the stage's hue in the shade of the Kind."""
    if stages <= len(PALETTE):
        parts = [int(PALETTE[stage][place : place + 2], 16) / 255 for place in (1, 3, 5)]
    else:  # evenly around the colour circle
        parts = list(colorsys.hsv_to_rgb((0.58 + stage / stages) % 1, 0.62, 0.72))
    shade = _SHADE[kind]
    towards, share = (1.0, shade) if shade > 0 else (0.0, -shade)
    red, green, blue = (part + (towards - part) * share for part in parts)
    return red, green, blue
