"""Which step is the newest, which are kept, and who may write."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, Manifest
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.steps import LOCK, CheckpointFolder

from .crew import TINY, blank_items, items_of, make_state


def writer(
    root: Path, keep_last: int | None = 2, keep_every: int | None = None, run: str = ""
) -> Checkpoints:
    policy = CheckpointPolicy(asynchronous=False, keep_last=keep_last, keep_every=keep_every)
    return Checkpoints(root, policy=policy, sizes=TINY, run=run)


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, items_of(make_state(step)), {"step": step})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name not in (LOCK, "latest"))


def numbers(root: Path) -> list[int]:
    return [int(name.removeprefix("step_")) for name in names(root)]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save(writer(tmp_path, keep_last=2), 1, 2, 3, 4)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]
    assert (tmp_path / "latest").read_text() == "step_00000004\n"


def test_every_so_many_are_kept_besides(tmp_path: Path) -> None:
    save(writer(tmp_path, keep_last=1, keep_every=10), 5, 10, 15, 20, 25)
    assert numbers(tmp_path) == [10, 20, 25]


def test_all_are_kept_when_none_is_said(tmp_path: Path) -> None:
    save(writer(tmp_path, keep_last=None), 1, 2, 3)
    assert numbers(tmp_path) == [1, 2, 3]


def test_a_run_that_went_back_is_newer_than_its_earlier_life(tmp_path: Path) -> None:
    """Resumed from step 20 it saves 25: step 30 of the life before is older, is not loaded, and goes first."""
    save(writer(tmp_path), 20, 30)
    later = writer(tmp_path)
    save(later, 25)
    assert numbers(tmp_path) == [25, 30]
    loaded = later.load(blank_items())
    assert loaded is not None and loaded.step == 25 and loaded.manifest.generation == 2
    save(later, 30)  # takes the number of the earlier life's
    assert numbers(tmp_path) == [25, 30]
    loaded = later.load(blank_items())
    assert loaded is not None and (loaded.step, loaded.manifest.generation) == (30, 2)


def test_a_step_saved_twice_is_replaced(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path)
    save(checkpoints, 1, 1)
    checkpoints.save(1, items_of(make_state(1)), {"again": True})
    assert names(tmp_path) == ["step_00000001"]
    loaded = checkpoints.load(blank_items())
    assert loaded is not None and loaded.trainer == {"again": True}


def test_a_step_set_aside_still_loads(tmp_path: Path) -> None:
    """The moment between setting the old one aside and committing the new one."""
    save(writer(tmp_path), 1, 2)
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000002.old-ab12")
    loaded = Checkpoints(tmp_path).load(blank_items())
    assert loaded is not None and loaded.step == 2
    save(writer(tmp_path), 3)  # it counts as the step it is
    assert names(tmp_path) == ["step_00000001", "step_00000002.old-ab12", "step_00000003"]
    save(writer(tmp_path), 2)
    assert "step_00000002.old-ab12" not in names(tmp_path)


def test_damaged_steps_do_not_push_out_the_last_good_one(tmp_path: Path) -> None:
    save(writer(tmp_path), 1, 2)
    os.truncate(tmp_path / "step_00000002" / "trainer.json", 1)
    save(writer(tmp_path), 3)
    assert numbers(tmp_path) == [1, 2, 3]
    save(writer(tmp_path), 4)
    assert numbers(tmp_path) == [2, 3, 4]


def test_leftovers_of_dead_writers_go_and_nothing_else(tmp_path: Path) -> None:
    save(writer(tmp_path), 1)
    for name in ("step_00000009.tmp-1-ab", ".trash-77", "step_other", "notes", "step_00000003.backup"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_text("x")
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (tmp_path / ".trash-link").symlink_to(elsewhere)
    (tmp_path / ".trash-77" / "link").symlink_to(elsewhere)
    save(writer(tmp_path), 2)
    assert names(tmp_path) == [
        ".trash-link", "notes", "step_00000001", "step_00000002", "step_00000003.backup", "step_other",
    ]  # fmt: skip
    assert (elsewhere / "precious").exists()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    release = FileSystem().lock(tmp_path / LOCK)
    assert release is not None
    with pytest.raises(CheckpointError, match="another process is saving into this folder"):
        save(writer(tmp_path), 1)
    release()
    save(writer(tmp_path), 1)


def test_a_lock_that_its_holder_removed_in_between_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened before, locked after: a lock on a file without a name would keep nobody out."""
    real, tries = fcntl.flock, []

    def after_the_holder(descriptor: int, how: int) -> None:
        tries.append(how)
        if len(tries) == 1:
            (tmp_path / LOCK).unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_the_holder)
    release = FileSystem().lock(tmp_path / LOCK)
    assert release is not None and len(tries) == 2
    with pytest.raises(CheckpointError, match="another process is saving"):
        FileSystem().lock(tmp_path / LOCK)
    release()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_leftovers_stay(tmp_path: Path) -> None:
    class NoLocks(FileSystem):
        def lock(self, path: Path) -> None:
            return None

    (tmp_path / "step_00000009.tmp-1-ab").mkdir()
    policy = CheckpointPolicy(asynchronous=False)
    save(Checkpoints(tmp_path, policy=policy, sizes=TINY, files=NoLocks()), 1)
    assert names(tmp_path) == ["step_00000001", "step_00000009.tmp-1-ab"]


def test_a_writer_that_was_cut_off_may_not_come_back(tmp_path: Path) -> None:
    old = writer(tmp_path)
    save(old, 1)
    save(writer(tmp_path), 2)
    with pytest.raises(CheckpointError, match=r"a newer process \(generation 2\) saves into this folder"):
        save(old, 3)
    assert numbers(tmp_path) == [1, 2]


