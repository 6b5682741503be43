"""Click logs in Parquet files.

    column                                   becomes
    ``label`` (or the name given)            label: 0 or 1; anything else, a null too, makes the row malformed
    floating point                           a number, NaN where null
    integer, string                          a feature with one key, none where null
    list of integers or of strings           a feature with many keys

Columns I1 to I13 beside C1 to C26 are Criteo's, whatever their types; other assignments are given by a ``Schema``.
A string becomes the key that the first 63 bits of its SHA-256 are. Memory: one batch of rows.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.clicks.malformed import Malformed
from shardwise.data.clicks.rows import CRITEO, Feature, Keys, Rows, Schema
from shardwise.plan.errors import ConfigError, DataError

_ROWS_AT_ONCE = 1 << 15
MAGIC = b"PAR1"


def parquet_schema(path: Path, label: str = "label", given: Schema | None = None) -> Schema:
    """Which columns of a file are numbers and which are keys: by type, or as given, where types say which are lists."""
    types = _arrow().types
    fields = {field.name: field.type for field in _open(path).schema_arrow}
    if label not in fields:
        raise DataError(f"{path} has no column {label!r} for the label; its columns are {', '.join(fields)}")
    if given is not None:
        lists = {name for name, kind in fields.items() if types.is_list(kind) or types.is_large_list(kind)}
        return Schema(given.dense, tuple(Feature(f.name, f.name in lists) for f in given.features))
    if set(CRITEO.dense) | {feature.name for feature in CRITEO.features} <= fields.keys():
        return CRITEO
    dense: list[str] = []
    features: list[Feature] = []
    for name, kind in fields.items():
        is_list = types.is_list(kind) or types.is_large_list(kind)
        inner = kind.value_type if is_list else kind
        if name == label:
            continue
        if types.is_floating(kind):
            dense.append(name)
        elif types.is_integer(inner) or types.is_string(inner) or types.is_large_string(inner):
            features.append(Feature(name, is_list))
        else:
            raise DataError(
                f"{path}: column {name!r} has type {kind}; expected floats, integers, strings, or lists of the last "
                "two: drop or cast it"
            )
    return Schema(tuple(dense), tuple(features))


def read_parquet(
    path: Path,
    schema: Schema,
    malformed: Malformed,
    label: str = "label",
    progress: Callable[[int], None] | None = None,
) -> Iterator[Rows]:
    """The rows of one file in its order, some thousands at a time; ``progress`` gets about the bytes of the file."""
    file = _open(path)
    names = [label, *schema.dense, *(feature.name for feature in schema.features)]
    if absent := [name for name in names if name not in file.schema_arrow.names]:
        raise DataError(
            f"{path} has no column {', '.join(absent)}; its columns are {', '.join(file.schema_arrow.names)}"
        )
    total, size_bytes = max(file.metadata.num_rows, 1), path.stat().st_size
    first_row = 0
    try:
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names):
            yield _rows(batch, schema, label, path, first_row, malformed)
            first_row += batch.num_rows
            if progress is not None:
                progress(size_bytes * batch.num_rows // total)
    except (OSError, _arrow().ArrowException) as error:
        raise DataError(f"Parquet file {path} cannot be read behind row {first_row} ({error})") from error


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow, which is not installed: pip install pyarrow") from error
    return pyarrow


def _open(path: Path) -> Any:
    arrow = _arrow()
    try:
        return arrow.parquet.ParquetFile(path)
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as a Parquet file ({error})") from error


def _rows(batch: Any, schema: Schema, label: str, path: Path, first_row: int, malformed: Malformed) -> Rows:
    labels = _numbers(batch.column(label), path, label)
    dense = [_numbers(batch.column(name), path, name) for name in schema.dense]
    good = (labels == 0) | (labels == 1)
    for row in np.flatnonzero(~good).tolist():
        malformed.skip(f"{path}: row {first_row + row}", f"the label is {labels[row]:g}; expected 0 or 1")
    for name, column in zip(schema.dense, dense, strict=True):
        for row in np.flatnonzero(good & np.isinf(column)).tolist():
            malformed.skip(f"{path}: row {first_row + row}", f"{name} is {column[row]:g}; expected a number")
            good[row] = False
    if not good.all():
        batch = batch.filter(_arrow().array(good))
        labels, dense = labels[good], [column[good] for column in dense]
    return Rows(
        labels,
        np.stack(dense, axis=1) if dense else np.empty((labels.size, 0), np.float32),
        [_keys(batch.column(feature.name), feature, path) for feature in schema.features],
    )


def _numbers(column: Any, path: Path, name: str) -> npt.NDArray[np.float32]:
    arrow = _arrow()
    try:
        values = column.cast(arrow.float64()).to_numpy(zero_copy_only=False)
    except arrow.ArrowException as error:
        raise DataError(
            f"{path}: column {name!r} of type {column.type} holds no numbers ({error})"
        ) from error
    with np.errstate(over="ignore"):  # beyond fp32: infinite, which makes the row malformed
        return values.astype(np.float32)  # type: ignore[no-any-return]


def _keys(column: Any, feature: Feature, path: Path) -> Keys:
    arrow = _arrow()
    if not feature.many:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        return Keys.of_ones(_integers(column, path, feature.name), missing)
    if not (arrow.types.is_list(column.type) or arrow.types.is_large_list(column.type)):
        raise DataError(f"{path}: column {feature.name!r} of type {column.type} is no list of keys")
    lengths = arrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    values = column.flatten()
    if values.null_count:
        raise DataError(
            f"{path}: column {feature.name!r} has nulls inside its lists; leave them out of the lists"
        )
    return Keys(_integers(values, path, feature.name), np.r_[0, np.cumsum(lengths, dtype=np.int64)])


def _integers(column: Any, path: Path, name: str) -> npt.NDArray[np.int64]:
    arrow = _arrow()
    types = arrow.types
    if types.is_string(column.type) or types.is_large_string(column.type):
        encoded = column.dictionary_encode()
        keys = np.asarray([key_of_text(text) for text in encoded.dictionary.to_pylist()], np.int64)
        places = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return keys[places] if keys.size else np.zeros(places.size, np.int64)
    try:
        filled = column.fill_null(0).cast(arrow.int64()).to_numpy(zero_copy_only=False)
    except arrow.ArrowException as error:
        raise DataError(
            f"{path}: column {name!r} of type {column.type} holds no keys of 64 bits ({error})"
        ) from error
    return np.array(filled, np.int64)


def key_of_text(text: str) -> int:
    """The key of a category given as text: the same everywhere."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
