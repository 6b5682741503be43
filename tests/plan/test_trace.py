"""The trace: rows are written by whoever acts, and every byte belongs to one row."""

import pytest

from shardwise.base.errors import PlanError
from shardwise.plan.action import NORM, SUM, Action, F, Kind
from shardwise.plan.trace import Trace, recorded
from shardwise.plan.walker import Walker


class Sent:
    """A counter of bytes."""

    bytes = 0


class Actor:
    """Does SUM, which sends, and NORM, inside of which a SUM runs."""

    def __init__(self, sent: Sent):
        self.sent = sent
        self.walker = Walker({Kind.SUM: self.sum, Kind.NORM: self.norm}, Trace(sent))

    @property
    def trace(self) -> Trace:
        return self.walker.trace

    @recorded
    def sum(self, action: Action) -> None:
        self.sent.bytes += 10

    @recorded
    def norm(self, action: Action) -> None:
        self.sent.bytes += 1
        self.sum(SUM)
        self.sent.bytes += 2


def test_bytes_belong_to_the_row_that_sends_them() -> None:
    sent = Sent()
    actor = Actor(sent)
    actor.walker.begin([SUM, NORM])
    sent.bytes += 100
    actor.walker.run()
    sent.bytes += 1000
    trace = actor.trace
    trace.finish()
    assert trace.actions == [SUM, NORM, SUM] and trace.bytes == [10, 3, 10] and trace.outside_bytes == 1100
    assert sum(trace.bytes) + trace.outside_bytes == sent.bytes


def test_a_later_gather_counts_for_the_row_that_ordered_it() -> None:
    sent = Sent()
    trace = Trace(sent)
    trace.stop(trace.start(SUM))
    row = trace.start(NORM)
    with trace.again(0):
        sent.bytes += 7
    sent.bytes += 1
    trace.stop(row)
    assert trace.bytes == [7, 1] and not trace.outside_bytes


def test_a_list_aside_counts_for_itself() -> None:
    sent = Sent()
    actor = Actor(sent)
    actor.walker.begin([SUM])
    with actor.walker.aside([SUM, SUM]):
        actor.walker.run()
        aside = actor.trace
    actor.walker.run()
    assert aside.bytes == [10, 10] and actor.trace.bytes == [10] and not actor.trace.outside_bytes


def test_an_action_that_nobody_does_is_reported() -> None:
    actor = Actor(Sent())
    actor.walker.handlers[Kind.SUM] = lambda action: None
    actor.walker.begin([SUM])
    actor.walker.run()
    assert actor.trace.actions == [] and actor.trace.divergences == [
        "SUM was not done: its handler wrote no row"
    ]
    with pytest.raises(PlanError, match="the list has F, but no handler does it"):
        actor.walker.begin([F(0, 0)])
        actor.walker.run()


def test_spans_have_the_lanes_of_their_kinds_and_the_waits_inside() -> None:
    actor = Actor(Sent())
    trace = actor.trace
    actor.norm(NORM)
    for kind in (Kind.F, Kind.UNSHARD, Kind.LOAD_WEIGHT):
        trace.stop(trace.start(Action(kind, 1, 0)))
    outer, inner, after = trace.starts[0], trace.starts[1], trace.starts[2]
    trace.waits.add("dp", (inner + trace.stops[1]) / 2)
    trace.waits.add("pp", after)
    spans = trace.spans(3)
    assert [(span.rank, span.lane) for span in spans[:5]] == [
        (3, "compute"),
        (3, "compute"),
        (3, "compute"),
        (3, "exchange"),
        (3, "disk"),
    ]
    assert [(span.action, span.lane, span.axis, span.is_exposed) for span in spans[5:]] == [
        (SUM, "wait", "dp", True),
        (Action(Kind.F, 1, 0), "wait", "pp", True),
    ]
    assert spans[0].start_s == outer
