"""Early stop: after so many evaluations without a gain, also over a resume."""

import json
import math

import pytest

from shardwise.observe.early_stop import EarlyStop


@pytest.mark.parametrize(
    ("values", "higher", "min_delta", "expected"),
    [
        ([0.5, 0.6, 0.7, 0.8], True, 0.0, [False] * 4),
        ([0.5, 0.6, 0.6, 0.55], True, 0.0, [False, False, False, True]),
        ([0.5, 0.6, 0.55, 0.61, 0.6, 0.6], True, 0.0, [False] * 5 + [True]),
        ([0.5, 0.505, 0.509], True, 0.01, [False, False, True]),
        ([3.0, 2.0, 2.5, 2.1], False, 0.0, [False, False, False, True]),
        ([math.nan, 0.5, math.nan, 0.6], True, 0.0, [False] * 4),
        ([math.nan, math.nan], True, 0.0, [False, True]),
    ],
)
def test_patience_of_two(values: list[float], higher: bool, min_delta: float, expected: list[bool]) -> None:
    stop = EarlyStop(2, min_delta, higher)
    assert [stop.update(step, value) for step, value in enumerate(values)] == expected
    resumed = EarlyStop(2, min_delta, higher)
    found = []
    for step, value in enumerate(values):
        found.append(resumed.update(step, value))
        state = json.loads(json.dumps(resumed.state()))
        resumed = EarlyStop(2, min_delta, higher)
        resumed.load_state(state)
    assert found == expected


def test_the_best_is_kept() -> None:
    stop = EarlyStop(3)
    for step, value in ((10, 0.5), (20, 0.7), (30, 0.6)):
        stop.update(step, value)
    assert (stop.best, stop.best_step, stop.waited) == (0.7, 20, 1)


def test_it_says_that_it_is_over_also_after_a_resume() -> None:
    stop = EarlyStop(1)
    assert not stop.is_over
    assert not stop.update(1, 0.7) and stop.update(2, 0.6) and stop.is_over
    again = EarlyStop(1)
    again.load_state(stop.state())
    assert again.is_over
