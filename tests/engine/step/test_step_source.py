"""Steps, one after another, from an iterable or a loader."""

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from shardwise.data.loader import Loader
from shardwise.engine.step.step_source import ReadStep, StepSource


def source(steps: Any) -> StepSource:
    return StepSource(steps, None, lambda: None)


def loader() -> Loader:
    """Six samples in steps of two."""
    data = TensorDataset(torch.arange(6))
    return Loader(data, global_batch=2, micro_batch=2, dp_index=0, dp_size=1, shuffle=False)


def values(step: ReadStep | None) -> list[int]:
    assert step is not None
    return [int(value) for batch in step.batches for value in batch[0]]


def test_steps_of_an_iterable_have_the_numbers_of_the_caller() -> None:
    steps = source(iter(["a", "b"]))
    assert not steps.reads_apart
    assert steps.read(7) == ReadStep("a", 7, None) and steps.read(8) == ReadStep("b", 8, None)
    assert steps.read(9) is None and steps.read(9) is None


def test_an_error_ends_the_steps() -> None:
    def failing() -> Any:
        yield "a"
        raise ValueError("a bad row")

    steps = source(failing())
    steps.read(0)
    with pytest.raises(ValueError, match="a bad row"):
        steps.read(1)
    assert steps.read(2) is None


def test_the_position_of_a_loader_is_that_of_the_step_handed_out() -> None:
    data = loader()
    steps = source(data)
    first, second = steps.read(99), steps.read(99)
    assert values(first) == [0, 1] and values(second) == [2, 3]
    assert data.step == 0
    assert first is not None and second is not None
    assert (first.number, second.number) == (1, 2)
    steps.count(first)
    assert data.step == 1
    assert values(steps.read(99)) == [4, 5] and values(steps.read(99)) == [0, 1]
    steps.close(1.0)


def test_another_caller_takes_the_loader_back() -> None:
    data, told = loader(), []
    steps = StepSource(data, None, lambda: told.append(True))
    steps.count(steps.read(0))  # type: ignore[arg-type]
    steps.read(1)
    assert [int(value) for value in data.step_batches()[0][0]] == [2, 3] and told == [True]
    data.close()


def test_a_read_can_be_waited_for() -> None:
    free, started = threading.Event(), threading.Event()

    def slow() -> Any:
        started.set()
        free.wait(5)
        yield "a"

    steps = source(slow())
    assert steps.wait(0)
    reader = threading.Thread(target=steps.read, args=(0,))
    reader.start()
    started.wait(5)
    assert not steps.wait(0.01)
    free.set()
    reader.join()
    assert steps.wait(1)
    steps.end()
    assert steps.read(1) is None
