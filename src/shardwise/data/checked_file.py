"""Files of our own that are written once and then mapped: a prefix, a JSON header, blocks with a CRC-32 each.

    byte 0     magic (8), version u32, length of the header u32, CRC-32 of the header u32, header (JSON)

``token_file.py`` and ``clicks/packed.py`` say what follows. Writing streams into a temporary file that gets its name by
one rename after it has reached the disk, so a reader never meets half a file.
"""

import contextlib
import errno
import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import IO

from shardwise.plan.errors import DataError

PREFIX = struct.Struct("<8sIII")
"""Magic, version, length and CRC-32 of the header."""


class CheckedWriter:
    """A temporary file beside ``path`` that keeps the CRC-32 of its blocks while it is written.

    ``start``: bytes left free at the beginning, for prefix and header; blocks count from there.
    """

    def __init__(self, path: Path, block_bytes: int, start: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._block_bytes = path, block_bytes
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self.file: IO[bytes] = self._temporary.open("w+b")
        self.file.write(bytes(start))
        self.size = 0
        """Bytes behind the start."""
        self._checksums: list[int] = []
        self._open_crc = 0

    def write(self, data: bytes) -> None:
        """Put ``data`` behind what was written before."""
        view = memoryview(data)
        while view:
            room = self._block_bytes - self.size % self._block_bytes
            part, view = view[:room], view[room:]
            self._open_crc = zlib.crc32(part, self._open_crc)
            self.file.write(part)
            self.size += len(part)
            if self.size % self._block_bytes == 0:
                self._checksums.append(self._open_crc)
                self._open_crc = 0

    def checksums(self) -> list[int]:
        """CRC-32s of the blocks, that of the last one, which may be shorter, included."""
        return self._checksums + ([self._open_crc] if self.size % self._block_bytes else [])

    def publish(self, magic: bytes, version: int, header: bytes) -> None:
        """Write prefix and header, and give the file its name."""
        self.file.seek(0)
        self.file.write(PREFIX.pack(magic, version, len(header), zlib.crc32(header)) + header)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self._temporary.replace(self._path)
        _fsync_folder(self._path.parent)

    def close(self) -> None:
        """Leave nothing behind of a file that was not published."""
        with contextlib.suppress(OSError):  # a full disk, already reported by the write that met it
            self.file.close()
        self._temporary.unlink(missing_ok=True)


def cannot_write(what: str, error: OSError) -> DataError:
    """The error about ``what``, a kind of file and its path."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "free space there or choose another place" if full else "choose another place"
    return DataError(f"{what} cannot be written ({error.strerror}); {advice}")


def _fsync_folder(folder: Path) -> None:
    """Make a rename durable where the system can open a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    with contextlib.suppress(OSError):  # some network file systems refuse it for a folder
        os.fsync(descriptor)
    os.close(descriptor)
