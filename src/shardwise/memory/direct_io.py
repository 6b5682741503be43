"""Positioned reads and writes that leave no copy in the page cache.

    direct      O_DIRECT: the disk reads and writes the tensor's own memory. Address, offset in the file and length must
                be multiples of 4096: a tail, or a tensor with another address, goes through the caller's spare memory
    buffered    if the file system does not support O_DIRECT: the page cache is asked to drop each range, after a write
                once the disk has the bytes, so that state on disk does not fill the memory of a cgroup

Cost: a call per request; a copy of the tail (of all bytes if the memory is not aligned).
"""

import errno
import mmap
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT_BYTES",
    "Bytes",
    "DirectFile",
    "aligned_empty",
    "bytes_of",
    "mapped_empty",
    "rounded_up",
]

Bytes = npt.NDArray[np.uint8]

ALIGNMENT_BYTES = 4096
"""Alignment of addresses, offsets and lengths: a multiple of every disk's sector, and a page of memory."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def rounded_up(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to a multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bytes_of(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous CPU tensor as an array of bytes, without a copy."""
    assert tensor.device.type == "cpu", f"a disk reads and writes host memory, not {tensor.device}"
    assert tensor.is_contiguous(), "a disk reads and writes one range of memory: the tensor is not contiguous"
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def aligned_empty(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an undefined CPU tensor whose memory a disk can read and write without a copy, except for its tail.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.

    Returns:
        The tensor, which begins on a page.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = prod(shape) * dtype.itemsize
    memory = torch.empty(size + ALIGNMENT_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNMENT_BYTES
    return memory[begin : begin + size].view(dtype).reshape(shape)


def mapped_empty(size_bytes: int) -> Tensor:
    """Return zeros in pages of their own, outside the heap, which the system gets back when the tensor is freed.

    glibc keeps up to 64 MiB of freed memory at the end of the heap of each thread, even after ``malloc_trim``, so
    blocks that one thread per engine allocates would add up from engine to engine.

    Args:
        size_bytes: Number of bytes.

    Returns:
        The uint8 tensor, which begins on a page.
    """
    # The system maps at least one byte: a rank may have no element of a small tensor.
    pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size_bytes]


class DirectFile:
    """A new file. Several threads may use it, each with its own spare memory.

    A short read or write is an error: the space is reserved, so a working disk reads and writes all bytes or
    reports an error.

    Args:
        path: Path of the file, which must not exist.
        size_bytes: Bytes to reserve.

    Raises:
        OSError: If the file cannot be made or its space cannot be reserved; no file is left behind.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Make the file and reserve its space."""
        self.path = path
        self.is_direct = True
        try:
            self._descriptor = os.open(path, _FLAGS | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some file systems make the file before they refuse the flag
            self._descriptor = os.open(path, _FLAGS, 0o600)
            self.is_direct = False
        try:
            if size_bytes:
                os.posix_fallocate(self._descriptor, 0, rounded_up(size_bytes))
            if self.is_direct:
                self._try_direct()
        except OSError as error:
            error.filename = str(path)  # the system reports only the number of the descriptor
            self.close()
            path.unlink()
            raise

    def _try_direct(self) -> None:
        """Read once, and reopen the file without O_DIRECT if the file system accepts the flag but refuses reads."""
        try:
            self._read([bytes_of(aligned_empty(ALIGNMENT_BYTES, torch.uint8))], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(self._descriptor)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self.is_direct = False

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file, -1 after ``close``."""
        return self._descriptor

    def size_bytes(self) -> int:
        """Return the present size of the file."""
        return os.fstat(self._descriptor).st_size

    def write(self, data: Bytes, offset: int, spare: Bytes) -> None:
        """Write all of ``data``.

        Args:
            data: The bytes. Their number is a multiple of the alignment, except at the end of a range.
            offset: Offset in the file, a multiple of the alignment.
            spare: Aligned memory of ``rounded_up(data.nbytes)`` bytes.

        Raises:
            OSError: If the disk fails or writes fewer bytes.
        """
        body, rest = self._parts(data, spare)
        np.copyto(rest[: data.nbytes - body], data[body:])
        given = [each for each in (data[:body], rest) if each.nbytes]
        self._whole("write", self._write(given, offset), given)
        if not self.is_direct:
            os.fdatasync(self._descriptor)
            self._let_go(offset, data.nbytes)

    def read(self, data: Bytes, offset: int, spare: Bytes) -> None:
        """Fill ``data`` from the file.

        Args:
            data: The memory to fill.
            offset: Offset in the file, a multiple of the alignment.
            spare: Aligned memory of ``rounded_up(data.nbytes)`` bytes.

        Raises:
            OSError: If the disk fails or reads fewer bytes.
        """
        body, rest = self._parts(data, spare)
        given = [each for each in (data[:body], rest) if each.nbytes]
        self._whole("read", self._read(given, offset), given)
        np.copyto(data[body:], rest[: data.nbytes - body])
        if not self.is_direct:
            self._let_go(offset, data.nbytes)

    def read_pages(self, data: Bytes, offset: int) -> None:
        """Fill ``data`` from the file, for many small requests that need no spare memory.

        Args:
            data: The memory to fill, whose address and length are multiples of the alignment.
            offset: Offset in the file, a multiple of the alignment.

        Raises:
            OSError: If the disk fails or reads fewer bytes.
        """
        moved = self._read((data,), offset)
        if moved != data.nbytes:
            raise OSError(errno.EIO, f"short read, {moved} of {data.nbytes} bytes")
        if not self.is_direct:
            self._let_go(offset, data.nbytes)

    def _parts(self, data: Bytes, spare: Bytes) -> tuple[int, Bytes]:
        """Return the number of bytes that the disk may take from ``data`` itself, and spare memory for the rest."""
        if not self.is_direct:
            return data.nbytes, spare[:0]
        body = (
            data.nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES if data.ctypes.data % ALIGNMENT_BYTES == 0 else 0
        )
        return body, spare[: rounded_up(data.nbytes - body)]

    def _whole(self, operation: str, moved: int, parts: Sequence[Bytes]) -> None:
        wanted = sum(part.nbytes for part in parts)
        if moved != wanted:
            raise OSError(errno.EIO, f"short {operation}, {moved} of {wanted} bytes")

    def _let_go(self, offset: int, size_bytes: int) -> None:
        os.posix_fadvise(self._descriptor, offset, rounded_up(size_bytes), os.POSIX_FADV_DONTNEED)

    def _write(self, parts: Sequence[Bytes], offset: int) -> int:
        return os.pwritev(self._descriptor, [part.data for part in parts], offset)

    def _read(self, parts: Sequence[Bytes], offset: int) -> int:
        return os.preadv(self._descriptor, [part.data for part in parts], offset)

    def close(self) -> None:
        """Close the descriptor and keep the file; a second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
