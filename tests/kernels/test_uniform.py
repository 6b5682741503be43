"""Uniform numbers of rows: the bits of the stream that they are cut from, wherever a row begins."""

import pytest
import torch

from shardwise.kernels.philox import key_of, uniform_of
from shardwise.kernels.uniform import plain_uniform_rows, uniform_rows


@pytest.mark.parametrize("width", [1, 3, 4, 7, 64])
def test_rows_are_parts_of_their_substreams(width: int) -> None:
    key, call, step = key_of(3, "router:mlp"), 2, 5
    starts = torch.tensor([0, 1, 2, 3, 40, 0, 1 << 33])
    names = torch.tensor([9, 9, 9, 9, 9, 10, 1 << 40])
    found = uniform_rows(starts, names, width, key, call, step)
    for row, start, name in zip(found, starts.tolist(), names.tolist(), strict=True):
        assert torch.equal(row, uniform_of(key, start, start + width, [(call, name, step)])[0])


def test_a_key_above_the_signed_numbers() -> None:
    starts, names, key = torch.tensor([6]), torch.tensor([1]), (1 << 64) - 5
    found = plain_uniform_rows(starts, names, 4, key - (1 << 64), 0, 0)
    assert torch.equal(found, uniform_of(key, 6, 10, [(0, 1, 0)]))


def test_no_rows() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert uniform_rows(nothing, nothing, 4, 1, 0, 0).shape == (0, 4)
