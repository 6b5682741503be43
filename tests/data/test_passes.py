"""Passes over a Loader: each ends with the step that reaches the end of the data."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.data.passes import DataPasses


class Line:
    """A loader of 7 samples, with a global batch of 2 samples in 2 microbatches."""

    def __init__(self, size: int | None = 7, last: int | None = None) -> None:
        self.size, self._last = size, last
        self.share = SimpleNamespace(accumulation=2, global_batch=2)
        self.step = 0

    @property
    def epoch(self) -> int:
        return self.step * 2 // 7

    @property
    def steps_left(self) -> int | None:
        return None if self._last is None else self._last - self.step

    def step_batches(self) -> list[int]:
        self.step += 1
        return [2 * self.step - 2, 2 * self.step - 1]

    def __iter__(self) -> Iterator[int]:
        while self.steps_left != 0:
            first = 2 * self.step
            yield first
            self.step += 1
            yield first + 1


def passes(at_end: Any = None, **loader: Any) -> DataPasses:
    made: Any = Line(**loader)
    return DataPasses(made, at_end)


def test_each_loop_is_one_pass_and_leaves_nothing_out() -> None:
    ended: list[int] = []
    loop = passes(ended.append)
    assert [*loop] == [0, 1, 2, 3, 4, 5, 6, 7] and [*loop] == [8, 9, 10, 11, 12, 13]
    assert ended == [4, 3]


def test_steps_end_where_microbatches_do() -> None:
    ended: list[int] = []
    loop = passes(ended.append)
    assert [*loop.steps()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [*loop.steps()] == [[8, 9], [10, 11], [12, 13]] and ended == [4, 3]


def test_a_loop_that_was_left_goes_on_and_the_last_step_ends_it() -> None:
    loop = passes(last=6)
    for batch in loop:
        if batch == 3:
            break
    assert [*loop][-1] == 7 and [*loop.steps()] == [[8, 9], [10, 11]] and [*loop.steps()] == []


def test_lengths_count_the_steps_of_passes_together() -> None:
    loop = passes()
    assert len(loop) == 8 and loop.count_steps() == 4 and loop.count_steps(2) == 7
    for call in (lambda: len(passes(size=None)), passes(size=None).count_steps):
        with pytest.raises(TypeError, match="a stream has no length"):
            call()
