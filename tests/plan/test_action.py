"""Actions read as they are written in the papers."""

from shardwise.plan.action import NORM, SEND, Action, F, Kind


def test_text() -> None:
    assert str(F(3, 0)) == "F(3,0)" and str(Action(Kind.F, 3, 0)) == "F(u3,0)", "of a stage, of a Unit"
    assert str(SEND(1, 0, 2)) == "SEND(1,0,2)"
    assert str(Action(Kind.STEP, 2)) == "STEP(u2)"
    assert str(NORM) == "NORM"


def test_what_computes() -> None:
    assert {kind for kind in Kind if kind.computes} == {Kind.F, Kind.B, Kind.I, Kind.W}
