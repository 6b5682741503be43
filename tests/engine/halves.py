"""Schedules whose backward passes are in two parts, I and W, made of any other schedule, and engines that run them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from shardwise.compose import lists
from shardwise.plan.action import Action, Kind


def halved(row: Sequence[Action], delay: int = 0) -> list[Action]:
    """The passes of one rank with I and W for each B; W stands behind ``delay`` more I of its stage."""
    made: list[Action] = []
    waiting: dict[int, list[Action]] = {}
    for action in row:
        if action.kind is not Kind.B:
            made.append(action)
            continue
        made.append(action._replace(kind=Kind.I))
        left = waiting.setdefault(action.stage, [])
        left.append(action._replace(kind=Kind.W))
        if len(left) > delay:
            made.append(left.pop(0))
    return made + [action for left in waiting.values() for action in left]


@contextmanager
def in_halves(delay: int) -> Iterator[None]:
    """Engines that are made inside run W ``delay`` microbatches behind I; a negative number changes nothing."""
    made = lists.schedule

    def schedule(*args: Any, **kwargs: Any) -> Mapping[int, list[Action]]:
        return {rank: halved(row, delay) for rank, row in made(*args, **kwargs).items()}

    if delay < 0:
        yield
        return
    with patch.object(lists, "schedule", schedule):
        yield
