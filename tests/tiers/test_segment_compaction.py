"""Compaction of rows on disk: space comes back, removed rows do not."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.base.errors import TierError
from shardwise.memory.direct_io import DirectFile
from shardwise.tiers.row_segments import RowSegments
from tests.tiers.test_row_segments import assert_little_waste, drawn, read, segments


@pytest.fixture
def made(tmp_path: Path) -> Iterator[RowSegments]:
    made = segments(tmp_path)
    yield made
    made.close()


def test_space_of_removed_rows_comes_back(made: RowSegments) -> None:
    rows = torch.arange(3000)
    made.write(rows, drawn(rows))
    full = made.figures().disk_bytes
    made.remove(rows[10:])
    while made.compact(50_000):
        pass
    assert made.figures().disk_bytes <= 3 * made.shape.segment_bytes < full / 4
    assert torch.equal(read(made, rows[:10]), drawn(rows)[:10])


def test_a_row_that_is_removed_during_compaction_does_not_come_back(
    made: RowSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.arange(1500)
    made.write(rows, drawn(rows))
    made.remove(rows[::2])
    real = made._append

    def meanwhile(some: np.ndarray, lines: np.ndarray, moved_from: np.ndarray | None = None) -> None:
        if moved_from is not None and some.size:
            made.remove(torch.from_numpy(some[:1]))
            gone.append(int(some[0]))
        real(some, lines, moved_from)

    gone: list[int] = []
    monkeypatch.setattr(made, "_append", meanwhile)
    made.compact(10**9)
    assert gone
    assert not made.holds(torch.tensor(gone)).any()
    left = torch.tensor(sorted(set(rows[1::2].tolist()) - set(gone)))
    assert made.rows_held() == len(left)
    assert torch.equal(read(made, left), drawn(rows)[left])


def test_compaction_is_bounded_work(made: RowSegments) -> None:
    rows = torch.arange(4000)
    made.write(rows, drawn(rows))
    made.remove(rows[1::2])
    assert 0 < made.compact(1) <= 2 * 4096
    done = made.compact(20_000)
    assert 20_000 <= done < 20_000 + 2 * 4096


def test_writes_alone_keep_the_disk_below_twice_the_rows(made: RowSegments) -> None:
    draw = np.random.default_rng(0)
    for turn in range(150):
        # Most rewritten rows are few and hot, so that segments differ in what is left of them.
        some = torch.from_numpy(np.unique(draw.zipf(1.3, 400) % 3000))
        made.write(some, drawn(some, turn))
        assert_little_waste(made)
    assert made.figures().bytes_compacted > 0


def test_a_full_disk_during_compaction_loses_nothing(
    made: RowSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.arange(3000)
    made.write(rows, drawn(rows))
    made.remove(rows[::2])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "__init__", full)
        with pytest.raises(TierError, match="No space left"):
            made.compact(10**9)
        assert torch.equal(read(made, rows[1::2]), drawn(rows)[1::2])
    while made.compact(10**9):
        pass
    assert torch.equal(read(made, rows[1::2]), drawn(rows)[1::2])


def test_a_segment_stays_while_it_is_read(made: RowSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(1500)
    made.write(rows, drawn(rows))
    real = made._reader.read

    def behind(*given: Any) -> None:
        made.remove(rows)
        made.compact(10**9)
        real(*given)

    monkeypatch.setattr(made._reader, "read", behind)
    assert torch.equal(read(made, rows[:600]), drawn(rows)[:600])
    assert made.figures().disk_bytes <= 2 * made.shape.segment_bytes, "files go after the read"
