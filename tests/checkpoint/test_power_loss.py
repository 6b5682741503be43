"""Power loss: what was not synced may be gone, in any combination; the newest loadable step is whole all the same.

A save is recorded call by call and replayed on a model of a disk. The model keeps for every file the bytes that a sync
made durable and the writes since; for every directory the names that a sync made durable and the changes since. After
each call the power fails: of what is not durable, all, none, the newest change of each file and directory alone, all
but the newest, or a random part survives, independently and in no order. That is harsher than any file system in use.
"""

import random
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints
from shardwise.checkpoint.files import FileSystem

from .crew import TINY, assemble, assert_same, blank_items, items_of, make_state

Call = tuple[Any, ...]
Recorded = tuple[list[Call], dict[int, int]]
"""Every call of some saves, and after how many of them each step was told saved."""


class Recording(FileSystem):
    """Carries every change out, and notes it."""

    def __init__(self, root: Path) -> None:
        self.calls: list[Call] = []
        self._root = root
        self._open: dict[int, str] = {}

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.calls.append(("mkdir", self._name(path)))

    def create(self, path: Path, size: int) -> int:
        descriptor = super().create(path, size)
        self._open[descriptor] = self._name(path)
        self.calls.append(("create", self._name(path), size))
        return descriptor

    def open_for_writing(self, path: Path) -> int:
        descriptor = super().open_for_writing(path)
        self._open[descriptor] = self._name(path)
        return descriptor

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        written = super().pwrite(descriptor, data, offset)
        self.calls.append(("write", self._open[descriptor], offset, bytes(data[:written])))
        return written

    def sync(self, descriptor: int, path: Path) -> None:
        super().sync(descriptor, path)
        self.calls.append(("sync", self._name(path)))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.calls.append(("sync_directory", self._name(path)))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.calls.append(("rename", self._name(old), self._name(new)))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.calls.append(("unlink", self._name(path)))

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self.calls.append(("unlink", self._name(path)))


def everything(place: int, count: int) -> bool:
    """Change number ``place`` of ``count`` that are not durable survives."""
    return True


class ModelFile:
    def __init__(self, size: int) -> None:
        self.durable: bytes = b""
        self.pending: list[tuple[int, bytes]] = []
        self.size = size

    def contents(self, survives: Any) -> bytes:
        """The durable bytes, and those of the writes since that survive; the size may be new without them."""
        data = bytearray(self.durable)
        if survives(0, 1):
            data.extend(bytes(self.size - len(data)))
        for place, (offset, written) in enumerate(self.pending):
            if survives(place, len(self.pending)):
                data.extend(bytes(max(0, offset + len(written) - len(data))))
                data[offset : offset + len(written)] = written
        return bytes(data)

    def sync(self) -> None:
        self.durable = self.contents(everything)
        self.pending = []


class ModelDirectory:
    def __init__(self) -> None:
        self.durable: dict[str, Any] = {}
        self.pending: list[tuple[str | None, str | None, Any]] = []  # (name that goes, name that comes, what)

    def entries(self, survives: Any) -> dict[str, Any]:
        names = dict(self.durable)
        for place, (old, new, what) in enumerate(self.pending):
            if survives(place, len(self.pending)):
                if old is not None and names.get(old) is what:
                    del names[old]
                if new is not None:
                    names[new] = what
        return names

    def sync(self) -> None:
        self.durable = self.entries(everything)
        self.pending = []


class Disk:
    def __init__(self) -> None:
        self.root = ModelDirectory()

    def find(self, name: str) -> Any:
        place: Any = self.root
        for part in name.split("/") if name != "." else ():
            place = place.entries(everything)[part]
        return place

    def apply(self, call: Call) -> None:
        operation, name, *rest = call
        if operation == "write":
            self.find(name).pending.append((rest[0], rest[1]))
        elif operation in ("sync", "sync_directory"):
            self.find(name).sync()
        else:
            parent, _, last = name.rpartition("/")
            directory = self.find(parent or ".")
            if operation == "mkdir":
                directory.pending.append((None, last, ModelDirectory()))
            elif operation == "create":
                directory.pending.append((None, last, ModelFile(rest[0])))
            elif operation == "unlink":
                directory.pending.append((last, None, self.find(name)))
            else:
                directory.pending.append((last, rest[0].rpartition("/")[2], self.find(name)))

    def after_power_loss(self, path: Path, survives: Any) -> None:
        """Write to ``path`` what a machine that comes up again might find."""

        def put(directory: ModelDirectory, path: Path) -> None:
            path.mkdir()
            for name, what in directory.entries(survives).items():
                if isinstance(what, ModelDirectory):
                    put(what, path / name)
                else:
                    (path / name).write_bytes(what.contents(survives))

        put(self.root, path)


