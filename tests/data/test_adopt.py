"""What a user may bring, and how each is seen."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.adopt import IterableData, MapStyleData, adopt


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Restartable:
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


DATASET = TensorDataset(torch.arange(10))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (DATASET, MapStyleData(DATASET, default_collate, True)),
        ([3, 4], MapStyleData([3, 4], default_collate, True)),
        (DataLoader(DATASET, 2), MapStyleData(DATASET, default_collate, False)),
        (DataLoader(DATASET, 2, shuffle=True), MapStyleData(DATASET, default_collate, True)),
        (
            DataLoader(DATASET, 2, sampler=DistributedSampler(DATASET, 2, 1, shuffle=False)),
            MapStyleData(DATASET, default_collate, False),
        ),
    ],
    ids=["dataset", "list", "loader", "shuffled loader", "distributed sampler"],
)
def test_random_access_is_found(data: Any, expected: MapStyleData) -> None:
    assert adopt(data) == expected


@pytest.mark.parametrize(
    ("data", "holds_batches"),
    [
        (Numbers(), False),
        (Restartable(), False),
        (DataLoader(Numbers(), 2), True),
        (DataLoader(DATASET, 2, sampler=WeightedRandomSampler([1.0] * 10, 10)), True),
        (DataLoader(DATASET, batch_sampler=[[0, 1], [2]]), True),
        (DataLoader(DATASET, None, sampler=BatchSampler(SequentialSampler(DATASET), 2, True)), True),
    ],
    ids=["iterable", "restartable", "loader of iterable", "own sampler", "own batches", "no batching"],
)
def test_the_rest_is_a_stream(data: Any, holds_batches: bool) -> None:
    adopted = adopt(data)
    assert isinstance(adopted, IterableData)
    assert adopted.holds_batches == holds_batches


def test_a_loader_keeps_its_collate_and_workers() -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return samples

    loader = DataLoader(DATASET, 2, collate_fn=collate, num_workers=2, prefetch_factor=5)
    adopted = adopt(loader, workers=0)
    assert isinstance(adopted, MapStyleData)
    assert adopted.collate is collate
    assert (adopted.worker_options["num_workers"], adopted.worker_options["prefetch_factor"]) == (2, 5)


@pytest.mark.parametrize(
    ("data", "workers", "error", "expected"),
    [
        ([], 0, DataError, "list is empty"),
        (DataLoader([]), 0, DataError, "dataset is empty"),
        (iter([1, 2]), 0, DataError, "cannot be read again"),
        (3, 0, DataError, "data is a int; expected a Dataset"),
        (None, 0, DataError, "data is a NoneType"),
        (Numbers(), 2, ConfigError, "each worker would read whole; set it to 0 or 1"),
    ],
)
def test_what_cannot_work_is_refused(data: Any, workers: int, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        adopt(data, workers=workers)
