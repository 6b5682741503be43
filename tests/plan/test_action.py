"""Actions read as they are written in the papers."""

from shardwise.plan.action import NORM, Action, Kind


def test_text() -> None:
    assert str(Action(Kind.F, 3, 0)) == "F(3,0)"
    assert str(Action(Kind.STEP, 2)) == "STEP(2)"
    assert str(NORM) == "NORM"


def test_what_computes() -> None:
    assert {kind for kind in Kind if kind.computes} == {Kind.F, Kind.B, Kind.I, Kind.W}
