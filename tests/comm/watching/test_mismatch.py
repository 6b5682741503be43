"""The rank whose calls differ from those of the others, in drawn and written records."""

import pytest

from shardwise.comm.watching.answers import AwaitedCall, StartedCall
from shardwise.comm.watching.mismatch import first_mismatch, skipped_call
from tests.comm.watching.calls import GROUP, call, loop


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_that_skips_a_call_differs(odd: int) -> None:
    starts = {each: loop(4, 7) if each == odd else loop(4) for each in range(3)}
    found = first_mismatch(starts)
    assert found is not None and (found.number, found.odd) == (8, odd)
    assert "call 8 of ranks 0-2 differs" in str(found) and "train.py:8" in str(found)


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_ranks_the_one_that_left_its_loop_differs(odd: int) -> None:
    found = first_mismatch({each: loop(4, 7) if each == odd else loop(4) for each in range(2)})
    assert found is not None and found.odd == odd


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_ranks_the_one_with_a_new_shape_differs(odd: int) -> None:
    starts = {each: [*loop(3), call(10, "a", 5 if each == odd else 4)] for each in range(2)}
    found = first_mismatch(starts)
    assert found is not None and found.odd == odd and "(5 elements of float32)" in str(found)


def test_the_first_difference_is_named() -> None:
    """A rank that is out of step in one group is so in the next: the first has the most calls behind it."""
    right = [call(1, "a"), call(1, "x", group="ranks 0,1"), call(2, "b"), call(2, "y", group="ranks 0,1")]
    wrong = [call(1, "a"), call(1, "z", group="ranks 0,1"), call(2, "c"), call(2, "y", group="ranks 0,1")]
    found = first_mismatch({0: right, 1: wrong})
    assert found is not None and found.group == "ranks 0,1"


def test_calls_that_one_rank_has_yet_to_make_do_not_differ() -> None:
    assert first_mismatch({0: loop(4), 1: loop(3), 2: []}) is None


def test_unlike_sizes_of_an_all_to_all_do_not_differ() -> None:
    calls = [
        StartedCall(group=GROUP, number=1, operation="all_to_all", what="keys", elements=size)
        for size in (3, 4)
    ]
    assert first_mismatch({0: calls[:1], 1: calls[1:]}) is None


def test_a_rank_that_has_not_come_to_a_call_yet_does_not_differ() -> None:
    """Before the first loop is over there is nothing to compare with, and a call may come later."""
    awaited = {
        0: AwaitedCall(group="world", number=2, members=[0, 1]),
        1: AwaitedCall(group="pair", number=1, members=[0, 1]),
    }
    starts = {
        0: [call(1, "sum", group="world"), call(2, "sum", group="world")],
        1: [call(1, "sum", group="world"), call(1, "there", group="pair")],
    }
    assert skipped_call(awaited, starts) is None
