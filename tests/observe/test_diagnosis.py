"""A late rank is named with its phase, a slow link with its axis, and the shares of a step add up."""

from collections.abc import Mapping

import pytest

from shardwise.observe.diagnosis import Cause, diagnose

USUAL = {
    "data": 0.01,
    "compute": 1.0,
    "dp": 0.05,
    "tp": 0.0,
    "pp": 0.0,
    "ep": 0.0,
    "update": 0.1,
    "save": 0.0,
    "rest": 0.02,
}


def rows(ranks: int, late: int | None = None, **more: float) -> list[Mapping[str, float]]:
    """Phases of ranks that meet: seconds that one rank takes longer are waits of the others."""
    found = [dict(USUAL) for _ in range(ranks)]
    for phase, seconds in more.items():
        for rank in range(ranks):
            if late is None or rank == late:
                found[rank][phase] += seconds
            else:
                found[rank]["dp"] += seconds
    return list(found)


@pytest.mark.parametrize(
    ("planted", "late", "cause"),
    [
        ({"data": 0.5}, 3, "data"),
        ({"data": 0.5}, None, "data"),
        ({"compute": 0.5}, 0, "straggler"),
        ({"update": 0.4}, 2, "straggler"),
        ({"rest": 0.4}, 1, "straggler"),
        ({"save": 0.5}, 1, "save"),
        ({"save": 0.5}, None, "save"),
        ({"dp": 0.5}, None, "exchange"),
        ({"pp": 0.5}, None, "exchange"),
        ({"compute": 0.05}, 2, "compute"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_the_planted_cause_is_found(
    ranks: int, planted: dict[str, float], late: int | None, cause: Cause
) -> None:
    late = None if late is None else late % ranks
    found = diagnose(rows(ranks, late, **planted))
    assert found.cause == cause
    assert found.rank == (None if cause in ("exchange", "compute") else late)
    assert sum(found.shares.values()) == pytest.approx(1)


def test_one_rank_waits_for_nobody() -> None:
    found = diagnose([USUAL | {"dp": 0.0}])
    assert (found.cause, found.rank) == ("compute", None)


def test_the_bubble_that_was_foreseen_is_no_slow_link() -> None:
    measured = rows(4, None, pp=0.5)
    assert diagnose(measured).cause == "exchange"
    assert diagnose(measured, {"pp": 0.5}).cause == "compute"


def test_the_waits_for_a_late_rank_are_apart_from_the_exchange() -> None:
    found = diagnose(rows(4, 1, compute=1.0))
    assert found.shares["waiting"] * found.step_s == pytest.approx(0.75, rel=0.1)
    assert found.sentence == "rank 1 computes 1 s a step longer than the others, which wait for it"


def test_computation_that_takes_longer_than_foreseen_is_said_to() -> None:
    assert diagnose(rows(2), {"compute": 0.25}).sentence.endswith("which takes 4 times as long as foreseen")
    assert "foreseen" not in diagnose(rows(2), {"compute": 0.9}).sentence
