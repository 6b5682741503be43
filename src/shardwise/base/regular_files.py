"""Access to regular files only: opened without waiting, read whole within a bound, replaced without following a link.

    with open_regular(path) as file: ...                 # a FIFO, a device or a folder is an OSError, never a wait
    data = read_small_file(path, limit_bytes=64 << 10)   # /dev/zero and a file of 10 GB are an OSError
    write_small_file(path, data)                         # path holds the old bytes or all of the new ones

The path of a configuration, a tokenizer or a step may be another person's choice, and a name in a shared folder may be
another person's link. Every small file of the package is read and written by this module.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

SMALL_BYTES = 1 << 20
"""Most bytes of text that people write: configurations, hostfiles, notes."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 1 << 20


def open_regular(path: str | os.PathLike[str], *, follows_links: bool = True) -> BinaryIO:
    """Open a regular file for reading, without waiting for anyone.

    Args:
        path: The file.
        follows_links: False refuses a symbolic link at ``path``.

    Returns:
        The open file.

    Raises:
        OSError: if ``path`` does not open, or is a FIFO, a device, a socket or a folder.
    """
    name = os.fspath(path)
    try:
        # O_NONBLOCK: opening a FIFO for reading otherwise waits for a writer.
        descriptor = os.open(name, _READ if follows_links else _READ | os.O_NOFOLLOW)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), name) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_small_file(
    path: str | os.PathLike[str], limit_bytes: int = SMALL_BYTES, *, follows_links: bool = True
) -> bytes:
    """Return the whole content of a regular file.

    Args:
        path: The file.
        limit_bytes: The largest size that is read.
        follows_links: False refuses a symbolic link at ``path``.

    Returns:
        The bytes of the file.

    Raises:
        OSError: if the file does not open, is not regular, or has more than ``limit_bytes`` bytes.
    """
    with open_regular(path, follows_links=follows_links) as file:
        parts, total = [], os.fstat(file.fileno()).st_size
        if total <= limit_bytes:
            total = 0
            # In pieces, because the size of a file in /proc is 0 and that of a file that grows is out of date.
            while piece := file.read(min(_PIECE_BYTES, limit_bytes + 1 - total)):
                parts.append(piece)
                total += len(piece)
        if total > limit_bytes:
            raise OSError(errno.EFBIG, f"more than {limit_bytes} bytes, which is the limit", os.fspath(path))
    return b"".join(parts)


def read_small_text(
    path: str | os.PathLike[str], limit_bytes: int = SMALL_BYTES, *, follows_links: bool = True
) -> str:
    """Return the whole content of a regular file of UTF-8 text.

    Args:
        path: The file.
        limit_bytes: The largest size that is read.
        follows_links: False refuses a symbolic link at ``path``.

    Returns:
        The text.

    Raises:
        OSError: as :func:`read_small_file` does, and if the bytes are not UTF-8.
    """
    data = read_small_file(path, limit_bytes, follows_links=follows_links)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OSError(
            errno.EILSEQ,
            f"not text in UTF-8 (byte {error.start} is {data[error.start]:#04x})",
            os.fspath(path),
        ) from None


def expanded(path: str) -> Path:
    """Return the path with ``~`` replaced by the home folder; as it is, if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # an unknown user, or a container's user without HOME and without an entry in passwd
        return Path(path)


def write_small_file(path: Path, data: bytes, fresh: Path | None = None) -> None:
    """Replace a file by ``data``; after a kill at any moment ``path`` holds the old bytes or all of the new ones.

    A link at ``path`` is replaced, and a link at ``fresh`` is removed; the files behind both stay as they are.

    Args:
        path: The file to replace.
        data: Its new content.
        fresh: The name under which the new file is written first; ``path`` with ``.new`` by default.

    Raises:
        OSError: if the file cannot be written.
    """
    fresh = fresh or path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    with os.fdopen(os.open(fresh, _CREATE, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
