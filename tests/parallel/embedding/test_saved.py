"""Rows that a rank writes into a checkpoint are read a window at a time, whatever ranges they lie in."""

import pytest
import torch
from torch import Tensor

from shardwise.parallel.embedding import saved
from shardwise.parallel.embedding.layout import BUCKETS
from shardwise.parallel.embedding.saved import Range, StreamedRows, static_counts, written_buckets


class Source:
    """Rows whose numbers follow from their place in the table; counts what is read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def rows(self, ranges: list[Range]) -> Tensor:
        return torch.cat([torch.arange(*each) for each in ranges])

    def read(self, kind: str, rows: Tensor) -> Tensor:
        self.reads.append(len(rows))
        scale = {"weights": 1.0, "state": -1.0}[kind]
        return scale * torch.stack([rows, 2 * rows], 1).double()


def streamed(source: Source, rows: int, placement: str, index: int, ranks: int) -> StreamedRows:
    columns = {kind: (2, torch.float64) for kind in ("weights", "state")}
    mine = written_buckets(placement, index, ranks, 0)
    return StreamedRows(static_counts(rows), mine, columns, source.read, source.rows)


@pytest.mark.parametrize("rows", [700, 5000])
@pytest.mark.parametrize(
    ("placement", "index", "ranks"), [("row", 1, 3), ("data_parallel", 1, 2), ("row", 0, 1)]
)
def test_every_range_is_read(
    monkeypatch: pytest.MonkeyPatch, placement: str, index: int, ranks: int, rows: int
) -> None:
    monkeypatch.setattr(saved, "READ_ROWS", 64)
    found = streamed(source := Source(), rows, placement, index, ranks)
    for kind, scale in (("weights", 1.0), ("state", -1.0)):
        for start, stop in found.ranges:
            numbers = scale * torch.arange(start, stop).double()
            assert torch.equal(found.read(kind, (start, stop)), torch.stack([numbers, 2 * numbers], 1))
            middle = (start + stop) // 2  # a block of a file may end in a range
            assert torch.equal(found.read(kind, (middle, stop))[:, 0], numbers[middle - start :])
            assert found.read(kind, (middle, middle)).shape == (0, 2)
    assert max(source.reads) == 64


def test_small_ranges_are_read_together() -> None:
    found = streamed(source := Source(), 4 * BUCKETS, "row", 1, 2)
    assert len(found.ranges) == BUCKETS // 2
    for within in found.ranges:
        found.read("weights", within)
    assert source.reads == [2 * BUCKETS], "all of them, once"
