"""Requests for rows on a disk, in closed form, are those that are made."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.base.hardware import ASSUMED_HARDWARE
from shardwise.tiers.row_segments import RowSegments
from shardwise.tiers.segment_file import shape_for
from shardwise.tiers.segment_reader import planned
from shardwise.tiers.tier_cost import RowReads, row_reads, row_write_s


@pytest.mark.parametrize("width", [80, 272, 1040, 6000])
def test_requests_for_rows_are_those_planned(width: int) -> None:
    held = 64 * 2**20 // width
    draw = np.random.default_rng(0)
    for part in (400, 100, 60, 20, 8, 3, 1):
        positions = np.sort(draw.permutation(held)[: held // part])
        made = planned(shape_for(width, held), positions, 4)
        expected = row_reads(held // part, held, width)
        assert len(made.sizes) == pytest.approx(expected.requests, rel=0.06), part
        assert made.sizes.sum() / 4096 == pytest.approx(expected.pages, rel=0.06), part


def test_requests_that_are_made_are_counted(tmp_path: Path) -> None:
    made = RowSegments(tmp_path, "table 't'", 272, 15_000)
    every = torch.arange(15_000)
    made.write(every, torch.zeros(15_000, 272, dtype=torch.uint8))
    some = torch.randperm(15_000, generator=torch.Generator().manual_seed(0))[:200]
    made.read(some, torch.empty(200, 272, dtype=torch.uint8))
    expected = row_reads(200, 15_000, 272)
    assert made.figures().requests == pytest.approx(expected.requests, rel=0.12), "some rows are in memory"
    assert made.figures().bytes_read / 4096 == pytest.approx(expected.pages, rel=0.12)
    made.close()


def test_seconds_of_rows() -> None:
    disk = dataclasses.replace(
        ASSUMED_HARDWARE, operations={"page": ((4096, 40.96e6),)}
    )  # 100 us; 1 GB/s: 4.1 us
    assert RowReads(1000, 1000).seconds(disk) == pytest.approx(0.1)
    assert RowReads(1, 10_000).seconds(disk) == pytest.approx(0.04096 + 100e-6, rel=1e-3)
    assert row_write_s(1e6, 84, disk) == pytest.approx(2 * 96e6 / 1e9)
    assert row_reads(1000, 1e9, 272).seconds(disk) == pytest.approx(0.1, rel=0.01), "far from one another"
    assert row_reads(0, 0, 272) == RowReads(0, 0)
