"""A schedule as people see it: a table for the terminal and a picture, predicted and measured alike.

Both take a ``Timeline``. In the table a column is a slice of time and a pass is written where it starts:

    rank 0   F0 F1 .. .. B0 == B1 ==        F0  forward of microbatch 0     ==  goes on
    rank 1   .. F0 B0 == F1 B1 == ..        B0  backward                    ..  idle

With several stages per rank the stage comes first: ``2F0`` is the forward of stage 2.
"""

import colorsys
import math
import os
from collections.abc import Mapping
from pathlib import Path

from shardwise.plan.action import Kind
from shardwise.plan.timeline import Span, Timeline

_SHADE = {Kind.F: 0.55, Kind.I: 0.1, Kind.B: 0.0, Kind.W: -0.35}
"""Towards white (1) or black (-1)."""


def draw_text(timeline: Timeline, tick_s: float | None = None, columns: int = 400) -> str:
    """One row per rank; a column is ``tick_s`` seconds (default: the shortest pass), at most ``columns`` of them."""
    passes = {rank: timeline.passes(rank) for rank in timeline.spans}
    lengths = [span.stop_s - span.start_s for row in passes.values() for span in row]
    if not any(lengths):
        return ""
    tick_s = max(tick_s or min(length for length in lengths if length > 0), timeline.makespan_s / columns)
    ticks = max(1, round(timeline.makespan_s / tick_s))
    with_stage = _has_several_stages(timeline)
    width = max(2, *(len(_label(span, with_stage)) for row in passes.values() for span in row))
    name = max(len(f"rank {rank}") for rank in passes)
    lines = []
    for rank, row in passes.items():
        cells = ["." * width] * ticks
        for span in row:
            # A pass takes the columns whose middle it covers.
            first, stop = (
                math.ceil((time - timeline.start_s) / tick_s - 0.5 - 1e-6)
                for time in (span.start_s, span.stop_s)
            )
            stop = min(stop, ticks)
            cells[first:stop] = [_label(span, with_stage).ljust(width), *["=" * width] * (stop - first - 1)][
                : max(0, stop - first)
            ]
        lines.append(f"{f'rank {rank}':<{name}}   " + " ".join(cells))
    return "\n".join(lines)


def draw_picture(timelines: Mapping[str, Timeline], path: str | os.PathLike[str], title: str = "") -> None:
    """Draw timelines above one another into a PNG file, by name (predicted, measured), all on one scale.

    A colour per stage, F light, B dark, idle blank.
    """
    # Imported here: half a second that only this needs. No pyplot: it keeps global state and looks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sum(len(timeline.spans) for timeline in timelines.values())
    stages = 1 + max(
        (s.action.stage for t in timelines.values() for rank in t.spans for s in t.passes(rank)), default=0
    )
    longest_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0) or 1.0
    figure = Figure(figsize=(12, 1.0 + 0.8 * len(timelines) + 0.38 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(timelines), 1, squeeze=False, sharex=True,
        gridspec_kw={"height_ratios": [max(1, len(timeline.spans)) for timeline in timelines.values()]},
    )[:, 0]  # fmt: skip
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        with_stage = _has_several_stages(timeline)
        for row, rank in enumerate(timeline.spans):
            for span in timeline.passes(rank):
                length = span.stop_s - span.start_s
                colour = _colour(max(0, span.action.stage), stages, span.action.kind)
                start = span.start_s - timeline.start_s
                axes.barh(
                    row, length, left=start, height=0.86, color=colour, edgecolor="white", linewidth=0.4
                )
                label = _label(span, with_stage)
                if length / longest_s > 0.007 * len(label):
                    dark = span.action.kind is not Kind.F
                    axes.text(
                        start + length / 2, row, label, ha="center", va="center", fontsize=6,
                        color="white" if dark else "black",
                    )  # fmt: skip
        axes.set_yticks(range(len(timeline.spans)), [f"rank {rank}" for rank in timeline.spans], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, longest_s)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(
            f"{name}: {timeline.makespan_s:.3g} s, idle {timeline.idle_share:.1%}", loc="left", fontsize=9
        )
    if len(panels):
        panels[-1].set_xlabel("seconds")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    path = Path(path)
    fresh = path.with_name("." + path.name)
    figure.savefig(fresh, format="png")
    fresh.replace(path)


def _has_several_stages(timeline: Timeline) -> bool:
    return any(len({span.action.stage for span in timeline.passes(rank)}) > 1 for rank in timeline.spans)


def _label(span: Span, with_stage: bool) -> str:
    stage = str(span.action.stage) if with_stage else ""
    return f"{stage}{span.action.kind.value}{span.action.microbatch}"


def _colour(stage: int, stages: int, kind: Kind) -> tuple[float, float, float]:
    """Hues evenly round the circle; the shade says what is computed."""
    red, green, blue = colorsys.hsv_to_rgb((0.58 + stage / stages) % 1, 0.62, 0.72)
    shade = _SHADE[kind]
    towards, share = (1.0, shade) if shade > 0 else (0.0, -shade)
    return tuple(part + (towards - part) * share for part in (red, green, blue))  # type: ignore[return-value]
