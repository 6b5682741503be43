"""Every validation sample exactly once, and as many batches on every rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shardwise.base.errors import DataError
from shardwise.base.ragged import Ragged
from shardwise.data.evaluation import WeightedBatch, evaluation_batches
from shardwise.data.token_file import TokenFile, TokenWriter
from shardwise.data.windows import TokenSpan, TokenWindows

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Range(IterableDataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.size))


class Batches(IterableDataset[Any]):
    """Batches that are read one after another."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class LoaderOfBatches:
    """Makes a DataLoader whose batches are used as they come."""

    def __new__(cls, size: int) -> Any:
        return DataLoader(Range(size), 4)


def _dataset(size: int) -> list[Tensor]:
    return list(torch.arange(size))


def _counted(batches: list[WeightedBatch]) -> list[int]:
    return [int(sample) for batch, weight in batches for sample in batch[:weight]]


@pytest.mark.parametrize("make", [_dataset, Range, LoaderOfBatches])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 4, 9, 10, 12, 32])
def test_every_sample_once_and_equal_rounds(make: Any, dp: int, size: int) -> None:
    ranks = [list(evaluation_batches(make(size), rank, dp, 4)) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) == -(-size // (4 * dp))
    assert sorted(sample for batches in ranks for sample in _counted(batches)) == list(range(size))
    assert all(
        len(batch) == weight or weight == 0 < len(batch) for batches in ranks for batch, weight in batches
    )


def test_weighted_mean_does_not_depend_on_the_ranks() -> None:
    def mean(dp: int) -> float:
        batches = [each for rank in range(dp) for each in evaluation_batches(_dataset(10), rank, dp, 4)]
        total = sum(float(batch.double().mean()) * weight for batch, weight in batches)
        return total / sum(weight for _, weight in batches)

    assert [mean(dp) for dp in (1, 2, 3)] == pytest.approx([4.5] * 3, abs=1e-12)


def test_samples_of_features_count_and_not_their_keys() -> None:
    """Samples with no, one or two keys, in batches that the user's loader makes."""
    lists = [[sample] * (sample % 3) for sample in range(10)]
    batches = [{"a": Ragged.of_lists(lists[start : start + 4])} for start in range(0, 10, 4)]
    loader = DataLoader(Batches(batches), None)
    weights = [each.weight for rank in range(2) for each in evaluation_batches(loader, rank, 2, 4)]
    assert weights == [4, 2, 4, 0]


@pytest.mark.parametrize("make", [_dataset, Range])
def test_bounded_evaluation(make: Any) -> None:
    ranks = [list(evaluation_batches(make(100), rank, 2, 4, samples=10)) for rank in range(2)]
    seen = sorted(sample for batches in ranks for sample in _counted(batches))
    assert seen == (list(range(0, 100, 10)) if make is _dataset else list(range(10)))
    assert len(list(evaluation_batches(make(3), 0, 1, 4, samples=10))) == 1


def test_text(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "x.tokens", "numbers", 1000) as writer:
        writer.append(np.arange(501))
    windows = TokenWindows([TokenSpan(TokenFile(tmp_path / "x.tokens"), 0, 501)], 10)
    batches = list(evaluation_batches(windows, 1, 2, 8))
    assert [weight for _, weight in batches] == [8, 8, 8, 0]
    assert batches[0].batch["tokens"].shape == (8, 10)
    assert int(batches[0].batch["tokens"][0, 0]) == 80


def test_workers_change_nothing() -> None:
    data = TensorDataset(torch.arange(22))
    alone, helped = (list(evaluation_batches(data, 1, 2, 4, workers=workers)) for workers in (0, 2))
    assert len(alone) == len(helped) == 3
    for one, two in zip(alone, helped, strict=True):
        assert torch.equal(one.batch[0], two.batch[0])
        assert one.weight == two.weight


def test_nothing_to_evaluate_is_refused() -> None:
    with pytest.raises(DataError, match="list is empty"):
        list(evaluation_batches([], 0, 1, 4))
    with pytest.raises(DataError, match="validation stream is empty"):
        list(evaluation_batches(Range(0), 0, 1, 4))
