"""The verdict on drawn and written evidence: who is named, in which state, and who differs."""

from typing import Any

import pytest

from shardwise.comm.watching.answers import AwaitedCall, RankAnswer, SlowRank, StartedCall
from shardwise.comm.watching.mismatch import first_mismatch, skipped_call
from shardwise.comm.watching.verdict import (
    Presence,
    RankEvidence,
    blamed_in,
    judge,
    lines_of_all_waiting,
)

GROUP = "ranks 0-2"
STACK = '  File "/home/me/train.py", line 7, in forward\n    wait()'


def call(number: int, what: str, elements: int = 4, group: str = GROUP) -> StartedCall:
    return StartedCall(
        group=group,
        number=number,
        operation="all_reduce",
        what=what,
        dtype="float32",
        elements=elements,
        site=f"train.py:{number}",
    )


def loop(steps: int, *left_out: int, names: str = "abc") -> list[StartedCall]:
    """Return the calls of a loop over ``names``, without those at the places ``left_out``."""
    every = [what for place, what in enumerate(names * steps) if place not in left_out]
    return [call(number, what) for number, what in enumerate(every, 1)]


def rank(number: int, presence: Presence = Presence.ANSWERS, **more: Any) -> RankEvidence:
    """A rank at work, in step 4."""
    answer = RankAnswer(stack=STACK, unmoved_s=more.pop("unmoved_s", 0.0), verdict=more.pop("verdict", ""))
    usual = RankEvidence(number, "host", presence, answer, 0.0, 0.0, "", STACK, 4, "F(0,1)", False, loop(3))
    return usual._replace(**more)


def waits(number: int, seconds: float, **more: Any) -> RankEvidence:
    """A rank that waits for call 10 of the group."""
    awaited = AwaitedCall(group=GROUP, number=10, members=[0, 1, 2])
    answer = RankAnswer(waits=f"rank {number}: all_reduce of a", waited_s=seconds, awaited=awaited)
    return rank(number, answer=answer, starts=[*loop(3), call(10, "a")], **more)


def test_a_job_in_which_nobody_waits_long_runs() -> None:
    found = judge([rank(0), waits(1, 3.0), rank(2, unmoved_s=60.0)], 5.0)
    assert (found.state, found.rank, found.step, found.action) == ("running", None, 4, "F(0,1)")


