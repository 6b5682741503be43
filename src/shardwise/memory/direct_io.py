"""Positioned reads and writes that leave no copy in the page cache.

    direct      O_DIRECT: the disk reads and writes the tensor's own memory. Address, place in the file and length must
                be multiples of 4096: a tail, or a tensor that begins elsewhere, goes through the caller's spare memory
    buffered    where the file system takes no O_DIRECT: the page cache is asked to let go of each range, after a write
                once the disk has it, so that state on disk does not fill the memory of a cgroup

Cost: a call per request; a copy of the tail (of all of it where the memory is not aligned).
"""

import errno
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["ALIGNMENT_BYTES", "Bytes", "DirectFile", "aligned_empty", "bytes_of", "rounded_up"]

Bytes = npt.NDArray[np.uint8]

ALIGNMENT_BYTES = 4096
"""Of addresses, places and lengths: a multiple of every disk's sector, and a page of memory."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def rounded_up(size_bytes: int) -> int:
    """To whole multiples of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bytes_of(tensor: Tensor) -> Bytes:
    """The tensor's own memory. It is on the CPU and contiguous."""
    assert tensor.device.type == "cpu", f"a disk reads and writes host memory, not {tensor.device}"
    assert tensor.is_contiguous(), "a disk reads and writes one range of memory: the tensor is not contiguous"
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def aligned_empty(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU whose memory a disk reads and writes without a copy, its tail apart."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = prod(shape) * dtype.itemsize
    memory = torch.empty(size + ALIGNMENT_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNMENT_BYTES
    return memory[begin : begin + size].view(dtype).reshape(shape)


class DirectFile:
    """A new file of ours. Several threads may use it, each with spare memory of its own.

    A short read or write is an error: the space is reserved, so a disk that works takes and gives all, or says why.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Makes it and reserves its space.

        Errors: OSError; nothing is left behind then.
        """
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
            error.filename = str(path)  # of a descriptor the system tells the number alone
            self.close()
            path.unlink()
            raise

    def _try_direct(self) -> None:
        """Some file systems take the flag and refuse the reads."""
        try:
            self._read([bytes_of(aligned_empty(ALIGNMENT_BYTES, torch.uint8))], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(self._descriptor)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self.is_direct = False

    def size_bytes(self) -> int:
        """Of the file, as it is now."""
        return os.fstat(self._descriptor).st_size

    def write(self, data: Bytes, offset: int, spare: Bytes) -> None:
        """All of ``data`` to ``offset``, a multiple of the alignment, as every length but the last of a range is.

        ``spare``: aligned memory of ``rounded_up(data.nbytes)`` bytes. Errors: OSError.
        """
        body, rest = self._parts(data, spare)
        np.copyto(rest[: data.nbytes - body], data[body:])
        given = [each for each in (data[:body], rest) if each.nbytes]
        self._whole("write", self._write(given, offset), given)
        if not self.is_direct:
            os.fdatasync(self._descriptor)
            self._let_go(offset, data.nbytes)

    def read(self, data: Bytes, offset: int, spare: Bytes) -> None:
        """Fills ``data`` from ``offset``; see ``write``."""
        body, rest = self._parts(data, spare)
        given = [each for each in (data[:body], rest) if each.nbytes]
        self._whole("read", self._read(given, offset), given)
        np.copyto(data[body:], rest[: data.nbytes - body])
        if not self.is_direct:
            self._let_go(offset, data.nbytes)

    def _parts(self, data: Bytes, spare: Bytes) -> tuple[int, Bytes]:
        """How many bytes the disk may take from ``data`` itself, and the spare memory for those after them."""
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
        """The descriptor alone; safe to call twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
