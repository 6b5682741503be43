"""The seconds of a block, from the passes of one step."""

from collections.abc import Sequence
from typing import Any

import pytest

from shardwise.engine.step.measured_step import _BlockMarks
from shardwise.plan.action import Action, B, Kind
from shardwise.plan.timeline import Span


class Times:
    """A clock whose marks are their own seconds."""

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


def span(action: Action, start_s: float, stop_s: float) -> Span:
    return Span(0, action, start_s, stop_s, "compute", "", False)


def test_a_stage_that_has_both_halves_and_whole_passes_counts_w_once() -> None:
    clock: Any = Times()
    marks = _BlockMarks(clock)
    marks._forward = [("block", 0.0, 1.0)]
    marks._backward = [("block", 2.0), ("", 5.0), ("block", 6.0), ("", 7.5)]
    whole = span(B(0, 0), 2.0, 5.0)
    halves = [span(Action(Kind.I, -1, 1, 0), 6.0, 7.5), span(Action(Kind.W, 0, 1), 8.0, 9.5)]
    units = ["block"]
    assert marks.seconds([whole, *halves], units)["block"] == pytest.approx(1.0 + 1.5 + 1.5)
    assert marks.seconds([whole], units)["block"] == pytest.approx(1.0 + 3.0)
