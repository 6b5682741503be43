"""Packed clicks: a click log as records of one size, mapped into memory by every rank.

    byte 0       magic (8), version u32, length of the header u32, CRC-32 of the header u32, header (JSON), zeros
    then         records, at a multiple of 4096: label f32, mask of missing keys (bits), numbers f32 (NaN if
                 missing), one key of every single-key feature (u32 or i64); if there are features with many
                 keys, start of the row's keys u64, and number of keys of each such feature u32
    then         keys of the features with many, i64, row by row, from a multiple of 8 on
    then         CRC-32 of every block of 16 KiB of records and keys, u32

Row i is found by multiplication, so any rows can be read in any order: a shuffled epoch, another number of ranks, a
resumed run. A Criteo row takes 164 bytes, less than its text, and no parsing.
Writing streams and commits by one rename; reading checks a block's CRC when it is first read, as token files do.
Content with a right CRC may still be wrong. The header is validated against a schema and the size of the file before
memory is allocated for its numbers, and rows are compared with what a writer writes (labels 0 and 1, no infinite
numbers, keys of one row right after those of the row before).
"""

import hashlib
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from shardwise.base.errors import DataError
from shardwise.base.regular_files import open_regular
from shardwise.base.strict_json import Count, StrictModel
from shardwise.data.checked_file import PREFIX, REPAIR, CheckedFormat, CheckedWriter, cannot_write
from shardwise.data.clicks.rows import ClickRows, ClickSchema, FeatureKeys, SparseFeature

SUFFIX = ".clicks"
MAGIC = b"SHDWCLIK"
VERSION = 1
_PAGE_BYTES = 4096
_BLOCK_BYTES = 16 * 1024
_COPY_BYTES = 1 << 20
_NUMBERS_IN_HEADER_BYTES = 256
_FORMAT = CheckedFormat(MAGIC, VERSION, "packed clicks", is_plural=True)

KeyType = Literal["u32", "i64"]
_KEYS: dict[str, np.dtype[Any]] = {"u32": np.dtype("<u4"), "i64": np.dtype("<i8")}
_MOST_HEADER_BYTES = 1 << 24


class PackedHeader(StrictModel):
    """Header of a file of packed clicks."""

    dense: list[str]
    features: list[Annotated[list[str | bool], Field(min_length=2, max_length=2)]]
    """Name of each feature, and whether a row may have many keys."""
    key_type: KeyType
    rows: Annotated[Count, Field(ge=1)]
    keys: Count
    """Number of keys of the features with many, over all rows."""
    skipped: Count
    start: Annotated[Count, Field(multiple_of=_PAGE_BYTES, ge=_PAGE_BYTES)]
    table_crc: Annotated[int, Field(ge=0, lt=2**32)]

    @model_validator(mode="after")
    def _has_columns(self) -> "PackedHeader":
        names = [*self.dense, *(name for name, _ in self.features)]
        if any(not isinstance(name, str) or not isinstance(many, bool) for name, many in self.features):
            raise ValueError("a feature is [name, whether it has many keys]")
        if len(set(names)) != len(names) or not all(
            isinstance(name, str) and name and name.isprintable() for name in names
        ):
            raise ValueError("columns have one printable name each")
        if self.keys and not any(many for _, many in self.features):
            raise ValueError("keys of features with many, but no such feature")
        return self

    @property
    def columns(self) -> ClickSchema:
        """Columns beside the label."""
        return ClickSchema(
            tuple(self.dense), tuple(SparseFeature(str(name), bool(many)) for name, many in self.features)
        )


