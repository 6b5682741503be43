"""Power loss: what was not synced may be gone, in any combination; the newest loadable step is whole all the same.

A save is recorded call by call and replayed on a model of a disk. The model keeps for every file the bytes that a sync
made durable and the writes since; for every directory the names that a sync made durable and the changes since. After
each call the power fails: of what is not durable, all, none, or a random part survives, writes of one file and renames
of one directory independently and in no order. That is harsher than any file system in use.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint import CheckpointPolicy, Checkpoints
from shardwise.checkpoint.files import Files

from .crew import TINY, assemble, assert_same, blank_items, items_of, make_state

Call = tuple[Any, ...]


class Recording(Files):
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


class ModelFile:
    def __init__(self, size: int) -> None:
        self.durable: bytes = b""
        self.pending: list[tuple[int, bytes]] = []
        self.size = size

    def contents(self, survives: Any) -> bytes:
        """The durable bytes, and those of the writes since that survive; the size may be new without them."""
        data = bytearray(self.durable)
        if survives():
            data.extend(bytes(self.size - len(data)))
        for offset, written in self.pending:
            if survives():
                data.extend(bytes(max(0, offset + len(written) - len(data))))
                data[offset : offset + len(written)] = written
        return bytes(data)

    def sync(self) -> None:
        self.durable = self.contents(lambda: True)
        self.pending = []


class ModelDirectory:
    def __init__(self) -> None:
        self.durable: dict[str, Any] = {}
        self.pending: list[tuple[str | None, str | None, Any]] = []  # (name that goes, name that comes, what)

    def entries(self, survives: Any) -> dict[str, Any]:
        names = dict(self.durable)
        for old, new, what in self.pending:
            if survives():
                if old is not None and names.get(old) is what:
                    del names[old]
                if new is not None:
                    names[new] = what
        return names

    def sync(self) -> None:
        self.durable = self.entries(lambda: True)
        self.pending = []


class Disk:
    def __init__(self) -> None:
        self.root = ModelDirectory()

    def find(self, name: str) -> Any:
        place: Any = self.root
        for part in name.split("/") if name != "." else ():
            place = place.entries(lambda: True)[part]
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


def record(root: Path) -> tuple[list[Call], dict[int, int]]:
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
    yield lambda: False
    yield lambda: True
    for number in range(random_states):
        draws = random.Random(1000 * seed + number)
        share = draws.random()
        yield lambda draws=draws, share=share: draws.random() < share


def campaign(tmp_path: Path, stride: int, random_states: int) -> int:
    root = tmp_path / "recorded"
    root.mkdir()
    calls, told = record(root)
    disk = Disk()
    looked = 0
    for number, call in enumerate(calls):
        disk.apply(call)
        if number % stride and number + 1 not in told.values():
            continue
        saved = max((step for step, after in told.items() if after <= number + 1), default=0)
        for loss in losses(number, random_states):
            path = tmp_path / f"loss{looked}"
            disk.after_power_loss(path, loss)
            items = blank_items()
            lines: list[str] = []
            loaded = Checkpoints(path, warn=lines.append).load(items)
            assert lines == [], (number, call)  # no step is ever seen half removed
            looked += 1
            if loaded is None:
                assert saved == 0, (number, call)
                continue
            assert loaded.step in (saved, saved + 1), (number, call, loaded.step)
            assert_same(assemble([items]), make_state(loaded.step))
    return looked


def test_power_loss_after_a_sample_of_calls(tmp_path: Path) -> None:
    assert campaign(tmp_path, stride=9, random_states=2) > 60


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_power_loss_after_every_call(tmp_path: Path) -> None:
    looked = campaign(tmp_path, stride=1, random_states=10)
    print(f"{looked} states after power loss: newest step whole and equal to the bit each time")
    assert looked >= 2000


def test_the_model_finds_a_missing_sync(tmp_path: Path) -> None:
    """The proof is worth what it can find: without the sync of the manifest the step is lost after its commit."""
    root = tmp_path / "recorded"
    root.mkdir()
    calls, told = record(root)
    disk = Disk()
    for call in calls[: told[1]]:
        if call[0] != "sync" or not call[1].endswith("manifest.json.tmp"):
            disk.apply(call)
    disk.after_power_loss(tmp_path / "loss", lambda: False)
    lines: list[str] = []
    with pytest.raises(Exception, match="no step there can be loaded"):
        Checkpoints(tmp_path / "loss", warn=lines.append).load(blank_items())
