"""Calls to the file system: short writes are completed, a full one is told."""

from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, verify
from shardwise.checkpoint.files import FileSystem

from .crew import TINY, ThreadPeers, assemble, assert_same, blank_items, crew, items_of, make_state, succeed
from .faults import CountingFiles, ShortFiles

POLICY = CheckpointPolicy(asynchronous=False, timeout_s=20)


def save(
    root: Path, step: int, files: FileSystem | None = None, ranks: int = 1
) -> list[BaseException | None]:
    def work(peers: ThreadPeers) -> None:
        checkpoints = Checkpoints(root, peers, POLICY, sizes=TINY, files=files, warn=lambda line: None)
        checkpoints.save(step, items_of(make_state(step), peers.rank, ranks), {"step": step})

    return crew(ranks, work)


def newest(root: Path) -> int:
    items = blank_items()
    loaded = Checkpoints(root).load(items)
    assert loaded is not None
    assert_same(assemble([items]), make_state(loaded.step))
    assert verify(loaded.path) == []
    return loaded.step


def test_short_writes_are_completed(tmp_path: Path) -> None:
    succeed(save(tmp_path, 4, ShortFiles(), ranks=2))
    assert newest(tmp_path) == 4


def test_a_file_system_that_takes_nothing_is_full(tmp_path: Path) -> None:
    class Full(FileSystem):
        def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
            return 0

    with pytest.raises(CheckpointError, match="took no more bytes"):
        succeed(save(tmp_path, 1, Full()))


def test_space_is_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    class Small(CountingFiles):
        def free_bytes(self, path: Path) -> int:
            return 40_000

    files = Small()
    with pytest.raises(
        CheckpointError, match=r"takes \d+\.\d KiB and 39\.1 KiB are free; a save asks for 1\.1 times"
    ):
        succeed(save(tmp_path, 1, files))
    assert files.calls == []
