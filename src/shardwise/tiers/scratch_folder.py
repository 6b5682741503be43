"""The folder of state on disk: the owners of its files, the space that they need, and the removal of old files.

    shardwise.lock              held briefly by a process that claims a seat, reserves space or leaves
    shardwise.rank0.lock        the seat of rank 0: held by its process as long as that process runs
    shardwise.rank0.master      the file of one kind of state

The lock of a rank's seat shows whether its files are in use. The kernel releases the lock when its holder dies, however
it dies, so a seat whose lock is free belongs to a dead run, and the next process removes its files. The files of a seat
that is held are never changed. A second engine of one process takes a second seat (``rank0-2``).

Other files in the folder are not read, and no link is followed.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import stat
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.words import counted, in_words, printable
from shardwise.memory.direct_io import DirectFile, rounded_up
from shardwise.observe.progress import bytes_text

__all__ = ["ScratchFolder"]

_log = logging.getLogger(__name__)

_NAME = re.compile(r"shardwise\.(?P<seat>rank(?P<rank>\d+)(?P<turn>-\d+)?)\.(?P<kind>\w+)")
_PATIENCE_S = 600.0
"""Seconds to wait for the folder's lock. Another process holds it while it reserves space, which takes long if the file
system has to write zeros."""


class _SeatFile(NamedTuple):
    path: Path
    seat: str
    rank: int
    turn: str
    kind: str


DISK_PATH = "offload.disk_path"
"""Key of the configuration that names the folder of offloaded state."""


def check_folder(path: Path, key: str = DISK_PATH) -> None:
    """Check that ``path`` is a folder.

    Args:
        path: the folder.
        key: key of the configuration that names the folder, for the error.

    Raises:
        ConfigError: if it is not a folder, or does not exist.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"{key}: {path.absolute()} {what}; give a folder on a local disk")


