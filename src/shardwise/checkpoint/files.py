"""Every call by which a checkpoint touches a disk goes through ``Files``.

Two reasons. The order of writes, fsyncs and renames is the whole of crash safety, so it is kept where it can be
read; and a test derives from this class to fail, cut short or kill at the n-th call.

What is asked of the file system:
  * rename of a directory is atomic, and fsync of a file and of a directory make content and names durable;
  * several processes may write disjoint byte ranges of one file (POSIX ``pwrite``: local disks, Lustre, GPFS, CephFS,
    and NFS where no range shares a page with another client's cached copy; reading back before the commit catches a
    lost range);
  * ``flock`` tells whether another process is saving into the folder; where it is missing, leftovers of dead
    writers are not removed.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from shardwise.plan.errors import CheckpointError

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a FIFO must not hang us
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def lies_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one under that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


class Files:
    """The file system, call by call. ``before`` is called with (operation, path) ahead of each change."""

    def before(self, operation: str, path: Path) -> None:
        """For tests: may raise or kill."""

    # -- writing

    def make_directory(self, path: Path) -> None:
        self.before("mkdir", path)
        path.mkdir()

    def create(self, path: Path, size: int) -> int:
        """A new file of ``size`` bytes, open for writing."""
        self.before("create", path)
        descriptor = os.open(path, _WRITE | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def open_for_writing(self, path: Path) -> int:
        return os.open(path, _WRITE)

    def write_at(self, descriptor: int, path: Path, data: bytes | memoryview, offset: int) -> None:
        """All of ``data`` at ``offset``; the kernel may take it in several parts."""
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
        return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int, path: Path) -> None:
        self.before("sync", path)
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
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
        self.before("rename", old)
        old.rename(new)

    def unlink(self, path: Path) -> None:
        self.before("unlink", path)
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        self.before("rmdir", path)
        path.rmdir()

    # -- put together from the above

    def replace(self, path: Path, data: bytes) -> None:
        """``path`` holds either what it held or all of ``data``, whatever happens; the name is not yet durable."""
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
        """``path`` and what is missing above it, each name durable."""
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
        """Remove ``path`` and what lies under it; links are removed, never followed, ``path`` itself included."""
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
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def lock(self, path: Path) -> Callable[[], None] | None:
        """Hold ``path`` against other processes until the returned call, which removes it; None where locks do not
        exist.

        The kernel drops the lock when its holder dies, however it dies: no lease, no clock.
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
            os.close(descriptor)  # whoever held it removed it in between: a lock on it keeps nobody out

        def release() -> None:
            try:
                with contextlib.suppress(OSError):
                    if lies_at(descriptor, path):
                        path.unlink()
                with contextlib.suppress(OSError):
                    # closing alone leaves it held by a forked data worker
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)

        return release

    def open_for_reading(self, path: Path) -> int:
        """A regular file, not a link to one."""
        descriptor = os.open(path, _READ)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return descriptor

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``; a file that ends early is an error."""
        while buffer:
            got = os.preadv(descriptor, [buffer], offset)
            if got == 0:
                raise OSError(errno.EIO, "the file ends before its size")
            buffer, offset = buffer[got:], offset + got

    def read_bytes(self, path: Path, limit_bytes: int) -> bytes:
        """A small file whole; larger than ``limit_bytes`` is refused unread."""
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
