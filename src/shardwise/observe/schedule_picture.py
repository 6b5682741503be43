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
from typing import Any

from shardwise.plan.action import Kind
from shardwise.plan.timeline import Span, Timeline

_SHADE = {Kind.F: 0.55, Kind.I: 0.1, Kind.B: 0.0, Kind.W: -0.35}
"""Towards white (1) or black (-1)."""
_HEIGHT = 0.84
IDLE, INK = "#ededed", "#333333"
PALETTE = ("#3b6ea5", "#d1622b", "#4b8f6b", "#8a5fa3", "#b8883b", "#3c8f9c", "#b0506a", "#6b7280")
"""Of the stages, and as many of them as the key has room for."""


def draw_text(timeline: Timeline, tick_s: float | None = None, columns: int = 400, row: str = "rank") -> str:
    """One row per rank; a column is ``tick_s`` seconds (default: the shortest pass), at most ``columns`` of them.

    ``row``: what the rows are called.
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
            # A pass takes the columns whose middle it covers.
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
    """Draw timelines above one another into a PNG file, by name (predicted, measured), all on one scale.

    A colour per stage, F light, B dark, idle grey. ``row``: what the rows are called.
    """
    # Imported here: half a second that only this needs. No pyplot: it keeps global state and looks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sum(len(timeline.spans) for timeline in timelines.values())
    stages = 1 + max((stage for timeline in timelines.values() for stage in _stages(timeline)), default=0)
    longest_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0) or 1.0
    factor, unit = (1e3, "ms") if longest_s < 1 else (1.0, "s")
    figure = Figure(figsize=(12, 0.9 + 0.5 * len(timelines) + 0.36 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(timelines), 1, squeeze=False, sharex=True,
        gridspec_kw={"height_ratios": [max(1, len(timeline.spans)) for timeline in timelines.values()]},
    )[:, 0]  # fmt: skip
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_rows(axes, timeline, stages, factor, longest_s)
        axes.set_yticks(range(len(timeline.spans)), [f"{row} {rank}" for rank in timeline.spans])
        axes.set_ylim(max(1, len(timeline.spans)) - 0.5, -0.5)
        axes.set_xlim(0, longest_s * factor)
        axes.tick_params(length=0, labelsize=8, colors=INK)
        axes.spines[:].set_visible(False)
        length = f"{timeline.makespan_s * factor:.3g} {unit}"
        axes.set_title(f"{name}: {length}, idle {timeline.idle_share:.1%}", loc="left", fontsize=9, color=INK)
    if len(panels):
        panels[-1].set_xlabel(unit, fontsize=8, color=INK)
        _add_key(panels[0], timelines, stages)
    figure.suptitle(title, fontsize=11, x=0.006, ha="left")
    path = Path(path)
    fresh = path.with_name("." + path.name)
    figure.savefig(fresh, format="png")
    fresh.replace(path)


def _draw_rows(axes: Any, timeline: Timeline, stages: int, factor: float, longest_s: float) -> None:
    """A bar per pass over a grey one for the whole time, so that what is grey is idle."""
    with_stage = _has_several_stages(timeline)
    for place, rank in enumerate(timeline.spans):
        axes.barh(place, timeline.makespan_s * factor, height=_HEIGHT, color=IDLE)
        for span in timeline.passes(rank):
            length = span.stop_s - span.start_s
            start = (span.start_s - timeline.start_s) * factor
            colour = _colour(max(0, span.action.stage), stages, span.action.kind)
            axes.barh(
                place,
                length * factor,
                left=start,
                height=_HEIGHT,
                color=colour,
                edgecolor="white",
                linewidth=0.6,
            )
            label = _label(span, with_stage)
            size = min(8.0, length / longest_s * 1050 / len(label))
            if size >= 4:
                axes.text(
                    start + length * factor / 2, place, label, ha="center", va="center_baseline", fontsize=size,
                    color="black" if span.action.kind is Kind.F else "white",
                )  # fmt: skip


def _add_key(axes: Any, timelines: Mapping[str, Timeline], stages: int) -> None:
    """What the colours say, above the first panel, at its right."""
    from matplotlib.patches import Patch

    kinds = {s.action.kind for t in timelines.values() for rank in t.spans for s in t.passes(rank)}
    if not kinds or stages > len(PALETTE):
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
    return f"{stage}{span.action.kind.value}{span.action.microbatch}"


def _colour(stage: int, stages: int, kind: Kind) -> tuple[float, float, float]:
    """The stage's hue; the shade says what is computed."""
    if stages <= len(PALETTE):
        parts = [int(PALETTE[stage][place : place + 2], 16) / 255 for place in (1, 3, 5)]
    else:  # evenly round the circle
        parts = list(colorsys.hsv_to_rgb((0.58 + stage / stages) % 1, 0.62, 0.72))
    shade = _SHADE[kind]
    towards, share = (1.0, shade) if shade > 0 else (0.0, -shade)
    red, green, blue = (part + (towards - part) * share for part in parts)
    return red, green, blue