class ScratchFolder:
    """A rank's seat in the folder, and the rank's files.

    Making one claims the seat and removes the files of dead runs.

    Args:
        path: the folder.
        rank: number of this rank.
        local_ranks: number of ranks on this host.
        key: key of the configuration that names the folder, for errors.

    Raises:
        ConfigError: if the folder cannot be used.
        UsageError: if another process uses the seat; the message names that process.
    """

    def __init__(self, path: Path, rank: int, local_ranks: int, key: str = DISK_PATH) -> None:
        self.path = path = path.absolute()  # stays valid if the program changes its working directory
        self.files: dict[str, DirectFile] = {}
        self._rank, self._local_ranks, self._key = rank, local_ranks, key
        self._locks: list[int] = []
        check_folder(path, key)
        with self._held():
            self._seat, self._turn = self._claimed()
            try:
                self._remove_dead()
            except ConfigError:
                self._close()
                raise
        memory = _memory_bytes(path)
        if memory is not None:
            _log.warning(
                "%s: %s is in memory (tmpfs, %s): state there takes the host's memory; give a folder on a disk",
                key,
                path,
                bytes_text(memory),
            )
        _SEATS.add(self)

    def reserve(self, sizes: Mapping[str, int], shares: Mapping[float, int] | None = None) -> None:
        """Create one file for each kind of state, with its space on disk reserved.

        Args:
            sizes: bytes of the file by kind.
            shares: bytes of this rank's files by other values of ``offload.fraction``, for the advice in the error.

        Raises:
            ConfigError: if the space is too small; the message gives the bytes needed, the bytes free, and a fraction
                that fits.
        """
        assert all(re.fullmatch(r"\w+", kind) and kind != "lock" for kind in sizes), f"kinds {list(sizes)}"
        own = sum(map(rounded_up, sizes.values()))
        with self._held():
            others = [each for each in self._entries() if each.seat != self._seat and each.kind != "lock"]
            theirs = sum(os.lstat(each.path).st_blocks * 512 for each in others)
            to_come = self._local_ranks - 1 - len({each.rank for each in others if each.turn == self._turn})
            needed = own * (1 + max(0, to_come))
            found = os.statvfs(self.path)
            free = found.f_bavail * found.f_frsize
            too_little = partial(self._too_little, needed + theirs, free + theirs, own, shares or {})
            if needed > free:
                raise too_little()
            try:
                for kind, size in sizes.items():
                    self.files[kind] = DirectFile(self._path(self._seat, kind), size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise too_little(in_words(error)) from None
                raise ConfigError(
                    f"{self._key}: {in_words(error)}; look to the disk, or give another folder"
                ) from None

    def _too_little(
        self, needed: int, free: int, own: int, shares: Mapping[float, int], said: str = ""
    ) -> ConfigError:
        """Return the error for a disk that is too small.

        ``needed`` are the bytes of all ranks of this host, ``own`` those of this rank.
        """
        fits = [fraction for fraction, size in shares.items() if needed * size <= free * own and not said]
        advice = f"set offload.fraction: {max(fits):g}, which fits, or " if fits else ""
        return ConfigError(
            f"{self._key}: {self.path} needs {bytes_text(needed)} for "
            f"{counted(self._local_ranks, 'rank')} of this host and has {bytes_text(free)}"
            f"{f' ({said})' if said else ''}; {advice}give a folder on a larger disk"
        )

    def add(self, kind: str, size_bytes: int) -> DirectFile:
        """Create one more file with its space reserved, while other files are in use.

        Args:
            kind: kind of the state in the file, a word that no other file has.
            size_bytes: bytes of the file.

        Raises:
            OSError: if the file or its space cannot be had; no file is left behind.
        """
        assert re.fullmatch(r"\w+", kind) and kind != "lock" and kind not in self.files, f"kind {kind!r}"
        made = self.files[kind] = DirectFile(self._path(self._seat, kind), size_bytes)
        return made

    def drop(self, kind: str) -> None:
        """Close a file that nobody uses any more and remove it."""
        file = self.files.pop(kind)
        file.close()
        if self._holds_seat():
            file.path.unlink(missing_ok=True)

    def is_ours(self) -> bool:
        """Return True if the seat is held by this process: not ended, and not inherited by a fork."""
        return bool(self._locks)

    def end(self) -> None:
        """Remove the files and release the seat; do nothing in a fork, or if called again."""
        if not self.is_ours():
            return
        with contextlib.suppress(OSError, UsageError, ConfigError), self._held():
            if self._holds_seat():
                self._remove(self._seat)
            if not self._entries():
                self._path("lock").unlink()
        self._close()

    def _holds_seat(self) -> bool:
        """Return True if the lock file is still the one that this process locked.

        If somebody removed the file, the seat and the files of these names may belong to another run by now.
        """
        try:
            return os.path.samestat(os.fstat(self._locks[0]), os.lstat(self._path(self._seat, "lock")))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        for file in list(self.files.values()):
            file.close()
        while self._locks:
            os.close(self._locks.pop())

    # -- seats

    def _claimed(self) -> tuple[str, str]:
        """Lock the seat of this rank, and return its name and the suffix of its turn."""
        for number in range(1, 1000):
            turn = "" if number == 1 else f"-{number}"
            seat = f"rank{self._rank}{turn}"
            path = self._path(seat, "lock")
            descriptor = self._open(path)
            if _locked(descriptor, path, self._key):
                self._locks.append(descriptor)
                now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{_this_process()} since {now} UTC\n".encode(), 0)
                return seat, turn
            holder = printable(os.pread(descriptor, 500, 0).decode(errors="replace").strip())
            os.close(descriptor)
            if not holder.startswith(f"{_this_process()} "):
                raise UsageError(
                    f"{self._key}: {self.path} is used by another run for its rank {self._rank} "
                    f"({holder or 'it does not say which'}); stop it, or give each run a folder of its own"
                )
        raise UsageError(f"{self._key}: {self.path}: this process has {number} engines with state there")

    def _remove_dead(self) -> None:
        """Remove the files of seats that no process holds, and files that an earlier holder of this seat left."""
        found: dict[str, list[_SeatFile]] = {}
        for entry in self._entries():  # listed once: a folder may hold the files of thousands of dead ranks
            found.setdefault(entry.seat, []).append(entry)
        for seat, entries in sorted(found.items()):
            if seat == self._seat:
                self._remove_all(each for each in entries if each.kind != "lock")
                continue
            path = self._path(seat, "lock")
            descriptor = self._open(path)
            try:
                if _locked(descriptor, path, self._key):
                    # Remove the lock last (``_open`` may have created it): if this process is killed in between, the
                    # next process still finds the seat and removes the other files.
                    files = [each for each in entries if each.kind != "lock"]
                    self._remove_all([*files, entries[0]._replace(path=path, kind="lock")])
            finally:
                os.close(descriptor)

    def _remove(self, seat: str) -> None:
        """Remove the files and the lock of a seat."""
        self._remove_all(entry for entry in self._entries() if entry.seat == seat)

    def _remove_all(self, entries: Iterable[_SeatFile]) -> None:
        for entry in entries:
            try:
                entry.path.unlink(missing_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{self._key}: what a dead run left cannot be removed: {in_words(error)}; remove it, or "
                    "give another folder"
                ) from None

    def _entries(self) -> list[_SeatFile]:
        names = os.listdir(self.path)
        found = [(name, match) for name in names if (match := _NAME.fullmatch(name))]
        return [
            _SeatFile(self.path / name, match["seat"], int(match["rank"]), match["turn"] or "", match["kind"])
            for name, match in found
        ]

    def _path(self, *words: str) -> Path:
        return self.path / ".".join(("shardwise", *words))

    # -- locks

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the folder's lock inside the context."""
        path, deadline = self._path("lock"), time.monotonic() + _PATIENCE_S
        while True:
            descriptor = self._open(path)
            try:
                if _locked(descriptor, path, self._key):
                    try:
                        yield
                        return
                    finally:
                        fcntl.flock(descriptor, fcntl.LOCK_UN)  # else a fork made meanwhile holds it
            finally:
                os.close(descriptor)
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{path} has been held by another process for {_PATIENCE_S:.0f} s; is it stopped? End it, or give "
                    f"another {self._key}"
                )
            time.sleep(0.01)

    def _open(self, path: Path) -> int:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
            return descriptor
        except OSError as error:
            raise ConfigError(
                f"{self._key}: no files can be made there: {in_words(error)}; give a folder that this "
                "process may write into"
            ) from None


def _locked(descriptor: int, path: Path, key: str) -> bool:
    """Return True if this process now holds the lock, and the locked file still has that name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise ConfigError(
            f"{key}: {path.parent}: the file system has no locks ({in_words(error)}), by which "
            "runs keep apart; give a folder on a local disk"
        ) from None
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


_SEATS: "weakref.WeakSet[ScratchFolder]" = weakref.WeakSet()
"""The seats of this process."""


def _leave_in_fork() -> None:
    """Close the descriptors of the locks in a forked process, such as a data worker.

    An open descriptor would keep the lock, and the disk space, after the run has ended.
    """
    for folder in list(_SEATS):
        folder._close()


# Once for the process: what is registered here is never removed, and would keep a callback for every folder.
os.register_at_fork(after_in_child=_leave_in_fork)


def _memory_bytes(path: Path) -> int | None:
    """Return the size of the file system if it lies in memory, else None."""
    device = os.stat(path).st_dev
    mark = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        if before.split()[2] == mark and after.split()[0] in ("tmpfs", "ramfs", "devtmpfs"):
            found = os.statvfs(path)
            return found.f_blocks * found.f_frsize
    return None
