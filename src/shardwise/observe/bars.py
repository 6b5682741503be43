"""Bars over time as a PNG file: one row per lane or rank, in panels above one another.

rank 0   F0 F1 .. B0 B1          each row is grey, so that idle time stays grey
rank 1   .. F0 F1 B0 .. B1       all panels share one scale
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

IDLE, INK = "#ededed", "#333333"
PALETTE = ("#3b6ea5", "#d1622b", "#4b8f6b", "#8a5fa3", "#b8883b", "#3c8f9c", "#b0506a", "#6b7280")
_HEIGHT = 0.84
_SEEN = 0.004
"""Smallest share of the picture's width at which a bar is visible."""
_POINTS = 1050
"""Factor from letters and length of a bar to a font size, for the width of these pictures."""

Colour = str | tuple[float, float, float]


class SpanBar(NamedTuple):
    """One bar of a row, in the unit of the picture."""

    row: int
    start: float
    stop: float
    colour: Colour
    label: str
    ink: str = "white"
    """Colour of a label inside the bar."""
    part: tuple[int, int] = (0, 1)
    """Number of the bar and count of the bars that share the row's height."""


class PicturePanel(NamedTuple):
    """One part of the picture, with rows of its own."""

    title: str
    rows: Sequence[str]
    length: float
    """Time from the first start to the last stop."""
    bars: Sequence[SpanBar]
    notes: Mapping[int, str] = MappingProxyType({})
    """Text in a row without bars, by row."""


def draw_bars(
    panels: Sequence[PicturePanel],
    path: str | os.PathLike[str],
    title: str,
    unit: str,
    row_inches: float,
    add_key: Callable[[Any], None] | None = None,
) -> None:
    """Draw panels above one another into a PNG file.

    Args:
        panels: The panels.
        path: The PNG file.
        title: Title of the picture.
        unit: Unit of the times, for the axis.
        row_inches: Height of a row in inches.
        add_key: Function that adds a key to the first panel's axes.
    """
    # Imported here, because the import takes half a second. No pyplot: it keeps global state and looks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [max(1, len(panel.rows)) for panel in panels] or [1]
    longest = max((panel.length for panel in panels), default=0.0) or 1.0
    height = 0.9 + 0.5 * len(rows) + row_inches * sum(rows)
    figure = Figure(figsize=(12, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = {"height_ratios": rows}
    axes_of = figure.subplots(len(rows), 1, squeeze=False, sharex=True, gridspec_kw=ratios)[:, 0]
    for axes, panel in zip(axes_of, panels, strict=False):
        for row in range(len(panel.rows)):
            axes.barh(row, panel.length, height=_HEIGHT, color=IDLE)
        for row, text in panel.notes.items():
            axes.text(
                panel.length / 2, row, text, ha="center", va="center_baseline", fontsize=8, color="#888888"
            )
        _draw(axes, panel, longest)
        axes.set_yticks(range(len(panel.rows)), panel.rows)
        axes.set_ylim(max(1, len(panel.rows)) - 0.5, -0.5)
        axes.set_xlim(0, longest)
        axes.tick_params(length=0, labelsize=8, colors=INK)
        axes.spines[:].set_visible(False)
        axes.set_title(panel.title, loc="left", fontsize=9, color=INK)
    if panels:
        axes_of[-1].set_xlabel(unit, fontsize=8, color=INK)
        if add_key is not None:
            add_key(axes_of[0])
    figure.suptitle(title, fontsize=11, x=0.006, ha="left")
    path = Path(path)
    fresh = path.with_name("." + path.name)
    figure.savefig(fresh, format="png")
    fresh.replace(path)


def _draw(axes: Any, panel: PicturePanel, longest: float) -> None:
    lines: dict[tuple[int, tuple[int, int]], list[SpanBar]] = {}
    for bar in panel.bars:
        lines.setdefault((bar.row, bar.part), []).append(bar)
    for (row, (place, count)), bars in lines.items():
        height = _HEIGHT / count
        middle = row - _HEIGHT / 2 + (place + 0.5) * height
        is_seen = [bar.stop - bar.start > _SEEN * longest for bar in bars]
        # One collection, because a patch for each bar takes a millisecond.
        axes.broken_barh(
            [(bar.start, bar.stop - bar.start) for bar in bars], (middle - height / 2, height),
            facecolors=[bar.colour for bar in bars], edgecolors="white",
            linewidths=[0.6 if seen else 0 for seen in is_seen],
        )  # fmt: skip
        for bar, seen, following in zip(bars, is_seen, [*bars[1:], None], strict=True):
            if seen:
                room = (panel.length if following is None else following.start) - bar.stop
                _write(axes, bar, room, middle, min(8.0, 18 * height), longest)


def _write(axes: Any, bar: SpanBar, room: float, middle: float, size: float, longest: float) -> None:
    """Write the label in its bar, or beside a narrow bar if there is ``room``."""
    fits = _POINTS / max(1, len(bar.label)) / longest
    inside = min(size, (bar.stop - bar.start) * fits)
    colour: Colour
    if inside >= 4:
        at, side, colour, size = (bar.start + bar.stop) / 2, "center", bar.ink, inside
    elif size >= 4 and room * fits > 1.5 * size:
        at, side, colour = bar.stop + longest / 400, "left", bar.colour
    else:
        return
    axes.text(at, middle, bar.label, ha=side, va="center_baseline", fontsize=size, color=colour)
