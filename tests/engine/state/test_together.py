"""Collective calls: their name in errors, and the meeting of the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardwise.engine.state.together import named, together, within


class Clock:
    """Notes what is entered and left."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @contextmanager
    def within(self, call: str, meets: bool) -> Iterator[None]:
        self.seen.append((call, meets))
        yield
        self.seen.append("left")


class Engine:
    """Two collective methods."""

    def __init__(self) -> None:
        self.clock: Any = Clock()

    @together
    def save(self, step: int) -> int:
        """Save."""
        self.clock.seen.append("saving")
        return step + 1

    @named
    def step(self) -> None:
        self.clock.seen.append("stepping")


def test_a_method_is_named_and_the_ranks_meet_before_it() -> None:
    engine = Engine()
    assert engine.save(step=2) == 3 and engine.save.__doc__ == "Save."
    engine.step()
    assert engine.clock.seen == [
        ("engine.save()", True), "saving", "left", ("engine.step()", False), "stepping", "left",
    ]  # fmt: skip


@contextmanager
def noted(seen: list[Any], swallows: bool = False) -> Iterator[str]:
    seen.append("in")
    try:
        yield "entered"
    except ValueError:
        if not swallows:
            raise
    finally:
        seen.append("out")


def test_entry_and_exit_of_a_context_are_collective_and_its_body_is_not() -> None:
    clock: Any = Clock()
    with within(clock, "whole()", noted(clock.seen)) as entered:
        clock.seen.append(entered)
    one = [("whole()", True), "in", "left", "entered", ("whole()", True), "out", "left"]
    assert clock.seen == one
    with pytest.raises(ValueError, match="inside"), within(clock, "whole()", noted(clock.seen)):
        raise ValueError("inside")
    assert clock.seen[-2:] == [("whole()", True), "out"]
    with within(clock, "whole()", noted(clock.seen, swallows=True)):
        raise ValueError("inside")
    assert clock.seen[-1] == "left"
