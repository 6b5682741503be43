"""Whose files are whose, whether they fit, and that none outlives its run."""

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import ConfigError, UsageError
from shardwise.memory.direct_io import DirectFile
from shardwise.tiers.scratch import DiskScratch
from shardwise.tiers.scratch_folder import _memory_bytes

MIB = 2**20
ONE = {"master": {"unit": MIB}}


@contextmanager
def another_run(folder: Path, rank: int = 0) -> Iterator[int]:
    """A process that has claimed the folder and written; it is killed at the end at the latest."""
    ready, say = os.pipe()
    child = os.fork()
    if not child:
        try:
            made = DiskScratch(folder, rank, 1)
            made.reserve(ONE)
            made.write("master", "unit", torch.ones(MIB, dtype=torch.uint8)).result()
            os.write(say, b"+")
            signal.pause()
        finally:
            os._exit(1)
    os.close(say)
    try:
        assert os.read(ready, 1) == b"+"
        yield child
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_nobody_else_reads_the_files(tmp_path: Path) -> None:
    made = DiskScratch(tmp_path, 3, 4)
    made.reserve(ONE)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        ("shardwise.lock", "shardwise.rank3.lock", "shardwise.rank3.master"), 0o600
    )
    assert (tmp_path / "shardwise.rank3.master").stat().st_blocks * 512 >= MIB, "the space is there"
    made.close()


def test_another_run_is_named_and_left_alone(tmp_path: Path) -> None:
    with another_run(tmp_path) as process:
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(UsageError, match=rf"another run for its rank 0 \(process {process} on .* since "):
            DiskScratch(tmp_path, 0, 1)
        beside = DiskScratch(tmp_path, 1, 1)  # a rank of the same run, on this host
        beside.close()
        assert sorted(os.listdir(tmp_path)) == before


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """Of its other ranks too; what is not ours stays, and so does what a link leads to."""
    with another_run(tmp_path, 0), another_run(tmp_path, 7):
        pass
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    (tmp_path / "shardwise.rank5.master").symlink_to(kept)
    (tmp_path / "shardwise.rank0.exp_avg").symlink_to(kept)
    assert {"shardwise.rank0.master", "shardwise.rank7.master"} <= set(os.listdir(tmp_path))
    made = DiskScratch(tmp_path, 0, 1)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "shardwise.lock", "shardwise.rank0.lock"]
    made.reserve(ONE)
    made.close()
    assert os.listdir(tmp_path) == ["notes.txt"]
    assert kept.read_text() == "mine"


def test_many_dead_runs_are_removed_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder was listed once a seat: files of 10,000 dead ranks took more than a minute."""
    for rank in range(200):
        (tmp_path / f"shardwise.rank{rank}.master").touch()
    listed = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or real(path))
    made = DiskScratch(tmp_path, 0, 1)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["shardwise.lock", "shardwise.rank0.lock"] and len(listed) < 5
    made.close()


def test_a_lock_that_is_no_file(tmp_path: Path) -> None:
    """A FIFO under the name of a seat's lock ended in "OSError: 22"."""
    os.mkfifo(tmp_path / "shardwise.rank0.lock")
    with pytest.raises(ConfigError, match=r"shardwise\.rank0\.lock: not a regular file; remove it"):
        DiskScratch(tmp_path, 0, 1)


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    kept, folder = tmp_path / "mine", tmp_path / "state"
    kept.write_text("mine")
    folder.mkdir()
    (folder / "shardwise.rank0.lock").symlink_to(kept)
    with pytest.raises(ConfigError, match=r"rank0\.lock: Too many levels of symbolic links"):
        DiskScratch(folder, 0, 1)
    assert kept.read_text() == "mine"


def test_engines_of_one_process_have_seats_of_their_own(tmp_path: Path) -> None:
    first, second = DiskScratch(tmp_path, 0, 1), DiskScratch(tmp_path, 0, 1)
    for made, value in ((first, 1), (second, 2)):
        made.reserve(ONE)
        made.write("master", "unit", torch.full((MIB,), value, dtype=torch.uint8)).result()
    second.close()
    found = torch.empty(MIB, dtype=torch.uint8)
    first.read("master", "unit", found).result()
    assert (found == 1).all()
    first.close()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_was_removed_in_between_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank of another run ends, and takes the folder's lock along, between our open and our flock."""
    real, times = fcntl.flock, 0

    def flock(descriptor: int, operation: int) -> None:
        nonlocal times
        times += 1
        if times == 1:
            (tmp_path / "shardwise.lock").unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    made = DiskScratch(tmp_path, 0, 1)
    assert "shardwise.lock" in os.listdir(tmp_path), "it was locked once more, under its name"
    made.close()


def test_a_program_that_goes_to_another_folder_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.chdir(tmp_path)
    made = DiskScratch(Path("state"), 0, 1)
    made.reserve(ONE)
    monkeypatch.chdir("/")
    made.close()
    assert os.listdir(tmp_path / "state") == []


def test_files_of_a_run_that_took_the_seat_are_left_alone(tmp_path: Path) -> None:
    """Somebody cleared the folder under a run, and started another one there: the first one's end removes nothing."""
    first = DiskScratch(tmp_path, 0, 1)
    first.reserve(ONE)
    first.write("master", "unit", torch.ones(MIB, dtype=torch.uint8)).result()
    for path in tmp_path.iterdir():
        path.unlink()
    with another_run(tmp_path):
        theirs = sorted(os.listdir(tmp_path))
        found = torch.zeros(MIB, dtype=torch.uint8)
        first.read("master", "unit", found).result()
        assert found.all(), "files that are open outlive their names"
        first.close()
        assert sorted(os.listdir(tmp_path)) == theirs