def test_the_run_is_named(tmp_path: Path) -> None:
    save(writer(tmp_path, run="gpt-7"), 1)
    assert [
        found.manifest.run for found in CheckpointFolder(tmp_path, FileSystem()).scan() if found.manifest
    ] == ["gpt-7"]


def test_nothing_is_removed_after_a_commit_that_cannot_be_read(tmp_path: Path) -> None:
    save(writer(tmp_path), 1, 2)
    with pytest.raises(DamagedError, match="nothing was removed"):
        CheckpointFolder(tmp_path, FileSystem()).retain(1, None, tmp_path / "step_00000003")
    assert numbers(tmp_path) == [1, 2]


def test_the_best_that_are_there_are_kept(tmp_path: Path) -> None:
    """Step 9 is the best, and its save failed."""
    save(writer(tmp_path, keep_last=None), 1, 2, 3, 4, 5)
    folder = CheckpointFolder(tmp_path, FileSystem())
    folder.retain(1, None, tmp_path / "step_00000005", [9, 2, 4, 1], keep_best=2)
    assert numbers(tmp_path) == [2, 4, 5]
    folder.retain(1, None, tmp_path / "step_00000005", [9, 2, 4, 1])
    assert numbers(tmp_path) == [2, 5]


def rewrite(step: Path, **changes: int) -> None:
    """Another manifest with a right seal."""
    manifest = Manifest.decode((step / "manifest.json").read_bytes(), "x")
    (step / "manifest.json").write_bytes(manifest.model_copy(update=changes).encode())


def test_a_newer_format_is_no_reason_to_go_back(tmp_path: Path) -> None:
    """Silently loading the step before would throw away what a newer version of the program trained."""
    save(writer(tmp_path), 1, 2)
    rewrite(tmp_path / "step_00000002", format=2)
    with pytest.raises(CheckpointError, match="format 2; this version reads format 1") as caught:
        Checkpoints(tmp_path).load(blank_items())
    assert not isinstance(caught.value, DamagedError)


def archived(tmp_path: Path, step: int) -> Path:
    """One step moved to another disk, with a link left in its place; returns where its files are now."""
    archive = tmp_path / "archive"
    archive.mkdir()
    place = tmp_path / "run" / f"step_{step:08d}"
    place.rename(archive / place.name)
    place.symlink_to(archive / place.name)
    return archive / place.name


def test_retention_takes_the_link_and_leaves_the_archive(tmp_path: Path) -> None:
    save(writer(tmp_path / "run"), 1)
    archive = archived(tmp_path, 1)
    before = sorted(path.relative_to(archive) for path in archive.rglob("*"))
    told: list[str] = []
    policy = CheckpointPolicy(asynchronous=False, keep_last=1)
    save(Checkpoints(tmp_path / "run", policy=policy, sizes=TINY, warn=told.append), 2)
    assert numbers(tmp_path / "run") == [2] and told == []
    assert sorted(path.relative_to(archive) for path in archive.rglob("*")) == before
    items = blank_items()
    loaded = Checkpoints(tmp_path).load(items, path=archive)  # whole, to the last file
    assert loaded is not None and loaded.step == 1


def test_a_step_that_is_a_link_loads_and_is_replaced_without_its_archive(tmp_path: Path) -> None:
    save(writer(tmp_path / "run"), 1, 2)
    archive = archived(tmp_path, 2)
    loaded = writer(tmp_path / "run").load(blank_items())
    assert loaded is not None and loaded.step == 2
    save(writer(tmp_path / "run"), 2)
    assert numbers(tmp_path / "run") == [1, 2] and not (tmp_path / "run" / "step_00000002").is_symlink()
    assert (archive / "manifest.json").exists()


def test_a_half_removed_step_of_the_past_goes(tmp_path: Path) -> None:
    """What a power loss left of a step that was replaced: its successor stands, so nothing of it is missed."""
    save(writer(tmp_path), 1, 2)
    half = tmp_path / "step_00000002.old-77"
    half.mkdir()
    (half / "trainer.json").write_text("{}")
    save(writer(tmp_path), 3)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def test_a_lock_that_cannot_be_given_back_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO once, at the release: every later save of the process took the open descriptor for another process."""
    real, broken = fcntl.flock, [True]

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN and broken.pop():
            broken.append(False)
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor, operation)

    monkeypatch.setattr("shardwise.checkpoint.files.fcntl.flock", flock)
    checkpoints = writer(tmp_path)
    save(checkpoints, 1, 2)
    assert numbers(tmp_path) == [1, 2]


def test_a_folder_that_cannot_be_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "away").symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=r"away is a link to .*unmounted, not to a folder"):
        save(writer(tmp_path / "away"), 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file is a file where a folder is expected"):
        save(writer(tmp_path / "file"), 1)

    class ReadOnly(FileSystem):
        def before(self, operation: str, path: Path) -> None:
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    policy = CheckpointPolicy(asynchronous=False)
    with pytest.raises(CheckpointError, match=r"step 1 was not saved: .*: Read-only file system$"):
        save(Checkpoints(tmp_path / "a", policy=policy, sizes=TINY, files=ReadOnly()), 1)


def test_a_folder_that_vanished_is_made_anew_and_said(tmp_path: Path) -> None:
    told: list[str] = []
    policy = CheckpointPolicy(asynchronous=False)
    checkpoints = Checkpoints(tmp_path / "run", policy=policy, sizes=TINY, warn=told.append)
    save(checkpoints, 1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    save(checkpoints, 2)
    assert len(told) == 1 and "is gone since the last save" in told[0]
