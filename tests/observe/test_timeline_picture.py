from pathlib import Path

from shardwise.observe.timeline_picture import colours_of, draw_lanes, lane_rows, with_lengths
from shardwise.plan.action import Action, F, Kind
from shardwise.plan.timeline import Span, Timeline


def test_lanes_of_a_rank_are_rows_of_a_picture(tmp_path: Path) -> None:
    gather, unit = Action(Kind.UNSHARD, 1, 0), Action(Kind.F, 1, 0)
    foreseen = Timeline.of(
        [
            Span(0, unit, 1.0, 2.0, "wait", "dp", True),
            Span(0, gather, 0.0, 2.0, "exchange", "dp"),
            Span(0, Action(Kind.LOAD, 1), 0.0, 1.5, "disk"),
            Span(0, F(0, 0), 0.0, 3.0),
            Span(0, unit, 2.0, 3.0),
        ]
    )
    assert lane_rows(foreseen, 0) == ["compute", "disk", "exchange dp", "wait"]
    draw_lanes({"foreseen": foreseen, "measured": foreseen}, tmp_path / "lanes.png", title="a step")
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_kinds_have_colours_of_their_own() -> None:
    update = Action(Kind.STEP, 1)
    spans = [Span(0, F(0, 0), 0.0, 1.0), Span(0, Action(Kind.B, 0, 0), 1.0, 2.0), Span(0, update, 2.0, 3.0)]
    colours = colours_of([Timeline.of(spans)])
    assert set(colours) == {Kind.F, Kind.B, Kind.STEP} and len(set(colours.values())) == 3


def test_a_units_pass_that_was_recorded_at_its_start_lasts_until_the_next_action() -> None:
    first, second = Action(Kind.F, 1, 0), Action(Kind.F, 2, 0)
    spans = [
        Span(0, F(0, 0), 0.0, 4.0),
        Span(0, first, 1.0, 1.0),
        Span(0, first, 1.5, 2.0, "wait", "dp", True),
        Span(0, second, 3.0, 3.0),
    ]
    found = with_lengths(spans)
    assert [(span.start_s, span.stop_s) for span in found] == [(0.0, 4.0), (1.0, 3.0), (1.5, 2.0), (3.0, 4.0)]