def record(root: Path) -> Recorded:
    """Four saves, of which each removes the one before; and after how many calls each was told saved."""
    files = Recording(root)
    policy = CheckpointPolicy(keep_last=1, asynchronous=False)
    checkpoints = Checkpoints(root, policy=policy, sizes=TINY, files=files)
    told = {}
    for step in (1, 2, 3, 3):
        checkpoints.save(step, items_of(make_state(step)), {"step": step})
        told.setdefault(step, len(files.calls))
    return files.calls, told


def losses(seed: int, random_states: int) -> Iterator[Any]:
    yield lambda place, count: False
    yield everything
    yield lambda place, count: place == count - 1
    yield lambda place, count: place < count - 1
    for number in range(random_states):
        draws = random.Random(1000 * seed + number)
        share = draws.random()
        yield lambda place, count, draws=draws, share=share: draws.random() < share


def after_every_promise(calls: list[Call], told: dict[int, int]) -> set[int]:
    """Where a sync that is missing shows: behind every sync of a directory and every rename, which order what came
    before; behind the two calls after each, of which one may survive alone; and where a save was told."""
    orders = {n for n, call in enumerate(calls) if call[0] in ("rename", "sync_directory")}
    return orders | {n + 1 for n in orders} | {n + 2 for n in orders} | {after - 1 for after in told.values()}


def campaign(
    folder: Path,
    calls: list[Call],
    told: dict[int, int],
    looks: Container[int],
    random_states: int,
    lost: int = -1,
) -> int:
    """States seen after a power loss behind the calls ``looks``, each whole; without the call ``lost``."""
    disk = Disk()
    looked = 0
    for number, call in enumerate(calls):
        if number != lost:
            disk.apply(call)
        if number not in looks:
            continue
        saved = max((step for step, after in told.items() if after <= number + 1), default=0)
        for loss in losses(number, random_states):
            path = folder / f"loss{lost}-{looked}"
            disk.after_power_loss(path, loss)
            items = blank_items()
            lines: list[str] = []
            checkpoints = Checkpoints(path, warn=lines.append)
            loaded = checkpoints.load(items)
            assert lines == [], (number, call)
            assert all(found.problem is None for found in checkpoints.steps()), "a step half removed"
            looked += 1
            if loaded is None:
                assert saved == 0, (number, call)
                continue
            assert loaded.step in (saved, saved + 1), (number, call, loaded.step)
            assert_same(assemble([items]), make_state(loaded.step))
    return looked


def test_power_loss_wherever_a_sync_could_be_missing(tmp_path: Path, recorded: Recorded) -> None:
    looks = after_every_promise(*recorded)
    assert campaign(tmp_path, *recorded, looks, random_states=0) == 4 * len(looks) > 150


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_power_loss_after_every_call(tmp_path: Path, recorded: Recorded) -> None:
    looked = campaign(tmp_path, *recorded, range(10**6), random_states=10)
    print(f"{looked} states after power loss: newest step whole and equal to the bit each time")
    assert looked >= 2000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("recorded")
    return record(root)


def syncs_that_count(calls: list[Call], first: int, stop: int) -> list[int]:
    """The last sync of each file and every sync of a directory: a header's is followed by that of the same file."""
    last = {call[1]: n for n, call in enumerate(calls) if call[0] == "sync" and first <= n < stop}
    del last["latest.tmp"]  # a hint for people; never read
    return sorted([*last.values(), *(n for n in range(first, stop) if calls[n][0] == "sync_directory")])


def is_seen(folder: Path, recorded: Recorded, lost: int, random_states: int) -> bool:
    """Whether the sample finds the bug in the save that has it: the call ``lost`` was forgotten."""
    calls, told = recorded
    stop = min(after for after in told.values() if after > lost)
    looks = {n for n in after_every_promise(calls, told) if lost <= n < stop}
    try:
        campaign(folder, calls, told, looks, random_states, lost)
    except (AssertionError, CheckpointError):
        return True
    return False


def test_the_sample_finds_a_missing_sync_of_each_kind(tmp_path: Path, recorded: Recorded) -> None:
    """The proof is worth what it can find. Of the second save, which removes the first step: of the manifest and of all
    directories, the folder of steps before and after the removal among them."""
    calls, told = recorded
    syncs = syncs_that_count(calls, told[1], told[2])
    manifest = next(n for n in syncs if calls[n][1].endswith("manifest.json.tmp"))
    assert len([n for n in syncs if n >= manifest]) == 6
    for lost in (n for n in syncs if n >= manifest):
        assert is_seen(tmp_path, recorded, lost, 0), calls[lost]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_sample_finds_every_missing_sync(tmp_path: Path, recorded: Recorded) -> None:
    """Each of the third save, which removes a step, one at a time."""
    calls, told = recorded
    syncs = syncs_that_count(calls, told[2], told[3])
    unseen = [calls[lost] for lost in syncs if not is_seen(tmp_path, recorded, lost, 8)]
    print(f"{len(syncs)} syncs forgotten, one at a time: {len(unseen)} unseen")
    assert not unseen
