"""Batched datasets: the same samples on any layout, exact resume, an end that every rank reaches with empty batches."""

import json
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.batched import BatchedDataset
from shardwise.data.evaluation import evaluation_batches
from shardwise.data.loader import Loader
from shardwise.data.sampler import Sampler


class Numbers(BatchedDataset):
    """Sample i is i; remembers which threads read, and can be slow now and then."""

    def __init__(self, size: int = 50, pause_s: float = 0.0) -> None:
        self.size, self.pause_s = size, pause_s
        self.threads: set[str] = set()
        self.broken = False

    def __len__(self) -> int:
        return self.size

    def batch(self, samples: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        self.threads.add(threading.current_thread().name)
        if self.broken:
            raise OSError("the disk went away")
        if samples.size and samples[0] % 3 == 0:
            time.sleep(self.pause_s)
        return {"x": torch.from_numpy(samples)}

    def fingerprint(self) -> str:
        return f"numbers {self.size}"


def loaders(dp: int, micro: int, data: Any = None, **options: Any) -> list[Loader]:
    return [
        Loader(data or Numbers(), global_batch=8, micro_batch=micro, dp_index=rank, dp_size=dp, **options)
        for rank in range(dp)
    ]


def steps(ranks: list[Loader], count: int) -> list[list[int]]:
    """For each step its samples in the order that layouts share."""
    result = []
    for _ in range(count):
        turns = [loader.step_batches() for loader in ranks]
        assert len({len(batches) for batches in turns}) == 1, "as many batches on every rank"
        result.append([x for turn in zip(*turns, strict=True) for batch in turn for x in batch["x"].tolist()])
    for loader in ranks:
        loader.close()
    return result


LAYOUTS = [(1, 8), (1, 2), (2, 2), (4, 2), (2, 4), (8, 1)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epochs", [None, 1, 2])
def test_the_same_samples_on_any_layout(shuffle: bool, epochs: int | None) -> None:
    layouts = [steps(loaders(*layout, shuffle=shuffle, epochs=epochs, seed=3), 15) for layout in LAYOUTS]
    assert all(layout == layouts[0] for layout in layouts)
    expected = [Sampler(50, 3, shuffle).indices(step, 8) for step in range(15)]
    flat = [x for step in expected for x in step][: 50 * epochs if epochs else None]
    assert [x for step in layouts[0] for x in step] == flat
    assert all(step == part for step, part in zip(layouts[0], expected, strict=True) if len(step) == 8)


def test_the_end_comes_with_empty_batches_on_every_rank() -> None:
    """20 samples, 8 a step over 4 ranks: the third step has 4, on the first two ranks; then nothing."""
    ranks = loaders(4, 2, Numbers(20), epochs=1, shuffle=False)
    assert [loader.steps_left for loader in ranks] == [3] * 4
    sizes = [[loader.step_batches()[0]["x"].numel() for loader in ranks] for _ in range(5)]
    assert sizes == [[2] * 4, [2] * 4, [2, 2, 0, 0], [0] * 4, [0] * 4]
    assert ranks[3].step_batches()[0]["x"].dtype == torch.int64
    assert [loader.steps_left for loader in ranks] == [0] * 4
    for loader in ranks:
        loader.close()
    assert loaders(1, 8)[0].steps_left is None


@pytest.mark.parametrize("stop", [0, 3, 6, 7, 9])
@pytest.mark.parametrize(("before", "after"), [((1, 2), (4, 2)), ((4, 2), (2, 1)), ((2, 4), (1, 8))])
def test_resume_on_other_ranks_goes_on_exactly(
    stop: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    undisturbed = steps(loaders(1, 8, epochs=1), 9)
    first = loaders(*before, epochs=1)
    assert steps(first, stop) == undisturbed[:stop]
    states = {json.dumps(loader.state()) for loader in first}
    assert len(states) == 1, "equal on every rank"
    second = loaders(*after, epochs=1)
    for loader in second:
        loader.load_state(json.loads(next(iter(states))))
        assert loader.step == stop
    assert steps(second, 9 - stop) == undisturbed[stop:]


@pytest.mark.parametrize("workers", [1, 3])
def test_reader_threads_change_nothing_and_end(workers: int) -> None:
    data = Numbers(pause_s=0.01)
    before = set(threading.enumerate())
    loader = loaders(1, 2, data, workers=workers)[0]
    assert steps([loader], 6) == steps(loaders(1, 8), 6)
    assert all(name.startswith("shardwise-data") for name in data.threads)
    assert set(threading.enumerate()) <= before


def bytes_once(loader: Loader, wanted: int) -> int:
    """Bytes read ahead, when the threads have read what they are to read."""
    deadline = time.monotonic() + 20
    while loader.ahead_bytes != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return loader.ahead_bytes


@pytest.mark.parametrize("ahead", [0, 3])
def test_steps_are_read_ahead_as_far_as_asked_and_watched(ahead: int) -> None:
    spans: list[tuple[int, float, float]] = []
    loader = loaders(1, 4, steps_ahead=ahead, watch=lambda *span: spans.append(span))[0]
    straight = steps(loaders(1, 8), 2)
    assert [x for batch in loader.step_batches() for x in batch["x"].tolist()] == straight[0]
    deadline = time.monotonic() + 20
    while len(spans) < 2 * (ahead + 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader.steps_ahead == ahead and bytes_once(loader, ahead * 64) == ahead * 64
    loader.close()
    assert loader.ahead_bytes == 0
    assert sorted(position for position, _, _ in spans) == [8 * (i // 2) for i in range(2 * (ahead + 1))]
    assert all(began <= ended for _, began, ended in spans)


def test_iteration_ends_after_the_epochs_on_every_rank_at_once() -> None:
    ranks = loaders(4, 1, Numbers(20), epochs=1, shuffle=False)
    sizes = [[batch["x"].numel() for batch in loader] for loader in ranks]
    assert sizes == [[1] * 5 + [0]] * 4, "two microbatches a step; the last four samples are one a rank"
    assert list(ranks[0]) == []
    again = loaders(1, 8, Numbers(20), epochs=1)[0]
    again.load_state(ranks[0].state() | {"data": again.state()["data"]})
    assert list(again) == []


def test_what_was_read_ahead_is_not_counted() -> None:
    data = Numbers()
    loader = loaders(1, 8, data)[0]
    loader.step_batches()
    assert loader.state()["cursor"] == {"position": 8}
    loader.close()


def test_any_step_can_be_asked_for() -> None:
    straight = steps(loaders(1, 8), 6)
    loader = loaders(1, 8)[0]
    for step in (5, 0, 3):
        assert loader.step_batches(step)[0]["x"].tolist() == straight[step]
    loader.close()


def test_an_error_of_the_reader_reaches_the_caller_and_can_be_got_over() -> None:
    data = Numbers()
    loader = loaders(1, 8, data)[0]
    data.broken = True
    for _ in range(2):
        with pytest.raises(OSError, match="the disk went away"):
            loader.step_batches()
    data.broken = False
    assert steps([loader], 1) == steps(loaders(1, 8), 1), "no sample is lost"


def test_other_data_and_too_little_are_refused() -> None:
    state = loaders(1, 8)[0].state()
    with pytest.raises(DataError, match="samples 50 then, 51 now"):
        loaders(1, 8, Numbers(51))[0].load_state(state)
    with pytest.raises(DataError, match="holds 7 samples; give more data or a smaller batch.global_size"):
        loaders(1, 8, Numbers(7))
    assert steps(loaders(1, 8, Numbers(7), epochs=1, shuffle=False), 2) == [list(range(7)), []]
    with pytest.raises(ConfigError, match="epochs is 1, but list is read sample by sample"):
        Loader([1, 2, 3], global_batch=2, micro_batch=2, epochs=1)


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize(("size", "limit"), [(50, None), (51, None), (3, None), (50, 7), (50, 80)])
def test_evaluation_sees_every_sample_once(dp: int, size: int, limit: int | None) -> None:
    ranks = [list(evaluation_batches(Numbers(size), rank, dp, 4, samples=limit)) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(each.weight == each.batch["x"].numel() for batches in ranks for each in batches)
    seen = [x for turn in zip(*ranks, strict=True) for each in turn for x in each.batch["x"].tolist()]
    count = min(limit or size, size)
    assert seen == [i * size // count for i in range(count)]
