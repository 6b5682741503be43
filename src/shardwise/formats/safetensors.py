"""The safetensors format at the level of bytes, so that any slice of a tensor can be read or written by itself.

    8 bytes    length of the header, little endian
    header     JSON: {name: {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, "__metadata__": {...}}
    data       the tensors, row-major; offsets count from the first byte of the data

Files are read through a memory map: only the pages of the slice are read. No code of the file is executed.
"""

import itertools
import json
import math
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from shardwise.base.errors import CheckpointError, DamagedError, MismatchError
from shardwise.base.strict_json import JSON_BYTES, Count, StrictModel, read_object, validated
from shardwise.base.words import in_words

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtype for each name in the format."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
"""The format's name for each dtype."""
METADATA = "__metadata__"
"""The key of the header that is not a tensor."""
_CARRIERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""Integers of the same size as a dtype, in which NumPy reads the bits, because NumPy has no bfloat16."""


class StoredTensor(NamedTuple):
    """The position, shape and dtype of one tensor in a file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """The offset of the first byte in the file."""

    @property
    def elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    def read(self, start: int, stop: int, transposed: bool = False) -> Tensor:
        """Read flat elements [start, stop) of the tensor, or of its transpose, and return them: [stop - start].

        Args:
            start: The first element.
            stop: The element after the last one.
            transposed: True to count the elements in the transpose of the tensor.
        """
        if start >= stop:
            return torch.empty(0, dtype=self.dtype)
        carrier = _CARRIERS[self.dtype.itemsize]
        raw = np.memmap(self.file, dtype=carrier, mode="r", offset=self.offset, shape=(self.elements,))
        if transposed:
            _, inner = self.shape[::-1]
            first, last = start // inner, -(-stop // inner)
            columns = np.ascontiguousarray(raw.reshape(self.shape)[:, first:last].T).reshape(-1)
            values = np.array(columns[start - first * inner : stop - first * inner])
        else:
            values = np.array(raw[start:stop])
        return torch.from_numpy(values).view(self.dtype)

    def mapped(self) -> Tensor:
        """Return the whole tensor as a memory map of the file, which must not be written.

        A tensor that does not begin at a multiple of its dtype's size is read into memory.
        """
        if not self.elements or self.offset % self.dtype.itemsize:
            return self.read(0, self.elements).view(self.shape)
        carrier = _CARRIERS[self.dtype.itemsize]
        raw = np.memmap(self.file, dtype=carrier, mode="r", offset=self.offset, shape=(self.elements,))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(raw).view(self.dtype).view(self.shape)


class _StoredEntry(StrictModel):
    """An entry of the header."""

    dtype: str
    shape: Annotated[list[Count], Field(max_length=64)]
    data_offsets: Annotated[list[Count], Field(min_length=2, max_length=2)]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a file and return its tensors by name.

    Raises:
        FileNotFoundError: if the file does not exist.
        CheckpointError: if the file cannot be opened, or has a dtype that cannot be read.
        DamagedError: if a tensor is not within the file or overlaps another; the error names the tensor.
    """
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{file} is no regular file; expected safetensors")
        with file.open("rb") as stream:
            return header_of(file, found.st_size, lambda start, count: stream.read(count))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{in_words(error)}; expected a safetensors file") from None


def header_of(file: Path, size: int, read: Callable[[int, int], bytes]) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, reading the header with a function.

    Args:
        file: The file's name.
        size: The file's bytes.
        read: A function (start, count) that returns bytes; called with ascending positions.

    Raises:
        CheckpointError: if the file has a dtype that cannot be read.
        DamagedError: if a tensor is not within the file or overlaps another; the error names the tensor.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else 0
    if size < 8 or length > min(size - 8, JSON_BYTES):
        raise DamagedError(f"{file}: not a safetensors file: {size} bytes, header of {length} bytes")
    header = read_object(read(8, length), f"{file}: the safetensors header")
    return {tensor.name: tensor for tensor in _tensors(file, header, data=8 + length, size=size)}


def encoded_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    notes: Mapping[str, str] | None = None,
    alignment: int = 8,
) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file that contains ``tensors`` one after another, and the offset of each tensor.

    Args:
        tensors: (name, dtype, shape) of each tensor.
        notes: Further metadata.
        alignment: The number of which the offset of the data is a multiple.
    """
    # Without the key "format", transformers refuses to load the weights.
    header: dict[str, Any] = {METADATA: {"format": "pt", **(notes or {})}}
    offsets: dict[str, int] = {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        offsets[name] = begin
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in offsets.items()}