@pytest.mark.parametrize(
    ("path", "words"),
    [("missing", "does not exist"), ("file", "is not a folder"), ("/proc", "no files can be made")],
)
def test_a_folder_that_takes_no_state(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"offload.disk_path: .*{words}"):
        DiskScratch(tmp_path / path, 0, 1)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="has no locks"):
        DiskScratch(tmp_path, 0, 1)


def test_memory_is_no_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = Path("/dev/shm") / f"shardwise-test-{os.getpid()}"
    if _memory_bytes(memory.parent) is None or _memory_bytes(tmp_path) is not None:
        pytest.skip("needs a tmpfs at /dev/shm, and a disk")
    memory.mkdir()
    try:
        with caplog.at_level(logging.WARNING):
            DiskScratch(memory, 0, 1).close()
    finally:
        memory.rmdir()
    assert "is in memory (tmpfs, " in caplog.text
    caplog.clear()
    DiskScratch(tmp_path, 0, 1).close()
    assert not caplog.text


def free_is(free_bytes: int, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The disk has so much left, less what the files here have taken."""
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        taken = sum(os.stat(each.path).st_blocks * 512 for each in os.scandir(path))
        found = list(real(path))
        found[1], found[4] = 4096, (free_bytes - taken) // 4096
        return os.statvfs_result(found)

    patch.setattr(os, "statvfs", statvfs)


def test_too_little_space_says_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rank comes first: those that reserved theirs do not count twice."""
    free_is(10 * MIB, monkeypatch)
    for size, fits in ((4 * MIB, False), (2 * MIB, True)):
        ranks = [DiskScratch(tmp_path, rank, 4) for rank in range(4)]
        for rank in ranks:
            if fits:
                rank.reserve({"master": {"unit": size}})
                continue
            for shares, advice in (
                (
                    {0.75: 3 * MIB, 0.5: 2 * MIB, 0.25: MIB},
                    "set offload.fraction: 0.5, which fits, or give a",
                ),
                ({0.75: 3 * MIB}, "give a"),
            ):
                with pytest.raises(
                    ConfigError,
                    match=rf"needs 16.0 MiB for 4 ranks .* has 10.0 MiB; {advice} folder on a larger disk",
                ):
                    rank.reserve({"master": {"unit": size}}, shares)
        for rank in ranks:
            rank.close()
    assert os.listdir(tmp_path) == []


def test_a_rank_with_more_than_the_others_is_told_by_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_is(10 * MIB, monkeypatch)
    first, second = (DiskScratch(tmp_path, rank, 2) for rank in range(2))
    first.reserve({"master": {"unit": 4 * MIB}})
    with pytest.raises(
        ConfigError, match=r"needs 12.0 MiB for 2 ranks .* has 10.0 MiB; set offload.fraction: 0.8"
    ):
        second.reserve({"master": {"unit": 8 * MIB}}, {0.8: 6 * MIB})
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left on device.*; give a folder"),
        (errno.EIO, "rank0.exp_avg: Input/output error"),
    ],
)
def test_space_that_the_disk_does_not_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    real = os.posix_fallocate

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        if size == 2 * MIB:
            raise OSError(code, os.strerror(code))
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    made = DiskScratch(tmp_path, 0, 1)
    with pytest.raises(ConfigError, match=words):
        made.reserve({"master": {"unit": MIB}, "exp_avg": {"unit": 2 * MIB}})
    made.close()
    assert os.listdir(tmp_path) == []


def test_owners_begin_on_pages(tmp_path: Path) -> None:
    made = DiskScratch(tmp_path, 0, 1)
    made.reserve({"master": {"a": 1, "b": 4096, "c": 4097, "d": 0}})
    file: DirectFile = made._folder.files["master"]
    assert file.size_bytes() == 4 * 4096
    for owner in "abc":
        made.write(
            "master",
            owner,
            torch.full(({"a": 1, "b": 4096, "c": 4097}[owner],), ord(owner), dtype=torch.uint8),
        )
    for owner in "abc":
        found = torch.empty(1, dtype=torch.uint8)
        made.read("master", owner, found).result()
        assert found.item() == ord(owner)
    made.close()


@pytest.mark.soak
def test_a_process_that_ends_leaves_nothing(tmp_path: Path) -> None:
    """Without ``close``, with requests under way; and one that is killed leaves what the next one removes."""
    program = """
        import os, sys, torch
        from pathlib import Path
        from shardwise.tiers.scratch import DiskScratch
        made = DiskScratch(Path(sys.argv[1]), 0, 1)
        made.reserve({"master": {"unit": 256 << 20}})
        print(sorted(os.listdir(sys.argv[1])), flush=True)
        made.write("master", "unit", torch.ones(256 << 20, dtype=torch.uint8))
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), 9)
    """
    for end, code in (("killed", -signal.SIGKILL), ("ends", 0)):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), end],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout == "['shardwise.lock', 'shardwise.rank0.lock', 'shardwise.rank0.master']\n"
        assert len(os.listdir(tmp_path)) == (3 if end == "killed" else 0)
