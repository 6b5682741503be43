"""Token files: text converted to numbers once, then mapped into memory by every rank.

    byte 0          magic (8), version u32, length of the header u32, CRC-32 of the header u32, header (JSON), zeros
    byte 4096       tokens, little endian, u8, u16 or u32 by the size of the vocabulary, zeros up to a multiple of 8
    then            end of every document as a token position, u64
    then            CRC-32 of every block of 64 KiB of tokens, u32

Writing streams: memory is the two tables (``checked_file.py``).
Reading maps the file: ranks on one host share its pages. Opening checks the header, the tables and the length; a
block's CRC is checked when the block is first read, so a large file opens at once and damaged bytes are never used.
"""

import hashlib
import json
import os
import zlib
from array import array
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shardwise.base.errors import DataError
from shardwise.base.regular_files import open_regular
from shardwise.base.strict_json import Count, StrictModel
from shardwise.data.checked_file import PREFIX, REPAIR, CheckedFormat, CheckedWriter, cannot_write

SUFFIX = ".tokens"
MAGIC = b"SHDWTOKN"
VERSION = 1
_TOKENS_START_BYTES = 4096
_BLOCK_BYTES = 64 * 1024
_DTYPES: dict[str, np.dtype[Any]] = {"u8": np.dtype("<u1"), "u16": np.dtype("<u2"), "u32": np.dtype("<u4")}
_FORMAT = CheckedFormat(MAGIC, VERSION, "token file", is_plural=False)


def dtype_for(vocab_size: int) -> str:
    """Return the smallest dtype that holds every id of a vocabulary.

    Raises:
        DataError: if the ids do not fit into 32 bits.
    """
    for name, dtype in _DTYPES.items():
        if vocab_size <= 1 << (8 * dtype.itemsize):
            return name
    raise DataError(f"a vocabulary of {vocab_size} ids does not fit into 32 bits")


class TokenWriter:
    """Writer of one token file, a context manager that commits at the end and leaves nothing behind after an error.

    Args:
        path: path of the file.
        tokenizer_name: name of the tokenizer, which is stored in the file.
        vocab_size: number of ids.

    Example:
        >>> with TokenWriter(path, tokenizer_name="bytes", vocab_size=256) as writer:
        ...     writer.append(tokens)
        ...     writer.end_document()
    """

    def __init__(self, path: Path, tokenizer_name: str, vocab_size: int) -> None:
        self.path = path
        self._dtype_name = dtype_for(vocab_size)
        self._dtype = _DTYPES[self._dtype_name]
        self._tokenizer_name, self._vocab_size = tokenizer_name, vocab_size
        self.count = 0
        self._ends = array("Q")
        self._what = f"token file {path}"

    def __enter__(self) -> "TokenWriter":
        try:
            self._file = CheckedWriter(self.path, _BLOCK_BYTES, _TOKENS_START_BYTES)
        except OSError as error:
            raise cannot_write(self._what, error) from error
        return self

    def append(self, tokens: npt.NDArray[Any]) -> None:
        """Add tokens to the current document.

        Raises:
            DataError: if a token is outside the vocabulary, or if the file cannot be written.
        """
        if tokens.size == 0:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{self.path}: token {low if low < 0 else high} is outside the vocabulary of {self._vocab_size} ids "
                f"of tokenizer {self._tokenizer_name!r}"
            )
        try:
            self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        except OSError as error:
            raise cannot_write(self._what, error) from error
        self.count += tokens.size

    def end_document(self) -> None:
        """End the current document; a document without tokens is not counted."""
        if self.count > (self._ends[-1] if self._ends else 0):
            self._ends.append(self.count)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as failure:
            raise cannot_write(self._what, failure) from failure
        finally:
            self._file.close()

    def _commit(self) -> None:
        if self.count == 0:
            raise DataError(f"{self.path} is not written: the source holds no tokens")
        self.end_document()
        self._file.file.write(bytes(-self._file.size % 8))
        ends = np.asarray(self._ends, dtype="<u8").tobytes()
        blocks = self._file.checksums()
        checksums = np.asarray(blocks, dtype="<u4").tobytes()
        self._file.file.write(ends + checksums)
        header = {
            "dtype": self._dtype_name,
            "count": self.count,
            "documents": len(self._ends),
            "blocks": len(blocks),
            "tables_crc": zlib.crc32(checksums, zlib.crc32(ends)),
            "tokenizer": self._tokenizer_name,
            "vocab_size": self._vocab_size,
        }
        text = json.dumps(header).encode()
        if PREFIX.size + len(text) > _TOKENS_START_BYTES:
            raise DataError(
                f"{self.path}: the name of tokenizer {self._tokenizer_name[:40]!r}... is too long"
            )
        self._file.publish(_FORMAT, text)


class _TokenHeader(StrictModel):
    count: Count
    documents: Count
    tokenizer: Annotated[str, Field(min_length=1, max_length=200)]
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    dtype: Literal["u8", "u16", "u32"]
    blocks: Count
    tables_crc: Annotated[int, Field(ge=0, lt=2**32)]


