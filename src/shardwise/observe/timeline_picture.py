"""Lanes of one rank over time as a PNG file, foreseen above measured: one row per lane, exchanges by axis.

    compute        F0 F0 B0 B0 ..        passes and updates of the rank's own thread
    exchange dp    .. UNSHARD ..         what goes on beside the computation
    wait           ..   dp    ..         the computation stands, with the axis that it waits for

Both panels share one scale, so that a bar that is longer than foreseen shows at a glance.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardwise.observe.bars import PALETTE, PicturePanel, SpanBar, draw_bars
from shardwise.plan.action import Kind
from shardwise.plan.timeline import Span, Timeline

_WAIT = "#333333"


def draw_lanes(
    timelines: Mapping[str, Timeline], path: str | os.PathLike[str], rank: int | None = None, title: str = ""
) -> None:
    """Draw the lanes of one rank into a PNG file, a panel for each timeline.

    Args:
        timelines: Timelines by name (foreseen, measured), on one scale.
        path: The PNG file.
        rank: The rank; None: of each timeline the rank whose step takes longest.
        title: Title of the picture.
    """
    longest_s = max((each.makespan_s for each in timelines.values()), default=0.0)
    factor, unit = (1e3, "ms") if longest_s < 1 else (1.0, "s")
    colours = colours_of(timelines.values())
    panels = []
    for name, timeline in timelines.items():
        shown = timeline.slowest if rank is None else rank
        start_s, stop_s = timeline.window(shown)
        rows = lane_rows(timeline, shown)
        bars = list(_bars(timeline, shown, rows, factor, colours))
        length = (stop_s - start_s) * factor
        panels.append(PicturePanel(f"{name}: rank {shown}, {length:.3g} {unit}", rows, length, bars))
    draw_bars(panels, path, title, unit, 0.36)


def lane_rows(timeline: Timeline, rank: int) -> list[str]:
    """Return the names of the lanes on which ``rank`` works, the computation first and its waits last."""
    names = dict.fromkeys(_row_of(span) for span in timeline.spans.get(rank, ()))
    return sorted(names, key=lambda name: (name != "compute", name == "wait", name))


def _row_of(span: Span) -> str:
    return span.lane if span.lane in ("compute", "wait") else f"{span.lane} {span.axis}".rstrip()


def colours_of(timelines: Iterable[Timeline]) -> dict[Kind, str]:
    """Return a colour for each Kind of Action in the timelines; Kinds share one only if there are more than colours."""
    found = {span.action.kind for each in timelines for spans in each.spans.values() for span in spans}
    return {
        kind: PALETTE[place % len(PALETTE)]
        for place, kind in enumerate(each for each in Kind if each in found)
    }


def _bars(
    timeline: Timeline, rank: int, rows: list[str], factor: float, colours: Mapping[Kind, str]
) -> Iterator[SpanBar]:
    """Yield one bar for each span, except for passes of a stage that contain those of its Units."""
    start_s, _ = timeline.window(rank)
    spans = with_lengths(timeline.spans.get(rank, ()))
    has_units = any(_is_of_unit(span) and span.stop_s > span.start_s for span in spans)
    for span in spans:
        if span.is_pass and has_units:
            continue
        kind, waits = span.action.kind, span.lane == "wait"
        colour = _WAIT if waits else colours[kind]
        label = (span.axis or kind.name) if waits else str(span.action)
        yield SpanBar(
            rows.index(_row_of(span)),
            (span.start_s - start_s) * factor,
            (span.stop_s - start_s) * factor,
            colour,
            label,
        )


def _is_of_unit(span: Span) -> bool:
    return span.lane == "compute" and span.action.kind.computes and span.action.unit >= 0


def with_lengths(spans: Sequence[Span]) -> list[Span]:
    """Return spans in which the pass of a Unit that was recorded at its start alone has a length.

    The pass lasts until the next Action begins, or until the pass of its stage is over.

    Args:
        spans: Spans of one rank, by start.
    """
    passes = [span for span in spans if span.is_pass]
    found = []
    for place, span in enumerate(spans):
        if _is_of_unit(span) and span.stop_s <= span.start_s:
            begins = (each.start_s for each in spans[place + 1 :] if each.lane != "wait" and not each.is_pass)
            ends = (each.stop_s for each in passes if each.start_s <= span.start_s <= each.stop_s)
            stop_s = next(ends, span.start_s)
            span = span._replace(stop_s=min(next(begins, stop_s), stop_s))
        found.append(span)
    return found
