"""Every key has one home, the homes cover the table, and the closed forms of both directions agree."""

import pytest
import torch

from shardwise.parallel.embedding.layout import (
    BUCKETS,
    TablePlacement,
    buckets_of,
    columns_of,
    dynamic_bucket,
    static_bucket,
    static_keys,
    static_row,
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 5, BUCKETS - 1, BUCKETS, BUCKETS + 1, 5 * BUCKETS + 77])
def test_rows_are_dense_on_each_rank(rows: int, ranks: int) -> None:
    seen = []
    for index in range(ranks):
        keys = static_keys(rows, index, ranks)
        assert len(keys) == TablePlacement("row").rows_on(rows, index, ranks)
        assert torch.equal(static_row(keys, ranks), torch.arange(len(keys)))
        assert set((static_bucket(keys) % ranks).tolist()) <= {index}
        seen.append(keys)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(rows))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_buckets_and_columns_cover(ranks: int) -> None:
    held = sorted(bucket for index in range(ranks) for bucket in buckets_of(index, ranks))
    assert held == list(range(BUCKETS))
    columns = [column for index in range(ranks) for column in columns_of(9, index, ranks)]
    assert columns == list(range(9))
    assert columns == [
        c for index in range(ranks) for c in TablePlacement("column").columns_on(9, index, ranks)
    ]
    assert [TablePlacement("table", owner=1).rows_on(9, index, 3) for index in range(3)] == [0, 9, 0]
    assert [TablePlacement("table", owner=1).holds(index) for index in range(3)] == [False, True, False]


def test_keys_spread_evenly_over_the_buckets() -> None:
    counts = torch.bincount(dynamic_bucket(torch.arange(100 * BUCKETS) * 4096), minlength=BUCKETS)
    assert counts.min() > 50 and counts.max() < 160
