"""DeepSpeed's functions that log and print, on some ranks alone."""

import logging

import pytest

from shardwise.comm import default_group
from shardwise.deepspeed.calls import logs
from shardwise.deepspeed.calls.logs import (
    log_dist,
    log_dist_once,
    print_dist,
    print_rank_0,
    see_memory_usage,
    set_log_level_from_string,
    warning_once,
)


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(default_group, "rank", lambda: 1)
    caplog.set_level(logging.INFO, logger=logs.logger.name)
    return caplog


def test_a_message_is_that_of_the_ranks_it_is_for(
    rank_1: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks in (None, [], [-1], [0, 1], [0], [2]):
        log_dist("said", ranks)
        print_dist("printed", ranks)
    assert rank_1.messages == ["[rank 1] said"] * 4
    assert capsys.readouterr().out.splitlines() == ["[rank 1] printed"] * 4


def test_some_texts_are_logged_once(rank_1: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        log_dist_once("once on a rank", (1,))
        warning_once("once of %s", "this")
    assert rank_1.messages == ["[rank 1] once on a rank", "once of this"]


def test_rank_0_prints_what_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_rank_0("silent")
    print_rank_0("debug", debug=True)
    print_rank_0("force", force=True)
    monkeypatch.setattr(default_group, "rank", lambda: 1)
    print_rank_0("of another rank", force=True)
    assert capsys.readouterr().out.split() == ["debug", "force"]


def test_a_level_by_its_name() -> None:
    logger = logging.getLogger("test of a level")
    set_log_level_from_string("error", logger)
    assert logger.level == logging.ERROR


def test_memory_is_logged_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=logs.logger.name)
    see_memory_usage("not asked")
    see_memory_usage("now", force=True)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("[rank 0] now: ") and "at the peak" in caplog.messages[0]
