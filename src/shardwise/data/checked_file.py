"""Files of this package that are written once and then mapped: a prefix, a JSON header, blocks with a CRC-32 each.

    byte 0     magic (8), version u32, length of the header u32, CRC-32 of the header u32, header (JSON)

``token_file.py`` and ``clicks/packed.py`` define the rest. Writing streams into a temporary file, which is renamed
after it has reached the disk, so that a reader never opens a partial file.
"""

import contextlib
import errno
import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from shardwise.base.errors import DataError
from shardwise.base.strict_json import StrictModel, read_object, validated

PREFIX = struct.Struct("<8sIII")
"""Magic, version, length and CRC-32 of the header."""
REPAIR = "make it again with `shardwise convert`, or delete it where it stands in a cache folder"
"""The way out of damaged content, which ends an error."""

_Header = TypeVar("_Header", bound=StrictModel)


class CheckedFormat(NamedTuple):
    """A kind of checked file: its first bytes, and its name in errors."""

    magic: bytes
    version: int
    name: str
    """The kind in front of a path: ``token file``."""
    is_plural: bool
    """True if the name is followed by ``are`` and ``have``."""

    def damaged(self, path: Path, what: str) -> DataError:
        """Return the error for a file whose content is wrong; ``what`` says which part."""
        return DataError(f"{self.name} {path} {'are' if self.is_plural else 'is'} damaged: {what}; {REPAIR}")

    def check_size(self, path: Path, size_bytes: int, expected_bytes: int) -> None:
        """Raise DataError unless the file has the size that its header demands."""
        if size_bytes != expected_bytes:
            state = "cut short" if size_bytes < expected_bytes else "longer than it was written"
            raise DataError(
                f"{self.name} {path} {'are' if self.is_plural else 'is'} {state}: {size_bytes} bytes where the header "
                f"says {expected_bytes}; {REPAIR}"
            )

    def read_header(
        self, file: IO[bytes], path: Path, schema: type[_Header], most_bytes: int, foreign: str
    ) -> tuple[_Header, int]:
        """Read prefix and header from the beginning of a file.

        Args:
            file: The file, at its beginning.
            path: Path of the file, for errors.
            schema: Content of the header.
            most_bytes: Size of the largest header that is read.
            foreign: End of the error for a file that begins with other bytes.

        Returns:
            The header, and the number of bytes that prefix and header take.

        Raises:
            DataError: if the file is of another kind or version, or if the header is damaged.
        """
        prefix = file.read(PREFIX.size)
        if len(prefix) < PREFIX.size or prefix[:8] != self.magic:
            raise DataError(f"{path} {foreign}")
        _, version, length, checksum = PREFIX.unpack(prefix)
        if version != self.version:
            raise DataError(
                f"{self.name} {path} {'have' if self.is_plural else 'has'} version {version}, "
                f"this release reads version {self.version}; {REPAIR}"
            )
        text = b"" if length > most_bytes else file.read(length)
        if len(text) != length or zlib.crc32(text) != checksum:
            raise self.damaged(path, "the CRC-32 of the header differs")
        where = f"{self.name} {path}, header"
        found = read_object(text, where, limit_bytes=most_bytes, kind=DataError)
        return validated(schema, found, where, kind=DataError), PREFIX.size + length


class CheckedWriter:
    """Temporary file beside ``path`` that keeps the CRC-32 of its blocks while it is written.

    Args:
        path: final path of the file.
        block_bytes: bytes of a block.
        start: bytes left free at the beginning, for prefix and header; blocks count from there.
    """

    def __init__(self, path: Path, block_bytes: int, start: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._block_bytes = path, block_bytes
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self.file: IO[bytes] = self._temporary.open("w+b")
        self.file.write(bytes(start))
        self.size = 0
        """Number of bytes after the start."""
        self._checksums: list[int] = []
        self._open_crc = 0

    def write(self, data: bytes) -> None:
        """Append ``data`` to the file."""
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
        """Return the CRC-32s of the blocks, including the last block, which may be shorter."""
        return self._checksums + ([self._open_crc] if self.size % self._block_bytes else [])

    def publish(self, kind: CheckedFormat, header: bytes) -> None:
        """Write prefix and header, and rename the file to its final path."""
        self.file.seek(0)
        self.file.write(PREFIX.pack(kind.magic, kind.version, len(header), zlib.crc32(header)) + header)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self._temporary.replace(self._path)
        _fsync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file and remove it if it was not published."""
        with contextlib.suppress(OSError):  # a full disk, which the failing write has reported already
            self.file.close()
        self._temporary.unlink(missing_ok=True)


def cannot_write(what: str, error: OSError) -> DataError:
    """Return the error for a file that cannot be written; ``what`` is its kind and path."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "free space there or choose another place" if full else "choose another place"
    return DataError(f"{what} cannot be written ({error.strerror}); {advice}")


def _fsync_folder(folder: Path) -> None:
    """Make a rename durable, if the system can open a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    with contextlib.suppress(OSError):  # some network file systems refuse it for a folder
        os.fsync(descriptor)
    os.close(descriptor)
