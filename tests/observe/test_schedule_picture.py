from pathlib import Path

from shardwise.observe.schedule_picture import draw_picture, draw_text
from shardwise.plan.action import RECV, Action, B, F, Kind
from shardwise.plan.timeline import Span, Timeline


def test_the_table_of_the_docstring() -> None:
    timeline = Timeline.of(
        [
            *(Span(0, F(0, i), i, i + 1) for i in (0, 1)),
            Span(0, B(0, 0), 4, 6),
            Span(0, B(0, 1), 6, 8),
            Span(1, RECV(1, 0, 0), 0, 1),
            Span(1, F(1, 0), 1, 2),
            Span(1, B(1, 0), 2, 4),
            Span(1, F(1, 1), 4, 5),
            Span(1, B(1, 1), 5, 7),
        ]
    )
    assert draw_text(timeline).splitlines() == [
        "rank 0   F0 F1 .. .. B0 == B1 ==",
        "rank 1   .. F0 B0 == F1 B1 == ..",
    ]


def test_measured_seconds_are_rounded_to_columns() -> None:
    timeline = Timeline.of(
        [Span(0, F(0, 0), 7.00, 7.101), Span(0, B(0, 0), 7.31, 7.508), Span(0, F(0, 10), 7.508, 7.612)]
    )
    assert draw_text(timeline) == "rank 0   F0  ... ... B0  === F10"


def test_several_stages_per_rank_name_the_stage() -> None:
    timeline = Timeline.of(
        [Span(0, F(0, 0), 0, 1), Span(0, F(2, 0), 1, 2), Span(0, Action(Kind.W, -1, 0, 2), 2, 3)]
    )
    assert draw_text(timeline) == "rank 0   0F0 2F0 2W0"


def test_a_long_timeline_keeps_to_its_columns() -> None:
    spans = [Span(0, F(0, i), i, i + 1) for i in range(1000)] + [Span(0, B(0, 0), 1000, 1000.001)]
    assert len(draw_text(Timeline.of(spans), columns=50).split()) == 52


def test_nothing_is_drawn_as_nothing() -> None:
    assert draw_text(Timeline({})) == ""
    assert draw_text(Timeline({0: ()})) == ""


def test_the_picture_holds_predicted_and_measured(tmp_path: Path) -> None:
    timeline = Timeline.of([Span(0, F(0, 0), 0, 1), Span(0, B(0, 0), 1, 3), Span(1, F(1, 0), 1, 2)])
    later = Timeline.of(
        span._replace(start_s=span.start_s + 5, stop_s=span.stop_s + 5) for span in timeline.spans[0]
    )
    draw_picture({"predicted": timeline, "measured": later}, tmp_path / "schedule.png", "1f1b")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["schedule.png"]


def test_empty_pictures(tmp_path: Path) -> None:
    draw_picture({"predicted": Timeline({})}, tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").exists()
