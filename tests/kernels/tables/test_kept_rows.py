"""Copies of rows replace what was read of them, and of no other rows."""

import torch

from shardwise.kernels.tables.kept_rows import KeptRows


def test_copies_replace_what_was_read() -> None:
    kept = KeptRows(6, [torch.float32, torch.int64], [2, 1])
    rows = torch.tensor([4, 1])
    assert kept.lacks(rows).tolist() == [True, True]
    kept.keep(rows, [torch.tensor([[4.0, 4.5], [1.0, 1.5]]), torch.tensor([[40], [10]])])
    assert kept.lacks(torch.arange(6)).tolist() == [True, False, True, True, False, True]
    found = [torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64)]
    kept.put(torch.tensor([1, 2, 4]), found)
    assert found[0].tolist() == [[1.0, 1.5], [0.0, 0.0], [4.0, 4.5]]
    assert found[1].tolist() == [[10], [0], [40]]
