"""Questions over a store: answers come by rank, late ones are left out, and one verdict holds for all."""

import threading

import pytest
import torch.distributed as dist

from shardwise.comm.rendezvous.store import SealedStore
from shardwise.comm.watching import questions
from shardwise.comm.watching.answers import RankAnswer, StartedCall
from shardwise.comm.watching.questions import AwaitedTexts, WatchQuestions


def pair() -> list[WatchQuestions]:
    store = SealedStore(dist.HashStore(), b"key")
    return [WatchQuestions(rank, 2, store, "watch") for rank in range(2)]


def test_answers_come_by_rank() -> None:
    asks, answers = pair()
    assert not answers.is_asked
    said = RankAnswer(waits="rank 1: x", starts=[StartedCall(group="g", number=1, operation="barrier")])

    def answer() -> None:
        while not answers.is_asked:
            pass
        answers.answer(said)

    thread = threading.Thread(target=answer)
    thread.start()
    assert asks.ask(RankAnswer(), lambda: False) == {0: RankAnswer(), 1: said}
    thread.join()
    assert not asks.is_asked and not answers.is_asked, "both are at the next question"


def test_a_rank_that_is_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.1)
    assert list(pair()[0].ask(RankAnswer(), lambda: False)) == [0]


def test_a_verdict_and_an_offer_are_for_all() -> None:
    first, second = pair()
    assert first.verdict == "" and second.offer_of(0) is None
    first.leave_verdict("rank 1 does not answer")
    first.offer([40, 3, 7])
    assert second.verdict == "rank 1 does not answer" and second.offer_of(0) == [40, 3, 7]


def test_missing_texts_are_named_by_rank() -> None:
    first, _ = pair()
    first._store.set("save/4", "here")
    assert first.missing(AwaitedTexts("save", (4, 6), ("save/4", "save/6"))) == [6]
