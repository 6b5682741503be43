"""Replay: the place of the running microbatch, and bringing it back."""

import pytest
import torch

from shardwise.base.errors import UsageError
from shardwise.passes.replay import BatchPosition, DrawReplay


def test_outside_of_a_microbatch_there_is_no_place() -> None:
    replay = DrawReplay()
    with pytest.raises(UsageError, match=r"no microbatch is running.*model.eval\(\)"):
        _ = replay.place
    with replay.at(BatchPosition(1)):
        assert replay.place == BatchPosition(1)
    with pytest.raises(UsageError):
        _ = replay.place


def test_calls_are_numbered_within_a_pass() -> None:
    replay = DrawReplay()
    for _ in range(2):
        with replay.at(BatchPosition(1)):
            assert [replay.next_call("a"), replay.next_call("b"), replay.next_call("a")] == [0, 0, 1]


def test_again_brings_back_place_and_numbers_many_times() -> None:
    replay = DrawReplay()
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
    replay = DrawReplay()
    with replay.at(BatchPosition(1)):
        with pytest.raises(ZeroDivisionError), replay.at(BatchPosition(2)):
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), replay.again():
            raise ZeroDivisionError
        assert replay.place == BatchPosition(1)


# What a pass keeps ---------------------------------------------------------------------------------------------------


def test_outside_of_a_piece_nothing_is_kept() -> None:
    replay, made = DrawReplay(), iter(range(9))
    assert [replay.keep("a", lambda: next(made)), replay.keep("a", lambda: next(made))] == [0, 1]


def test_a_run_again_takes_what_the_first_one_made_by_key_and_call() -> None:
    replay, made = DrawReplay(), iter(range(9))
    piece = replay.again()

    def run() -> list[int]:
        return [replay.keep(key, lambda: next(made)) for key in ("a", "b", "a")]

    with piece.first():
        assert run() == [0, 1, 2]
    for _ in range(2):
        with piece:
            assert run() == [0, 1, 2]
            with pytest.raises(UsageError, match="'b' was asked for 1 times where the piece ran first"):
                replay.keep("b", lambda: next(made))
    assert replay.keep("a", lambda: next(made)) == 3


def test_a_piece_that_runs_in_a_piece_that_runs_again_takes_from_it_and_keeps_for_its_own() -> None:
    replay, made = DrawReplay(), iter(range(9))
    outer = replay.again()
    with outer.first(), replay.again().first():
        assert replay.keep("a", lambda: next(made)) == 0
    with outer:
        inner = replay.again()
        with inner.first():
            assert replay.keep("a", lambda: next(made)) == 0
    with inner:
        assert replay.keep("a", lambda: next(made)) == 0


def test_pieces_under_way_do_not_mix() -> None:
    replay, made = DrawReplay(), iter(range(9))
    pieces = [replay.again() for _ in range(3)]
    for piece in pieces:
        with piece.first():
            replay.keep("a", lambda: next(made))
    for place in (1, 0, 2):
        with pieces[place]:
            assert replay.keep("a", lambda: next(made)) == place


def test_what_is_kept_is_made_without_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not DrawReplay().keep("a", lambda: weight * 2).requires_grad
