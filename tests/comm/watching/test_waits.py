"""Waits in words, and when the other ranks are first asked."""

from shardwise.comm.watching.questions import AwaitedTexts
from shardwise.comm.watching.waits import END_OF_PASS, SOON_S, CollectiveWait, advice

TEXTS = AwaitedTexts("save/1", (0, 1), ("save/1/0", "save/1/1"))


def wait(**more: object) -> CollectiveWait:
    return CollectiveWait((3, "all_reduce", "x", 7), 0.0, 20.0, True, 20.0, None)._replace(**more)  # type: ignore[arg-type]


def test_a_wait_in_words() -> None:
    assert str(wait()) == "rank 3: all_reduce of x in step 7"
    assert str(wait(call="engine.save()")) == "rank 3: all_reduce of x in step 7, in engine.save()"
    texts = wait(what=(3, "its beginning"), words=TEXTS, call="engine.load()")
    assert str(texts) == "rank 3: engine.load(), its beginning"


def test_calls_that_all_must_make_are_asked_about_early() -> None:
    assert wait().soon_s == 15.0
    assert wait(call="engine.save()").soon_s == wait(words=TEXTS).soon_s == SOON_S
    assert wait(call="engine.save()", patience_s=2.0).soon_s == 1.5


def test_advice_names_the_call() -> None:
    assert advice("") == ""
    assert advice("engine.save()").startswith("engine.save() is collective: call it on all ranks")
    assert "same dataset on every" in advice(f"{END_OF_PASS} 3")
