"""Copies of rows replace what was read of them, and of no other rows."""

from unittest.mock import patch

import pytest
import torch

from shardwise.kernels.tables import kept_rows
from shardwise.kernels.tables.kept_rows import KeptRows


def test_copies_replace_what_was_read() -> None:
    kept = KeptRows(6, [torch.float32, torch.int64], [2, 1])
    rows = torch.tensor([4, 1])
    assert kept.first(rows).tolist() == [0, 1]
    kept.keep(rows, [torch.tensor([[4.0, 4.5], [1.0, 1.5]]), torch.tensor([[40], [10]])])
    assert kept.first(torch.arange(6)).tolist() == [0, 2, 3, 5]
    found = [torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64)]
    kept.put(torch.tensor([1, 2, 4]), found, [])
    assert not found[1].any(), "what was copied after the rows were read does not count"
    kept.put(torch.tensor([1, 2, 4]), found, kept.take())
    assert found[0].tolist() == [[1.0, 1.5], [0.0, 0.0], [4.0, 4.5]]
    assert found[1].tolist() == [[10], [0], [40]]
    assert kept.take() == []


@pytest.mark.parametrize("is_compiled", [True, False])
def test_each_row_is_copied_once(is_compiled: bool) -> None:
    """The first of the same rows in a call counts, with the compiled loop and without."""
    has_numba = kept_rows.has_numba
    with patch.object(kept_rows, "has_numba", has_numba if is_compiled else lambda: False):
        kept, seen = KeptRows(50, [torch.int64]), set()
        for turn in range(20):
            rows = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(turn))
            expected = []
            for index, row in enumerate(rows.tolist()):
                if row not in seen:
                    seen.add(row)
                    expected.append(index)
            chosen = kept.first(rows)
            assert chosen.tolist() == expected
            kept.keep(rows[chosen], [rows[chosen] + 100 * turn])
        found = [torch.full((50,), -1)]
        kept.put(torch.arange(50), found, kept.take())
        assert {row for row, number in enumerate(found[0].tolist()) if number >= 0} == seen
        assert all(number % 100 == row for row, number in enumerate(found[0].tolist()) if number >= 0)