def _tensors(file: Path, header: dict[str, Any], data: int, size: int) -> list[StoredTensor]:
    """Return the tensors of a header, sorted by offset."""
    tensors = []
    for name, given in header.items():
        if name == METADATA:
            continue
        entry = validated(_StoredEntry, given, f"{file}: {name[:200]}")
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{file}: {name[:200]} is stored as {entry.dtype[:40]}; readable are {', '.join(DTYPES)}"
            )
        begin, end = entry.data_offsets
        tensor = StoredTensor(file, name, dtype, tuple(entry.shape), data + begin)
        if not begin <= end <= size - data or end - begin != tensor.elements * dtype.itemsize:
            raise DamagedError(
                f"{file}: {name[:200]} with shape {list(tensor.shape)} and dtype {entry.dtype} lies at bytes "
                f"[{begin}, {end}) of {size - data}; the file is cut short or damaged"
            )
        tensors.append(tensor)
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.elements))
    for first, second in itertools.pairwise(tensor for tensor in tensors if tensor.elements):
        if first.offset + first.elements * first.dtype.itemsize > second.offset:
            raise DamagedError(f"{file}: {first.name[:200]} and {second.name[:200]} overlap")
    return tensors


class SafetensorsWriter:
    """A writer of tensors whose positions are fixed in advance, tensor by tensor or part by part in any order.

    The writer needs memory for one part. The file gets its name when all tensors are written and the context ends
    without an exception.

    Args:
        file: The file to write.
        shapes: The shape of each tensor, by name.
        dtype: The dtype of all tensors, or of each tensor by name.

    Raises:
        CheckpointError: if the format does not have a dtype.
    """

    def __init__(
        self,
        file: Path,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype | Mapping[str, torch.dtype],
    ) -> None:
        self._file = file
        self._dtypes = dict.fromkeys(shapes, dtype) if isinstance(dtype, torch.dtype) else dict(dtype)
        without = [each for each in self._dtypes.values() if each not in CODES]
        if without:
            raise CheckpointError(f"{file}: safetensors has no {without[0]}")
        self._temporary = file.with_name(file.name + ".part")
        self._shapes = dict(shapes)
        self._missing = {name: math.prod(shape) for name, shape in shapes.items()}
        self._head, self._offsets = encoded_header(
            (name, self._dtypes[name], shape) for name, shape in shapes.items()
        )
        self._stream: BinaryIO | None = None

    def __enter__(self) -> "SafetensorsWriter":
        self._stream = self._temporary.open("wb")
        self._stream.write(self._head)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one whole tensor.

        Raises:
            MismatchError: if the tensor is unknown, has another shape, or was written before.
        """
        expected = self._shapes.get(name)
        if expected is None or (self._missing[name] == 0 and 0 not in expected):
            raise MismatchError(f"{self._file}: {name} was written twice, or was not announced")
        if tuple(tensor.shape) != expected:
            raise MismatchError(f"{self._file}: {name} has shape {list(tensor.shape)}, not {list(expected)}")
        self.write_part(name, 0, tensor)

    def write_part(self, name: str, start: int, part: Tensor) -> None:
        """Write elements [start, start + n) of a tensor; parts must not overlap.

        Args:
            name: The name of the tensor.
            start: The first element.
            part: The elements, of any shape.
        """
        assert self._stream is not None, "SafetensorsWriter is a context manager"
        dtype = self._dtypes[name]
        bits = part.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8)
        self._stream.seek(self._offsets[name] + start * dtype.itemsize)
        self._stream.write(bits.numpy().data)
        self._missing[name] -= part.numel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._stream is not None, "SafetensorsWriter is a context manager"
        try:
            missing = [name for name, elements in self._missing.items() if elements]
            if kind is None and missing:
                raise MismatchError(
                    f"{self._file}: {len(missing)} tensors were never written: {', '.join(missing[:3])}"
                )
            if kind is None:
                # Flush before the rename: after a crash, the final name could otherwise point to an incomplete file.
                self._stream.flush()
                os.fsync(self._stream.fileno())
                os.replace(self._temporary, self._file)
        finally:
            self._stream.close()
            self._temporary.unlink(missing_ok=True)
