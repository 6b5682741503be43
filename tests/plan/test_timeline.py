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
