"""The verdict on drawn and written evidence: who is named, in which state, and who differs."""

from typing import Any

import pytest

from shardwise.comm.watching.answers import AwaitedCall, RankAnswer, SlowRank, StartedCall
from shardwise.comm.watching.verdict import (
    Presence,
    RankEvidence,
    blamed_in,
    judge,
    lines_of_all_waiting,
)
from tests.comm.watching.calls import GROUP, call, loop

STACK = '  File "/home/me/train.py", line 7, in forward\n    wait()'


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
    brief = [each._replace(answer=each.answer.model_copy(update={"waited_s": 1.0})) for each in job]
    assert judge(brief, 5.0).state == "running" and judge(brief, 5.0, is_over=True).rank == odd
    assert "was not made by rank" in "\n".join(
        lines_of_all_waiting(
            {each.rank: each.answer.model_copy(update={"starts": list(each.starts)}) for each in job}
        )
    )


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
