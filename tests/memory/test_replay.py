"""Replay: the place of the running microbatch, and bringing it back."""

import pytest

from shardwise.memory.replay import BatchPosition, Replay
from shardwise.plan.errors import UsageError


def test_outside_of_a_microbatch_there_is_no_place() -> None:
    replay = Replay()
    with pytest.raises(UsageError, match=r"no microbatch is running.*model.eval\(\)"):
        _ = replay.place
    with replay.at(BatchPosition(1)):
        assert replay.place == BatchPosition(1)
    with pytest.raises(UsageError):
        _ = replay.place


def test_calls_are_numbered_within_a_pass() -> None:
    replay = Replay()
    for _ in range(2):
        with replay.at(BatchPosition(1)):
            assert [replay.next_call("a"), replay.next_call("b"), replay.next_call("a")] == [0, 0, 1]


def test_again_brings_back_place_and_numbers_many_times() -> None:
    replay = Replay()
    with replay.at(BatchPosition(1)):
        replay.next_call("a")
        again = replay.again()
        assert replay.next_call("a") == 1
    with replay.at(BatchPosition(2)):
        for _ in range(2):
            with again:
                assert replay.place == BatchPosition(1)
                assert replay.next_call("a") == 1
                with again:  # a checkpoint inside a checkpoint
                    assert replay.next_call("a") == 1
                assert replay.next_call("a") == 2
        assert replay.place == BatchPosition(2)
        assert replay.next_call("a") == 0


def test_an_exception_puts_the_place_back() -> None:
    replay = Replay()
    with replay.at(BatchPosition(1)):
        with pytest.raises(ZeroDivisionError), replay.at(BatchPosition(2)):
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), replay.again():
            raise ZeroDivisionError
        assert replay.place == BatchPosition(1)
