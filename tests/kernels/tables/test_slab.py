"""A slab takes address space at once and memory as it is written."""

import psutil
import pytest
import torch

from shardwise.kernels.tables.slab import reserve


def test_a_slab_far_larger_than_what_is_written() -> None:
    before = psutil.Process().memory_info().rss
    slab = reserve(1 << 28, 17)
    assert slab.shape == (1 << 28, 17)
    slab[:1000] = 1.0
    slab[-1, -1] = 2.0
    assert slab[:1001].sum() == 17_000
    assert slab[-1].tolist() == [0.0] * 16 + [2.0]
    assert psutil.Process().memory_info().rss - before < 1 << 28, "of 17 GiB"


def test_dtypes_and_nothing() -> None:
    assert reserve(3, 2, torch.float64).tolist() == [[0, 0]] * 3
    assert reserve(0, 4).shape == (0, 4)


def test_what_does_not_fit_says_so() -> None:
    with pytest.raises(MemoryError, match="no address space for a table of .* give tables that grow a limit"):
        reserve(1 << 52, 64)
    with pytest.raises(ValueError, match="expected at least 0 by 1"):
        reserve(-1, 4)
