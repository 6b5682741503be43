"""Many reads in one call: as many as come whole, and the bytes of the files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.memory import page_reads
from shardwise.memory.direct_io import DirectFile, aligned_empty, bytes_of
from shardwise.memory.page_reads import read_many

PAGE = 4096


def test_requests_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes_of(aligned_empty(4 * PAGE, torch.uint8).random_())
    files = [DirectFile(tmp_path / name, 4 * PAGE) for name in "ab"]
    if not all(file.is_direct for file in files):
        pytest.skip("the file system has no direct reads")
    files[0].write(data, 0, data[:0])
    files[1].write(data[::-1].copy(), 0, bytes_of(aligned_empty(4 * PAGE, torch.uint8)))
    into = bytes_of(aligned_empty(4 * PAGE, torch.uint8).zero_())
    asked = [files[0], files[1], files[0]]
    places, sizes = np.array([0, PAGE, 3 * PAGE]), np.array([PAGE, 2 * PAGE, PAGE])
    assert read_many(asked, into, places, sizes, np.array([PAGE, 0, 3 * PAGE])) == 3
    expected = np.concatenate([data[PAGE : 2 * PAGE], data[::-1][: 2 * PAGE], data[3 * PAGE :]])
    assert np.array_equal(into, expected)
    assert read_many(asked, into, places, sizes, np.array([PAGE, 3 * PAGE, 0])) == 1, "the file ends"
    assert read_many([], into, places[:0], sizes[:0], sizes[:0]) == 0
    files[0].close()
    assert read_many(asked, into, places, sizes, np.array([PAGE, 0, 0])) == 0, "a closed file"
    monkeypatch.setattr(page_reads, "has_numba", lambda: False)
    assert read_many([files[1]], into, places[:1], sizes[:1], places[:1]) == 0
    files[1].close()
