"""Many reads in one call, one after another and together: those that come whole, and the bytes of the files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.memory import page_reads
from shardwise.memory.direct_io import DirectFile, aligned_empty, bytes_of
from shardwise.memory.page_reads import PageQueue, read_many

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


@pytest.mark.parametrize("depth", [1, 3, 64])
def test_a_queue_reads_what_the_files_hold(tmp_path: Path, depth: int) -> None:
    draw = np.random.default_rng(depth)
    data = [bytes_of(aligned_empty(40 * PAGE, torch.uint8).random_()) for _ in range(3)]
    files = [DirectFile(tmp_path / str(number), 40 * PAGE) for number in range(3)]
    queue = PageQueue(depth)
    if not queue.is_open or not all(file.is_direct for file in files):
        pytest.skip("the system has no queue of reads, or the file system no direct reads")
    for file, held in zip(files, data, strict=True):
        file.write(held, 0, held[:0])
    for _ in range(4):
        which, pages = draw.integers(0, 3, 200), draw.integers(1, 4, 200)
        first = draw.integers(0, 37, 200)
        sizes = pages * PAGE
        places = np.cumsum(sizes) - sizes
        into = bytes_of(aligned_empty(int(sizes.sum()), torch.uint8).zero_())
        missed = queue.read([files[each] for each in which], into, places, sizes, first * PAGE)
        assert missed.size == 0
        expected = [data[w][f * PAGE : (f + p) * PAGE] for w, f, p in zip(which, first, pages, strict=True)]
        assert np.array_equal(into, np.concatenate(expected))
    queue.close()
    queue.close()
    assert not queue.is_open
    for file in files:
        file.close()


def test_a_queue_names_the_requests_that_do_not_come_whole(tmp_path: Path) -> None:
    files = [DirectFile(tmp_path / name, 4 * PAGE) for name in "ab"]
    queue = PageQueue(4)
    if not queue.is_open or not all(file.is_direct for file in files):
        pytest.skip("the system has no queue of reads, or the file system no direct reads")
    into = bytes_of(aligned_empty(12 * PAGE, torch.uint8))
    asked = [files[each % 2] for each in range(12)]
    places, sizes = np.arange(12) * PAGE, np.full(12, PAGE)
    offsets = np.where(np.arange(12) % 5 == 2, 4 * PAGE, 0)
    assert queue.read(asked, into, places, sizes, offsets).tolist() == [2, 7], "the file ends"
    files[1].close()
    assert queue.read(asked, into, places, sizes, offsets).tolist() == [1, 2, 3, 5, 7, 9, 11], "a closed file"
    assert queue.read([], into, places[:0], sizes[:0], sizes[:0]).size == 0
    files[0].close()
    queue.close()
