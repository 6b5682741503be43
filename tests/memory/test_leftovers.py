"""Resources whose owners were dropped without ``close``."""

import gc

import pytest

from shardwise.memory.leftovers import OpenResources


class Owner:
    """A thing that can be collected."""


def test_an_owner_ends_its_resource_once() -> None:
    leftovers, ended, owner = OpenResources(), [], Owner()
    end = leftovers.keep(owner, lambda: ended.append("file"))
    end()
    end()
    del owner
    gc.collect()
    leftovers.end_dropped()
    assert ended == ["file"]


def test_a_dropped_one_is_ended_by_the_next_engine_and_not_by_the_collector() -> None:
    leftovers, ended, dropped, kept = OpenResources(), [], Owner(), Owner()
    leftovers.keep(dropped, lambda: ended.append("dropped"))
    leftovers.keep(kept, lambda: ended.append("kept"))
    del dropped
    gc.collect()
    assert ended == []
    leftovers.end_dropped()
    leftovers.end_dropped()
    assert ended == ["dropped"]


def test_the_end_of_the_process_ends_those_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers, ended, owner = OpenResources(), [], Owner()
    leftovers.keep(owner, lambda: ended.append("first"), at_exit=True)
    leftovers.keep(owner, lambda: ended.append("no"))
    leftovers.keep(owner, lambda: ended.append("second"), at_exit=True)
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)  # a fork
        leftovers.end_all()
    assert ended == []
    leftovers.end_all()
    leftovers.end_all()
    assert ended == ["first", "second"]
