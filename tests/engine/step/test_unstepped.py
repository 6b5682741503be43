"""A warning of microbatches that no ``step()`` followed."""

import atexit
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.engine.step.unstepped import UnsteppedWarning


class Open:
    """Microbatches of a running step."""

    microbatches = 4

    def __init__(self, done: int, backwards: int) -> None:
        self.done, self.backwards, self.passes = done, backwards, done + backwards


def warning_of(done: int, backwards: int, speaks: bool = True) -> tuple[UnsteppedWarning, Any]:
    accumulation: Any = Open(done, backwards)
    return UnsteppedWarning(accumulation, speaks), accumulation


@pytest.mark.parametrize(
    ("done", "backwards", "said"),
    [(0, 0, ""), (0, 1, "1 microbatch was never stepped: 1 "), (2, 0, "2 microbatches were never stepped: 2 "),
     (1, 2, "2 microbatches were never stepped: 3 backward passes")],
)  # fmt: skip
def test_open_microbatches_are_counted_at_the_close(
    done: int, backwards: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    warning, kept = warning_of(done, backwards)
    warning.close(is_calm=True)
    assert len(caplog.messages) == bool(said) and all(f"close: {said}" in text for text in caplog.messages), (
        kept
    )


def test_who_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    warning_of(0, 1, speaks=False)[0].close(is_calm=True)
    raised, kept = warning_of(0, 1)
    raised.close(is_calm=False)
    dropped = warning_of(0, 1)[0]  # the accumulation is gone with its engine
    dropped.close(is_calm=True)
    assert caplog.messages == [] and kept.passes == 1


def test_the_end_of_the_program_warns_too_unless_an_error_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(
        "shardwise.engine.step.unstepped.atexit",
        SimpleNamespace(register=at_exit.append, unregister=at_exit.remove),
    )
    warning, kept = warning_of(0, 1)
    warning.watch()
    warning.watch()
    assert len(at_exit) == 1 and atexit.register is not at_exit.append
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    at_exit[0]()
    assert caplog.messages == []
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    at_exit[0]()
    assert caplog.messages[0].startswith("exit: 1 microbatch was") and kept.passes == 1
    warning.close(is_calm=False)
    assert at_exit == []
