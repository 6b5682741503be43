"""Requests for rows on a disk, in closed form, are those that are made."""

import dataclasses
from pathlib import Path

import pytest
import torch

from shardwise.base.hardware import ASSUMED_HARDWARE
from shardwise.tiers.row_segments import RowSegments
from shardwise.tiers.tier_cost import RowReads, row_reads, row_write_s


@pytest.mark.parametrize("width", [80, 272, 1040, 6000])
def test_requests_for_rows_are_those_counted(tmp_path: Path, width: int) -> None:
    held = 12 * 2**20 // width
    made = RowSegments(tmp_path, "table 't'", width, held)
    every = torch.arange(held)
    made.write(every, torch.zeros(held, width, dtype=torch.uint8))
    draw, out = torch.Generator().manual_seed(0), torch.empty(held, width, dtype=torch.uint8)
    for rows in (held // 400, held // 60, held // 8, held):
        before = made.figures()
        made.read(torch.randperm(held, generator=draw)[:rows], out[:rows])
        after = made.figures()
        expected = row_reads(rows, held, width)
        # The block that is in memory takes requests away, and cuts between blocks and segments add some.
        slack = 3 + held * width // 2**20
        assert after.requests - before.requests == pytest.approx(expected.requests, rel=0.1, abs=slack)
        assert (after.bytes_read - before.bytes_read) / 4096 == pytest.approx(
            expected.pages, rel=0.12, abs=slack
        )
    made.close()


def test_seconds_of_rows() -> None:
    disk = dataclasses.replace(ASSUMED_HARDWARE, disk_request_s=100e-6)  # 1 GB/s: 4.1 us a page
    assert RowReads(1000, 1000).seconds(disk) == pytest.approx(0.1)
    assert RowReads(1, 10_000).seconds(disk) == pytest.approx(0.04096 + 100e-6, rel=1e-3)
    assert row_write_s(1e6, 84, disk) == pytest.approx(2 * 96e6 / 1e9)
    assert row_reads(1000, 1e9, 272).seconds(disk) == pytest.approx(0.1, rel=0.01), "far from one another"
