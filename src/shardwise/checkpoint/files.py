"""Access of checkpoints to the disk: every call goes through ``FileSystem``.

There are two reasons. Crash safety consists of the order of writes, fsyncs and renames, so that order is kept in one
place; and a test derives from this class to fail, cut short or kill at the n-th call.

Requirements on the file system:
  * rename of a directory is atomic, and fsync of a file and of a directory make content and names durable;
  * several processes may write disjoint byte ranges of one file (POSIX ``pwrite``: local disks, Lustre, GPFS, CephFS,
    and NFS if no range shares a page with another client's cached copy; reading back before the commit catches a
    lost range);
  * ``flock`` detects whether another process is saving into the folder; without it, leftovers of dead writers are not
    removed.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from shardwise.base.errors import CheckpointError

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a FIFO must not hang
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def lies_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the file at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


class FileSystem:
    """The file system, call by call. ``before`` is called with (operation, path) ahead of each change."""

    def before(self, operation: str, path: Path) -> None:
        """Do nothing; tests override this method to raise or to kill the process."""

    # -- writing

    def make_directory(self, path: Path) -> None:
        """Make the directory ``path``."""
        self.before("mkdir", path)
        path.mkdir()

    def create(self, path: Path, size: int) -> int:
        """Create a file of ``size`` bytes and return its descriptor, open for writing."""
        self.before("create", path)
        descriptor = os.open(path, _WRITE | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def open_for_writing(self, path: Path) -> int:
        """Open an existing file for writing, without following a link."""
        return os.open(path, _WRITE)

    def write_at(self, descriptor: int, path: Path, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``; the kernel may take it in several parts."""
        rest = memoryview(data)
        while rest:
            self.before("write", path)
            try:
                written = self.pwrite(descriptor, rest, offset)
            except OSError as error:
                error.filename = str(path)  # pwrite knows only a number
                raise
            if written <= 0:
                raise OSError(errno.ENOSPC, "the file system took no more bytes", str(path))
            rest, offset = rest[written:], offset + written

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write a part of ``data`` at ``offset`` and return the number of bytes written."""
        return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int, path: Path) -> None:
        """Make the file's content durable."""
        self.before("sync", path)
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the file of ``descriptor``."""
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Make the names in the directory ``path`` durable."""
        self.before("sync_directory", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have no fsync of directories
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename ``old`` to ``new``."""
        self.before("rename", old)
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove the file or link ``path``."""
        self.before("unlink", path)
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove the empty directory ``path``."""
        self.before("rmdir", path)
        path.rmdir()

    # -- put together from the above

    def replace(self, path: Path, data: bytes) -> None:
        """Replace the content of ``path`` by ``data``: a crash leaves the old content or all of the new.

        The name is not yet durable.
        """
        temporary = path.with_name(path.name + ".tmp")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(temporary)
        descriptor = self.create(temporary, len(data))
        try:
            self.write_at(descriptor, temporary, data, 0)
            self.sync(descriptor, temporary)
        finally:
            self.close(descriptor)
        self.rename(temporary, path)

    def make_folder(self, path: Path) -> None:
        """Make the folder ``path`` and its missing parents, each name durable.

        Raises:
            CheckpointError: if a file or a broken link is in the way.
        """
        if not path.is_dir():
            if path.is_symlink():
                raise CheckpointError(
                    f"{path} is a link to {os.readlink(path)}, not to a folder that can be reached; mend the link or "
                    "the disk behind it, or remove the link"
                )
            if path.exists():
                raise CheckpointError(f"{path} is a file where a folder is expected; give another folder")
            self.make_folder(path.parent)
            self.make_directory(path)
            self.sync_directory(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Remove ``path`` and everything under it; links are removed, never followed, ``path`` itself included."""
        if path.is_symlink():
            self.unlink(path)
            return
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    self.remove_tree(Path(entry.path))
                else:
                    self.unlink(Path(entry.path))
        self.remove_directory(path)

    # -- asking and reading

    def free_bytes(self, path: Path) -> int:
        """Return the free bytes of the file system of ``path``."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def lock(self, path: Path) -> Callable[[], None] | None:
        """Lock ``path`` against other processes.

        The kernel releases the lock when its holder dies, however it dies, without a lease or a clock.

        Returns:
            Function that releases the lock and removes ``path``; None if the file system has no locks.

        Raises:
            CheckpointError: if another process holds the lock.
        """
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise CheckpointError(
                        f"{path.parent}: another process is saving into this folder; "
                        "give each run a checkpoint folder of its own"
                    ) from None
                return None
            if lies_at(descriptor, path):
                break
            # The last holder removed the file in between; a lock on a removed file excludes no other process.
            os.close(descriptor)

        def release() -> None:
            try:
                with contextlib.suppress(OSError):
                    if lies_at(descriptor, path):
                        path.unlink()
                with contextlib.suppress(OSError):
                    # unlock explicitly: after only a close, a forked data worker would still hold the lock
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)

        return release

    def open_for_reading(self, path: Path) -> int:
        """Open a regular file for reading, without following a link.

        Raises:
            OSError: if ``path`` is no regular file.
        """
        descriptor = os.open(path, _READ)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return descriptor

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``.

        Raises:
            OSError: if the file ends early.
        """
        while buffer:
            got = os.preadv(descriptor, [buffer], offset)
            if got == 0:
                raise OSError(errno.EIO, "the file ends before its size")
            buffer, offset = buffer[got:], offset + got

    def read_bytes(self, path: Path, limit_bytes: int) -> bytes:
        """Return the content of a small file.

        Raises:
            OSError: if the file is larger than ``limit_bytes``; it is not read then.
        """
        descriptor = self.open_for_reading(path)
        try:
            size = os.fstat(descriptor).st_size
            if size > limit_bytes:
                raise OSError(
                    errno.EFBIG, f"{size} bytes where at most {limit_bytes} are expected", str(path)
                )
            data = bytearray(size)
            self.read_at(descriptor, memoryview(data), 0)
            return bytes(data)
        finally:
            os.close(descriptor)
