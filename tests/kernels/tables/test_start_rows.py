"""First rows are a function of seed, table and key: Philox as numpy has it, in any order and cut."""

import numpy as np
import pytest
import torch

from shardwise.kernels import philox
from shardwise.kernels.initializers import Constant, Normal, Uniform
from shardwise.kernels.tables import start_rows as module
from shardwise.kernels.tables.start_rows import start_rows

KEY = philox.key_of(3, "user")
KEYS = torch.tensor([5, -1, 0, 2**63 - 1, -(2**63), 17])


@pytest.mark.parametrize("first", [0, 1, 3, 6])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_the_bits_are_the_generators(first: int, width: int) -> None:
    drawn = start_rows(KEY, KEYS, width, Uniform(0, 1), first=first, dtype=torch.float64)
    expected = np.empty((len(KEYS), width))
    module.plain_uniform(np.uint64(KEY), KEYS.numpy().view(np.uint64), first, expected)
    assert np.array_equal(drawn.numpy(), expected)


def test_words_are_those_of_the_keys_substream() -> None:
    words = philox.words_of(KEY, 0, 8, [(5, 0, 0)])[0]
    expected = (words >> np.uint64(12)) * 2.0**-52 + 2.0**-53
    assert start_rows(KEY, KEYS[:1], 8, Uniform(0, 1), dtype=torch.float64)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("initializer", [Uniform(-0.5, 0.25), Normal(0.01, 1.0)])
def test_rows_do_not_depend_on_their_company_nor_columns_on_the_cut(initializer: Uniform | Normal) -> None:
    keys = torch.randperm(30_000)[:9_000]
    whole = start_rows(KEY, keys, 16, initializer)
    order = torch.randperm(9_000)
    assert torch.equal(start_rows(KEY, keys[order], 16, initializer), whole[order])
    for first, stop in [(0, 5), (5, 12), (12, 16)]:
        assert torch.equal(
            start_rows(KEY, keys, stop - first, initializer, first=first), whole[:, first:stop]
        )


def test_without_numba_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = start_rows(KEY, KEYS, 6, Normal(1.0))
    monkeypatch.setattr(module, "runs_compiled", lambda: False)
    assert torch.equal(start_rows(KEY, KEYS, 6, Normal(1.0)), ours)


def test_laws() -> None:
    keys = torch.arange(20_000)
    normal = start_rows(KEY, keys, 8, Normal(0.1, 2.0), dtype=torch.float64)
    assert abs(normal.mean() - 2) < 2e-3
    assert abs(normal.std() - 0.1) < 1e-3
    uniform = start_rows(KEY, keys, 8, Uniform(-0.3, 0.1), dtype=torch.float64)
    assert uniform.min() >= -0.3
    assert uniform.max() <= 0.1
    assert abs(uniform.mean() + 0.1) < 2e-3
    assert start_rows(KEY, keys, 2, Constant(0.5)).unique().tolist() == [0.5]
    assert start_rows(KEY, keys[:0], 2, Normal(1.0)).shape == (0, 2)


def test_tables_with_equal_keys_start_apart() -> None:
    other = start_rows(philox.key_of(3, "item"), KEYS, 4, Normal(1.0))
    assert not (other == start_rows(KEY, KEYS, 4, Normal(1.0))).any()
