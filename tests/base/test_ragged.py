"""Ragged refuses parts that do not fit together, and says which sample."""

from typing import Any

import pytest
import torch

from shardwise.base.errors import DataError
from shardwise.base.ragged import Ragged, offsets_of, samples_in


def test_lists_and_ones() -> None:
    ragged = Ragged.of_lists([[7, 3], [], [9, 9, 4]])
    ragged.check("a")
    assert ragged.offsets.tolist() == [0, 2, 2, 5] and ragged.samples == 3
    ones = Ragged.of_ones(torch.tensor([4, 5]))
    ones.check("b")
    assert ones.offsets.tolist() == [0, 1, 2]
    empty = Ragged.of_lists([])
    empty.check("c")
    assert empty.samples == 0 and offsets_of(torch.tensor([2, 0])).tolist() == [0, 2, 2]


def test_samples_of_a_batch() -> None:
    bags = Ragged.of_lists([[7, 3], [], [9, 9, 4], []])
    assert samples_in({"scale": torch.tensor(1.0), "sparse": {"a": bags}, "x": torch.zeros(5)}) == 4
    assert samples_in((torch.zeros(3, 2), bags)) == 3
    assert samples_in({"text": "ab", "list": [1, 2], "none": None}) is None
    assert samples_in(torch.tensor(1.0)) is None


@pytest.mark.parametrize(
    "lists", [[[1.5], [2.7]], [[1], [2.0]], [[1 << 63]], [1, 2], [[None]], None, [[[1]]]], ids=str
)
def test_lists_of_other_things_are_refused(lists: Any) -> None:
    """Keys were once cut to whole numbers in silence."""
    with pytest.raises(DataError, match="Ragged.of_lists"):
        Ragged.of_lists(lists)


@pytest.mark.parametrize(
    ("values", "offsets", "weights", "says"),
    [
        (torch.zeros(2), [0, 2], None, "float32"),
        (torch.zeros(2, 1, dtype=torch.int64), [0, 2], None, r"\[2, 1\]"),
        (torch.zeros(2, dtype=torch.int64), [0, 3], None, "from 0 to 3, but there are 2"),
        (torch.zeros(2, dtype=torch.int64), [1, 2], None, "from 1 to 2"),
        (torch.zeros(2, dtype=torch.int64), [0, 2, 1, 2], None, "sample 1 begins at 2"),
        (torch.zeros(2, dtype=torch.int64), [], None, "offsets are"),
        (torch.zeros(2, dtype=torch.int64), [0, 2], torch.ones(3), "one float for each of 2"),
    ],
)
def test_what_does_not_fit_is_refused(values, offsets, weights, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=f"(?s)feature 'clicks'.*{says}"):
        Ragged(values, torch.tensor(offsets, dtype=torch.int64), weights).check("clicks")
