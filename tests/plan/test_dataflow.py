import pytest

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.passes import add_communication, nominal_s
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.plan.action import RECV, SEND, Action, B, F, Kind
from shardwise.plan.dataflow import timeline_of

SECONDS = {Kind.F: 1.0, Kind.B: 2.0, Kind.SEND: 0.25, Kind.RECV: 0.5}


def seconds(action: Action) -> float:
    return SECONDS.get(action.kind, 0.0)


def test_a_receive_waits_for_its_send() -> None:
    lists = add_communication(schedule("gpipe", 2, 1), 2)
    timeline = timeline_of(lists, seconds)
    assert [(str(s.action), s.start_s, s.stop_s) for s in timeline.spans[1]] == [
        ("RECV(1,0,0)", 0.0, 1.75),
        ("F(1,0)", 1.75, 2.75),
        ("B(1,0)", 2.75, 4.75),
        ("SEND(1,0,0)", 4.75, 5.0),
    ]
    assert timeline.makespan_s == 7.5
    assert timeline.busy_s(0) == timeline.busy_s(1) == 3.0
    assert timeline.idle_share == pytest.approx(1 - 3 / 7.5)


def test_a_send_does_not_wait() -> None:
    timeline = timeline_of(
        {0: [F(0, 0), SEND(0, 0, 1), F(0, 1)], 1: [Action(Kind.STEP), RECV(1, 0, 0)]}, seconds
    )
    assert timeline.spans[0][-1].stop_s == 2.25


def test_unit_actions_take_their_time_and_are_no_passes() -> None:
    lists = {0: [F(0, 0), Action(Kind.F, 3, 0), Action(Kind.UNSHARD, 3, 0), B(0, 0)]}
    timeline = timeline_of(lists, lambda action: 1.0 if action.unit < 0 else 0.5)
    assert timeline.makespan_s == 3.0
    assert timeline.busy_s(0) == 2.0


def test_an_activation_lives_until_its_weight_gradient() -> None:
    lists = {0: [F(0, 0), Action(Kind.I, -1, 0, 0), F(0, 1), Action(Kind.W, -1, 0, 0), B(0, 1)]}
    assert timeline_of(lists, nominal_s).peak_live(0) == 2
    assert timeline_of(schedule("1f1b", 1, 5), nominal_s).peak_live(0) == 1


def test_ranks_that_wait_for_each_other_are_named() -> None:
    lists = {0: [RECV(0, 0, 1), F(0, 0), SEND(0, 0, 1)], 1: [RECV(1, 0, 0), F(1, 0), SEND(1, 0, 0)]}
    with pytest.raises(PlanError, match=r"rank 0 before RECV\(0,0,1\); rank 1 before RECV\(1,0,0\)"):
        timeline_of(lists, seconds)


def test_nothing() -> None:
    assert timeline_of({}, seconds).makespan_s == 0.0
    assert timeline_of({0: []}, seconds).idle_share == 0.0