def record_dtype(schema: ClickSchema, key_type: KeyType) -> np.dtype[Any]:
    """Return the layout of one row."""
    single = sum(not feature.many for feature in schema.features)
    many = len(schema.features) - single
    return np.dtype(
        [
            ("label", "<f4"),
            ("missing", "u1", (-(-single // 8),)),
            ("dense", "<f4", (len(schema.dense),)),
            ("keys", _KEYS[key_type], (single,)),
            ("start", "<u8", (min(many, 1),)),
            ("lengths", "<u4", (many,)),
        ]
    )


class PackedWriter:
    """Writer of one packed file, a context manager that commits at the end and leaves nothing behind after an error.

    Args:
        path: path of the file.
        schema: columns of the rows.
        key_type: type of the keys of single-key features.

    Example:
        >>> with PackedWriter(path, CRITEO, "u32") as writer:
        ...     for rows in read_criteo(log, malformed):
        ...         writer.append(rows)
    """

    def __init__(self, path: Path, schema: ClickSchema, key_type: KeyType = "i64") -> None:
        self.path, self.schema, self.key_type = path, schema, key_type
        self.skipped = 0
        """Number of malformed rows that were left out, which is stored in the header."""
        self.count = 0
        self._dtype = record_dtype(schema, key_type)
        self._single = [i for i, feature in enumerate(schema.features) if not feature.many]
        self._many = [i for i, feature in enumerate(schema.features) if feature.many]
        self._keys_held = 0
        self._what = f"packed clicks {path}"
        header_bytes = PREFIX.size + len(self._header()) + _NUMBERS_IN_HEADER_BYTES
        self._start = -(-header_bytes // _PAGE_BYTES) * _PAGE_BYTES

    def __enter__(self) -> "PackedWriter":
        try:
            self._records = CheckedWriter(self.path, _BLOCK_BYTES, self._start)
            self._heap = CheckedWriter(self.path, _BLOCK_BYTES)
        except OSError as error:
            raise cannot_write(self._what, error) from error
        return self

    def append(self, rows: ClickRows) -> None:
        """Append rows to the file.

        Raises:
            DataError: if labels, numbers or keys do not fit the schema, or if the file cannot be written.
        """
        n = rows.labels.size
        if not np.isfinite(rows.labels).all():
            at = self.count + int(np.flatnonzero(~np.isfinite(rows.labels))[0])
            raise DataError(
                f"{self.path}: row {at} has no label (NaN); rows without one cannot be learnt from"
            )
        _check_rows(self.path, np.arange(self.count, self.count + n), rows.labels, rows.dense)
        records = np.zeros(n, self._dtype)
        records["label"] = rows.labels
        records["dense"] = rows.dense
        missing = np.zeros((n, len(self._single)), np.uint8)
        for column, i in enumerate(self._single):
            lengths = self._lengths(rows.keys[i], i)
            if lengths.max(initial=0) > 1:
                raise DataError(
                    f"{self.path}: feature {self.schema.features[i].name!r} has {int(lengths.max())} keys in one row, "
                    "but is declared to have at most one; declare it with many=True"
                )
            values = rows.keys[i].values
            if self.key_type == "u32" and values.size and not 0 <= values.min() <= values.max() < 1 << 32:
                raise DataError(
                    f"{self.path}: feature {self.schema.features[i].name!r} has keys from {int(values.min())} to "
                    f"{int(values.max())}, which 32 bits do not hold; write them as i64"
                )
            records["keys"][lengths > 0, column] = values
            missing[:, column] = lengths == 0
        records["missing"] = np.packbits(missing, axis=1, bitorder="little")
        try:
            if self._many:
                self._append_many(records, rows)
            self._records.write(records.tobytes())
        except OSError as error:
            raise cannot_write(self._what, error) from error
        self.count += n

    def _append_many(self, records: npt.NDArray[Any], rows: ClickRows) -> None:
        lengths = np.stack([self._lengths(rows.keys[i], i) for i in self._many], axis=1)
        begins = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
        heap = np.empty(int(lengths.sum()), "<i8")
        for column, i in enumerate(self._many):
            values, offsets = rows.keys[i]
            heap[_places(begins[:, column], offsets)] = values
        records["start"] = self._keys_held + begins[:, :1]
        records["lengths"] = lengths
        self._heap.write(heap.tobytes())
        self._keys_held += heap.size

    def _lengths(self, keys: FeatureKeys, feature: int) -> npt.NDArray[np.int64]:
        lengths = np.diff(keys.offsets)
        if (lengths < 0).any() or keys.offsets[0] != 0 or keys.offsets[-1] != keys.values.size:
            raise DataError(
                f"{self.path}: offsets of feature {self.schema.features[feature].name!r} do not fit its "
                f"{keys.values.size} keys"
            )
        return lengths

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as failure:
            raise cannot_write(self._what, failure) from failure
        finally:
            self._records.close()
            self._heap.close()

    def _header(self, **numbers: int) -> bytes:
        content = {
            "dense": list(self.schema.dense),
            "features": [[feature.name, feature.many] for feature in self.schema.features],
            "key_type": self.key_type,
        }
        return json.dumps(content | numbers).encode()

    def _commit(self) -> None:
        if self.count == 0:
            raise DataError(f"{self.path} is not written: the source holds no rows")
        file = self._records.file
        file.write(bytes(-self._records.size % 8))
        self._heap.file.seek(0)
        shutil.copyfileobj(self._heap.file, file, _COPY_BYTES)
        checksums = np.asarray(self._records.checksums() + self._heap.checksums(), "<u4").tobytes()
        file.write(checksums)
        text = self._header(
            rows=self.count,
            keys=self._keys_held,
            skipped=self.skipped,
            start=self._start,
            table_crc=zlib.crc32(checksums),
        )
        self._records.publish(_FORMAT, text)


class _CheckedPart:
    """Part of a mapped file with a CRC-32 for each block, which is checked when the block is first read.

    ``what`` and ``path`` name the part and the file in errors.
    """

    def __init__(
        self, what: str, path: Path, content: npt.NDArray[np.uint8], checksums: npt.NDArray[np.uint32]
    ) -> None:
        self.content = content
        self.checksums = checksums
        self._what = what
        self._path = path
        self._is_checked = np.zeros(checksums.size, bool)

    def check(self) -> None:
        """Check all blocks, also those that were checked before.

        Raises:
            DataError: if a block differs; the message names the first one.
        """
        self._is_checked[:] = False
        if self.content.size:
            self.touch(np.zeros(1, np.int64), np.full(1, self.content.size))

    def touch(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> None:
        """Check the blocks of these ranges of bytes that have not been checked yet.

        Raises:
            DataError: if a block differs; the message names the first one.
        """
        if not starts.size or self._is_checked.all():
            return
        first, stop = starts // _BLOCK_BYTES, -(-stops // _BLOCK_BYTES)
        spans = stop - first
        within = np.arange(int(spans.sum())) - np.repeat(np.cumsum(spans) - spans, spans)
        blocks = np.unique(np.repeat(first, spans) + within)
        for block in blocks[~self._is_checked[blocks]].tolist():
            begin = block * _BLOCK_BYTES
            if zlib.crc32(self.content[begin : begin + _BLOCK_BYTES].data) != self.checksums[block]:
                end = min(begin + _BLOCK_BYTES, self.content.size) - 1
                raise _FORMAT.damaged(
                    self._path, f"the CRC-32 of bytes {begin} to {end} of the {self._what} differs"
                )
            self._is_checked[block] = True


class PackedClicks:
    """File of packed clicks, mapped into memory. ``rows(samples)`` is the only access to its content.

    Args:
        path: path of the file.

    Raises:
        DataError: if the file cannot be read, is damaged, or holds no packed clicks.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                header, header_bytes = _FORMAT.read_header(
                    file,
                    self.path,
                    PackedHeader,
                    min(_MOST_HEADER_BYTES, size_bytes),
                    f"holds no packed clicks: it does not start with {MAGIC.decode()}; make such a file with "
                    "`shardwise convert`",
                )
                self._map = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"packed clicks {self.path} cannot be read ({error.strerror})") from error
        if header.start < header_bytes:
            raise DataError(
                f"packed clicks {self.path}, header: rows from byte {header.start} on, inside the header"
            )
        self.schema = header.columns
        self.skipped = header.skipped
        self._count = header.rows
        self._size_bytes = size_bytes
        features = self.schema.features
        self._single = [i for i, feature in enumerate(features) if not feature.many]
        self._many = [i for i, feature in enumerate(features) if feature.many]
        dtype = record_dtype(self.schema, header.key_type)
        start, records_bytes, heap_bytes = header.start, self._count * dtype.itemsize, header.keys * 8
        heap_start = start + -(-records_bytes // 8) * 8
        record_blocks, heap_blocks = -(-records_bytes // _BLOCK_BYTES), -(-heap_bytes // _BLOCK_BYTES)
        expected_bytes = heap_start + heap_bytes + 4 * (record_blocks + heap_blocks)
        _FORMAT.check_size(self.path, size_bytes, expected_bytes)
        mapped = np.frombuffer(self._map, np.uint8)
        table = mapped[heap_start + heap_bytes :]
        if zlib.crc32(table.data) != header.table_crc:
            raise _FORMAT.damaged(self.path, "the CRC-32 of their table differs")
        checksums = np.frombuffer(table, "<u4")
        self._record_part = _CheckedPart(
            "records", self.path, mapped[start : start + records_bytes], checksums[:record_blocks]
        )
        self._heap_part = _CheckedPart(
            "keys", self.path, mapped[heap_start : heap_start + heap_bytes], checksums[record_blocks:]
        )
        self._records = self._record_part.content.view(dtype)
        self._heap = np.frombuffer(self._heap_part.content, "<i8")

    def __len__(self) -> int:
        return self._count

    def rows(self, samples: npt.NDArray[np.int64]) -> ClickRows:
        """Return these rows in this order.

        Raises:
            IndexError: if a row is outside the file.
            DataError: if the file is damaged.
        """
        if samples.size and not 0 <= samples.min() <= samples.max() < self._count:
            raise IndexError(
                f"rows {samples.min()} to {samples.max()} of {self.path}, which holds {self._count}"
            )
        if self._map.size() < self._size_bytes:
            raise DataError(
                f"packed clicks {self.path} were cut to {self._map.size()} bytes while they are in use; {REPAIR}"
            )
        itemsize = self._records.itemsize
        stops = samples + (2 if self._many else 1)  # the end of a row's keys is the start of the next row's
        self._record_part.touch(samples * itemsize, np.minimum(stops, self._count) * itemsize)
        records = self._records[samples]
        _check_rows(self.path, samples, records["label"], records["dense"])
        keys: dict[int, FeatureKeys] = {}
        if self._single:
            values = records["keys"].T.astype(np.int64, order="C")
            missing = np.unpackbits(records["missing"].T, axis=0, count=len(self._single), bitorder="little")
            for i, own, absent in zip(self._single, values, missing.astype(bool), strict=True):
                keys[i] = FeatureKeys.of_ones(own, absent)
        if self._many:
            keys |= self._from_heap(samples, records["start"], records["lengths"].astype(np.int64))
        return ClickRows(
            records["label"].copy(),
            # Always a copy: numpy reports [n, 0] as contiguous whatever its strides, which torch rejects.
            records["dense"].copy(),
            [keys[i] for i in range(len(keys))],
        )

    def _from_heap(
        self,
        samples: npt.NDArray[np.int64],
        start: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.int64],
    ) -> dict[int, FeatureKeys]:
        """Return the keys of the features with many, by number.

        Rows begin at ``start`` [b, 1] and have ``lengths`` [b, features] keys.
        """
        is_last = samples + 1 == self._count
        ends = np.where(is_last, self._heap.size, self._records["start"][samples + ~is_last, 0])
        begins = np.minimum(start, self._heap.size).astype(np.int64)
        stops = begins + np.cumsum(lengths, axis=1)
        fits = (start[:, 0] == begins[:, 0]) & (stops[:, -1] == ends) & ((samples > 0) | (begins[:, 0] == 0))
        if not fits.all() or (stops[:, -1] > self._heap.size).any():
            row = samples[~(fits & (stops[:, -1] <= self._heap.size))][0]
            raise DataError(
                f"packed clicks {self.path} are damaged: row {row} has other keys than lie between it and the next; "
                f"{REPAIR}"
            )
        held = np.flatnonzero(lengths.any(1))
        self._heap_part.touch(begins[held, 0] * 8, stops[held, -1] * 8)
        keys = {}
        for column, i in enumerate(self._many):
            offsets = np.r_[0, np.cumsum(lengths[:, column])]
            values = self._heap[_places(stops[:, column] - lengths[:, column], offsets)]
            keys[i] = FeatureKeys(values.astype(np.int64, copy=False), offsets)
        return keys

    def check(self) -> None:
        """Compare every block with its CRC-32.

        Raises:
            DataError: if a block differs; the message names the first one.
        """
        self._record_part.check()
        self._heap_part.check()

    def fingerprint(self) -> str:
        """Return a digest of the content, for any path of the file."""
        digest = hashlib.sha256(repr((self.schema, self._count, self._records.dtype.descr)).encode())
        digest.update(self._record_part.checksums.tobytes() + self._heap_part.checksums.tobytes())
        return digest.hexdigest()[:16]


def _check_rows(
    path: Path, rows: npt.NDArray[np.int64], labels: npt.NDArray[np.float32], dense: npt.NDArray[np.float32]
) -> None:
    """Raise DataError unless labels are 0 or 1 and numbers are not infinite."""
    good = ((labels == 0) | (labels == 1)) & ~np.isinf(dense).any(1)
    if not good.all():
        i = int(np.flatnonzero(~good)[0])
        raise DataError(
            f"{path}: row {rows[i]} has the label {labels[i]:g} and numbers up to {np.abs(dense[i]).max(initial=0):g}; "
            "expected a label of 0 or 1 and finite numbers, NaN where one is missing"
        )


def _places(begins: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the positions of ranges that begin at ``begins`` and have the lengths of ``offsets``."""
    return np.repeat(begins - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])


def is_packed(path: Path) -> bool:
    """Return whether a file starts with the first bytes of packed clicks."""
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def write_packed(
    path: Path, schema: ClickSchema, blocks: Sequence[ClickRows], key_type: KeyType = "i64"
) -> PackedClicks:
    """Write rows in memory to a packed file and open it.

    Args:
        path: path of the file.
        schema: columns of the rows.
        blocks: rows, one block after the other.
        key_type: type of the keys of single-key features.
    """
    with PackedWriter(path, schema, key_type) as writer:
        for rows in blocks:
            writer.append(rows)
    return PackedClicks(path)