@pytest.mark.parametrize(
    ("late", "state", "said"),
    [
        (rank(2, Presence.STOPPED, silent_s=9.0, seen="its process is stopped"), "hung", "is stopped"),
        (rank(2, Presence.SILENT, silent_s=9.0, seen="its process sleeps"), "hung", "sleeps"),
        (rank(2, Presence.SILENT, silent_s=9.0, seen="it computes", is_computing=True), "slow", "computes"),
        (rank(2, Presence.ENDED, silent_s=9.0, seen="its process has ended"), "hung", "has ended"),
        (rank(2, Presence.UNSEEN, seen="nothing is heard"), "hung", "nothing is heard"),
        (rank(2, unmoved_s=20.0), "hung", "has not moved for 20 s"),
        (rank(2, unmoved_s=1.0), "slow", "is alive and at work"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_rank_that_others_wait_for_is_named(late: RankEvidence, state: str, said: str) -> None:
    found = judge([waits(0, 9.0), waits(1, 8.0), late], 5.0)
    assert (found.state, found.rank, found.waiting) == (state, 2, [0, 1])
    assert said in found.sentence and "step 4, F(0,1)" in found.sentence and "train.py" in (found.where or "")
    assert found.phase == "computing"


def test_a_rank_that_has_come_is_not_blamed() -> None:
    """Rank 1 has started what rank 0 waits for, and computes beside it; rank 2 has not."""
    beside = rank(1, unmoved_s=30.0, starts=[*loop(3), call(10, "a")])
    found = judge([waits(0, 9.0), beside, rank(2, unmoved_s=10.0)], 5.0)
    assert found.rank == 2


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


def test_ranks_in_different_calls_are_a_mismatch() -> None:
    job = [waits(each, 9.0)._replace(starts=loop(4, 7) if each == 1 else loop(4)) for each in range(3)]
    found = judge(job, 5.0)
    assert (found.state, found.rank, found.where) == ("mismatch", 1, "train.py:8")
    assert "rank 1: all_reduce of c" in found.sentence and "ranks 0, 2: all_reduce of b" in found.sentence


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_skips_a_call_in_front_of_a_message_differs(size: int, odd: int) -> None:
    """The others wait in the call, and the rank waits for a message of theirs: no number has two calls."""
    ranks = range(size)

    def step(number: int, each: int, skips: bool) -> list[StartedCall]:
        sum_ = [] if skips else [call(number, "sum", group="world")]
        peer = (each + 1) % size
        pair = f"pair {min(each, peer)}-{max(each, peer)}"
        return [*sum_, call(2 * number, "there", group=pair), call(2 * number + 1, "back", group=pair)]

    job = []
    for each in ranks:
        starts = [made for number in range(1, 5) for made in step(number, each, False)]
        behind = step(5, each, each == odd)
        starts += behind[:2] if each == odd else behind[:1]
        last = starts[-1]
        members = [*ranks] if last.group == "world" else sorted({each, (each + 1) % size})
        awaited = AwaitedCall(group=last.group, number=last.number, members=members)
        answer = RankAnswer(waits=f"rank {each}: {last.what}", waited_s=9.0, awaited=awaited)
        job.append(rank(each, answer=answer, starts=starts))
    found = judge(job, 5.0)
    assert (found.state, found.rank) == ("mismatch", odd), found.sentence
    assert "call 5 of world was not made by rank" in found.sentence and found.where == "train.py:10"
    assert "was not made by rank" in "\n".join(
        lines_of_all_waiting(
            {each.rank: each.answer.model_copy(update={"starts": list(each.starts)}) for each in job}
        )
    )


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


def test_all_waiting_without_a_difference_names_nobody() -> None:
    found = judge([waits(each, 9.0) for each in range(3)], 5.0)
    assert (found.state, found.rank) == ("hung", None) and "wait for one another" in found.sentence


def test_the_watch_names_the_call_that_differs() -> None:
    answers = {
        each: RankAnswer(waits=f"rank {each}: x", waited_s=20.0, starts=loop(4, 7) if each else loop(4))
        for each in range(2)
    }
    lines = lines_of_all_waiting(answers)
    assert any("call 8 of ranks 0-2 differs" in line for line in lines)


def test_an_end_is_in_order_lost_or_an_error() -> None:
    left = judge([rank(each, Presence.LEFT) for each in range(2)], 5.0, is_over=True)
    assert left.state == "ended" and left.rank is None and "in order" in left.sentence
    lost = judge([rank(each) for each in range(2)], 5.0, is_over=True)
    assert lost.state == "ended" and lost.rank is None and "killed" in lost.sentence
    first = rank(1, failure="ValueError: no", failed_s=3.0)
    wrong = judge([rank(0, failure="IndexError", failed_s=4.0), first], 5.0, is_over=True)
    assert (wrong.state, wrong.rank) == ("ended", 1) and "ValueError: no" in wrong.sentence


def test_the_verdict_of_a_watch_that_ended_the_job_stands() -> None:
    told = "rank 0: all_reduce of a in step 4 has waited 20 s: rank 1 has not moved for 20 s: no line"
    found = judge([waits(0, 0.0), rank(1, verdict=told)], 5.0, is_over=True)
    assert (found.state, found.rank, found.sentence) == ("hung", 1, told)
    crossed = "rank 0: all_reduce of a has waited 20 s: all ranks wait for one another:"
    assert judge([rank(0, verdict=crossed)], 5.0, is_over=True).state == "mismatch"


def test_a_reader_is_seen_by_its_stack() -> None:
    stack = '  File "/x/shardwise/data/loader.py", line 1, in step_batches\n  File "/home/me/rows.py", line 2, in read'
    late = rank(0, unmoved_s=20.0, stack=stack, is_between_steps=True)
    found = judge([late, waits(1, 9.0), waits(2, 9.0)], 5.0)
    assert (found.phase, found.rank) == ("reading", 0)
    assert found.where == 'File "/home/me/rows.py", line 2, in read' and "front of step 5" in found.sentence


def test_a_rank_that_was_found_slow_is_named_for_a_while() -> None:
    def job(age_s: float) -> list[RankEvidence]:
        slow = SlowRank(rank=1, phase="reading", words="rank 1 takes 1.30 times as long", time_ns=10**9)
        answer = RankAnswer(time_ns=2 * 10**9, slow=slow)
        return [rank(0, answer=answer, age_s=age_s), rank(1)]

    found = judge(job(3.0), 5.0)
    assert (found.state, found.rank, found.phase) == (
        "slow",
        1,
        "reading",
    ) and "(found 4 s ago)" in found.sentence
    assert judge(job(300.0), 5.0).state == "running"


def test_the_rank_that_a_sentence_blames() -> None:
    assert blamed_in("rank 0: broadcast of x has waited 9 s: rank 12 does not answer: it sleeps") == 12
    assert blamed_in("rank 0: broadcast of x has waited 9 s: all ranks wait for one another") is None
