import pytest

from shardwise.plan.action import RECV, Action, B, F, Kind
from shardwise.plan.timeline import Span, Timeline


def test_measured_spans_of_any_order_and_clock() -> None:
    timeline = Timeline.of(
        [
            Span(1, B(1, 0), 103.0, 105.0),
            Span(1, RECV(1, 0, 0), 100.0, 102.0),
            Span(0, F(0, 0), 100.0, 102.0),
            Span(1, F(1, 0), 102.0, 103.0),
            Span(0, B(0, 0), 106.0, 110.0),
        ]
    )
    assert list(timeline.spans) == [0, 1]
    assert [span.action.kind for span in timeline.spans[1]] == [Kind.RECV, Kind.F, Kind.B]
    assert timeline.makespan_s == 10.0
    assert [timeline.idle(0), timeline.idle(1)] == pytest.approx([0.4, 0.7])
    assert timeline.idle_share == pytest.approx(0.55)
    assert str(timeline) == "10 s, idle 55.0% (rank 0 40.0%, rank 1 70.0%)"


def test_passes_of_units_are_part_of_their_stage() -> None:
    timeline = Timeline.of([Span(0, F(0, 0), 0.0, 1.0), Span(0, Action(Kind.F, 2, 0), 0.25, 0.5)])
    assert timeline.busy_s(0) == 1.0


def test_each_moment_of_the_computation_has_one_use() -> None:
    update = Action(Kind.STEP, 1)
    spans = [
        Span(0, F(0, 0), 0.0, 4.0),
        Span(0, Action(Kind.F, 2, 0), 0.5, 3.0),
        Span(0, Action(Kind.UNSHARD, 3, 0), 0.0, 2.0, "exchange", "dp"),
        Span(0, Action(Kind.F, 2, 0), 1.0, 2.0, "wait", "dp", True),
        Span(0, Action(Kind.F, 2, 0), 2.0, 2.5, "exchange", "tp", True),
        Span(0, RECV(0, 0, 1), 4.0, 5.0, "wait", "pp", True),
        Span(0, B(0, 0), 5.0, 6.0),
        Span(0, update, 6.5, 7.0),
        Span(0, update, 6.0, 9.0, "update"),
        Span(0, update, 7.0, 7.25, "wait", "", True),
        Span(0, F(0, 0), 7.25, 7.5, "wait", "data", True),
    ]
    timeline = Timeline.of(spans)
    found = Timeline(timeline.spans, {0: (0.0, 8.0)}).uses(0)
    assert found == {
        ("compute", ""): 2.5 + 1.0,
        ("exchange", "dp"): 1.0,
        ("exchange", "tp"): 0.5,
        ("bubble", "pp"): 1.0,
        ("update", ""): 0.5,
        ("waits", ""): 0.25,
        ("data", ""): 0.25,
        ("rest", ""): 1.0,
    }
    assert sum(found.values()) == 8.0
    lanes = timeline.lanes(0)
    assert lanes == {"compute": 3.5, "update": 3.5, "exchange dp": 2.0, "exchange tp": 0.5}
    assert timeline.window(0) == (0.0, 9.0) and timeline.slowest == 0