class TokenFile:
    """A token file, mapped into memory. ``read(start, stop)`` is the only access to its tokens.

    Args:
        path: path of the file.

    Raises:
        DataError: if the file cannot be read, is damaged, or is no token file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if not size_bytes:
                    raise DataError(f"token file {self.path} is empty; {REPAIR}")
                header, _ = _FORMAT.read_header(
                    file,
                    self.path,
                    _TokenHeader,
                    _TOKENS_START_BYTES - PREFIX.size,
                    f"is no token file: it does not start with {MAGIC.decode()}; make one with `shardwise convert`, or "
                    f"rename a text file that ends in {SUFFIX}",
                )
        except OSError as error:
            raise DataError(f"token file {self.path} cannot be read ({error.strerror})") from error
        blocks = -(-header.count * _DTYPES[header.dtype].itemsize // _BLOCK_BYTES)
        if header.blocks != blocks or header.dtype != dtype_for(header.vocab_size):
            raise DataError(
                f"token file {self.path}, header: {header.count} tokens of {header.dtype} in {header.blocks} blocks, "
                f"of a vocabulary of {header.vocab_size}, do not go together; {REPAIR}"
            )
        self.count = header.count
        self.documents = header.documents
        self.tokenizer_name = header.tokenizer
        self.vocab_size = header.vocab_size
        self.dtype = _DTYPES[header.dtype]
        self._blocks = header.blocks
        tables_start = _TOKENS_START_BYTES + -(-self.count * self.dtype.itemsize // 8) * 8
        expected_bytes = tables_start + 8 * self.documents + 4 * self._blocks
        _FORMAT.check_size(self.path, size_bytes, expected_bytes)
        self._map = np.memmap(self.path, dtype=np.uint8, mode="r")
        tables = self._map[tables_start:]
        if zlib.crc32(tables.data) != header.tables_crc:
            raise _FORMAT.damaged(self.path, "the CRC-32 of its tables differs")
        self.ends: npt.NDArray[np.uint64] = tables[: 8 * self.documents].view("<u8")
        if self.documents and (
            int(self.ends[-1]) > self.count or not bool((self.ends[1:] > self.ends[:-1]).all())
        ):
            raise _FORMAT.damaged(self.path, "its documents do not follow one another")
        self._checksums = tables[8 * self.documents :].view("<u4")
        token_bytes = self._map[_TOKENS_START_BYTES : _TOKENS_START_BYTES + self.count * self.dtype.itemsize]
        self._token_bytes = token_bytes
        self._tokens = token_bytes.view(self.dtype)
        self._is_checked = np.zeros(self._blocks, dtype=bool)

    def __len__(self) -> int:
        return self.count

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path]]:
        # A worker process maps the file again, because pickling would copy every token.
        return TokenFile, (self.path,)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens ``[start, stop)`` as a copy in int64.

        Raises:
            IndexError: if the range is outside the file.
            DataError: if a block's CRC-32 differs, or if a token is outside the vocabulary.
        """
        if not 0 <= start <= stop <= self.count:
            raise IndexError(f"tokens [{start}, {stop}) of {self.path}, which holds {self.count}")
        self._check(
            start * self.dtype.itemsize // _BLOCK_BYTES, -(-stop * self.dtype.itemsize // _BLOCK_BYTES)
        )
        return self._tokens[start:stop].astype(np.int64)

    def check(self) -> None:
        """Compare every block with its CRC-32.

        Raises:
            DataError: if a block differs; the message names the first one.
        """
        self._is_checked[:] = False
        self._check(0, self._blocks)

    def _check(self, first: int, stop: int) -> None:
        for block in range(first, stop):
            if self._is_checked[block]:
                continue
            start = block * _BLOCK_BYTES
            if zlib.crc32(self._token_bytes[start : start + _BLOCK_BYTES].data) != self._checksums[block]:
                begin = _TOKENS_START_BYTES + start
                end = min(begin + _BLOCK_BYTES, _TOKENS_START_BYTES + self._token_bytes.size) - 1
                raise _FORMAT.damaged(self.path, f"the CRC-32 of bytes {begin} to {end} differs")
            first_token = start // self.dtype.itemsize
            highest = int(self._tokens[first_token : first_token + _BLOCK_BYTES // self.dtype.itemsize].max())
            if highest >= self.vocab_size:
                raise DataError(
                    f"token file {self.path} holds token {highest}, which is not in its vocabulary of "
                    f"{self.vocab_size}; {REPAIR}"
                )
            self._is_checked[block] = True

    def fingerprint(self) -> str:
        """Return a digest of the content, equal on every rank that reads the same tokens, for any path."""
        digest = hashlib.sha256(f"{self.dtype.str} {self.count} {self.tokenizer_name}\n".encode())
        digest.update(self._checksums.tobytes())
        digest.update(self.ends.tobytes())
        return digest.hexdigest()[:16]


def is_token_file(path: Path) -> bool:
    """Return whether a file has the suffix or the first bytes of a token file.

    A file with the suffix and other bytes fails on opening.
    """
    if path.suffix == SUFFIX:
        return True
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC
