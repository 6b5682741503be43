"""Conversion of named and typed Arrow columns to rows of clicks: shared by Parquet files and CSV tables.

    column                                   becomes, unless the user names the columns
    ``label`` (or the name given)            label: 0 or 1; anything else, a null too, makes the row malformed
    floating point                           a number, NaN for null
    integer, string, category of these       a feature with one key, none for null
    list of integers or of strings           a feature with many keys

Columns whose type does not decide their use are refused until ``data.dense`` and ``data.sparse`` name the columns:
whole numbers with gaps in floating point, as pandas has ids if one is missing; columns of 0 and 1, which may be a
second label; truth values; a column called weight; a column without a value. Columns I1 to I13 beside C1 to C26 are
Criteo's, whatever their types.

The key of a string is the first 63 bits of its SHA-256; that of an unsigned integer of 64 bits has the same bits.
"""

import hashlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.clicks.malformed import MalformedRows
from shardwise.data.clicks.rows import CRITEO, ClickRows, ClickSchema, FeatureKeys, SparseFeature

_log = logging.getLogger(__name__)

_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")
_SHOWN = 20
"""Number of columns that an error lists."""
_MANY_ROWS = 100
"""Number of rows from which on a column of one value is conclusive."""


def arrow() -> Any:
    """Return the package pyarrow.

    Raises:
        ConfigError: if pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet and CSV need pyarrow, which is not installed: pip install pyarrow"
        ) from error
    return pyarrow


def check_names(path: Path, names: list[str], label: str) -> None:
    """Check that the names of the columns differ and include the label.

    Raises:
        DataError: if a name is there twice, or if the label is missing.
    """
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(f"{path} has more than one column {listed(list(map(repr, twice)))}; rename them")
    if label not in names:
        raise DataError(
            f"{path} has no column {label!r} for the label; its columns are {listed(names)}. data.label names it"
        )


def listed(names: list[str]) -> str:
    """Return the names separated by commas, at most twenty of them and none longer than 40 characters."""
    shown = ", ".join(name if len(name) <= 40 else f"{name[:40]}..." for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def is_criteo(names: list[str]) -> bool:
    """Return whether the columns are Criteo's, by their names."""
    return set(CRITEO.dense) | {feature.name for feature in CRITEO.features} <= set(names)


def infer(path: Path, batch: Any, label: str, tells: bool = True) -> ClickSchema:
    """Return the columns that are numbers and those that are keys, by the types and values of the first rows.

    Args:
        path: path of the file, for errors.
        batch: the first rows.
        label: column of the label.
        tells: True logs the columns of whole numbers that become keys, because an age or a count has that type too.

    Raises:
        DataError: if a type does not decide the use of a column.
    """
    types = arrow().types
    dense: list[str] = []
    features: list[SparseFeature] = []
    whole: list[str] = []
    doubts: list[str] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == label:
            continue
        column = plain(column)
        kind = column.type
        is_many = _is_list(kind)
        inner = kind.value_type if is_many else kind
        if types.is_dictionary(inner):
            inner = inner.value_type
        doubt = "is called as the weights of samples are" if name.lower() in _WEIGHTS else _doubt(column)
        if doubt:
            doubts.append(f"{name!r} {doubt}")
        elif types.is_floating(kind):
            dense.append(name)
        elif types.is_integer(inner) or types.is_string(inner) or types.is_large_string(inner):
            features.append(SparseFeature(name, is_many))
            if types.is_integer(kind):
                whole.append(name)
        else:
            raise DataError(
                f"{path}: column {name!r} has type {kind}; expected floats, integers, strings, or lists of the last "
                "two: drop or cast it"
            )
    if doubts:
        raise DataError(
            f"{path}: column {'; column '.join(doubts)}. Choose the columns: list numbers in data.dense and "
            "keys in data.sparse; columns that neither names are left out"
        )
    if whole and tells:
        _log.warning(
            "data: %s: whole numbers were taken for keys in %s; for numbers were taken %s. Where one of the first "
            "counts or measures something (an age, a price), list numbers in data.dense and keys in data.sparse",
            path.name,
            listed(whole),
            listed(dense) or "none",
        )
    return ClickSchema(tuple(dense), tuple(features))


def _doubt(column: Any) -> str:
    """Return the reason why the type of a column does not decide its use, else an empty string."""
    api = arrow()
    kind = column.type
    if api.types.is_boolean(kind):
        return "holds true and false, as a second label does"
    is_float = api.types.is_floating(kind)
    if not (is_float or api.types.is_integer(kind)):
        return "has no value in the first rows" if len(column) and column.null_count == len(column) else ""
    values = column.drop_null().to_numpy(zero_copy_only=False)
    there = values[~np.isnan(values)] if is_float else values
    if len(column) and not there.size:
        return "has no value in the first rows"
    if is_float:
        has_gaps = there.size < len(column)
        if has_gaps and np.array_equal(there, np.trunc(there)) and np.isfinite(there).all():
            return "holds whole numbers with gaps as floating point, as ids do where one is missing"
        return ""
    found = np.unique(there)
    if not np.isin(found, (0, 1)).all() or (found.size < 2 and len(column) < _MANY_ROWS):
        return ""
    return f"holds {' and '.join(map(str, found.tolist()))} alone, as a second label does"


def row_of(
    batch: Any,
    schema: ClickSchema,
    label: str,
    path: Path,
    numbers: npt.NDArray[np.int64],
    malformed: MalformedRows,
) -> ClickRows:
    """Convert a batch to rows.

    Args:
        batch: the columns.
        schema: their use.
        label: column of the label.
        path: path of the file, for errors.
        numbers: number of each row in the file, for errors.
        malformed: counts the rows that cannot be read.
    """
    labels = _numbers(batch.column(label), path, label)
    dense = [_numbers(batch.column(name), path, name) for name in schema.dense]
    good = (labels == 0) | (labels == 1)
    for row in np.flatnonzero(~good).tolist():
        malformed.skip(f"{path}: row {numbers[row]}", f"the label is {labels[row]:g}; expected 0 or 1")
    for name, column in zip(schema.dense, dense, strict=True):
        for row in np.flatnonzero(good & np.isinf(column)).tolist():
            malformed.skip(f"{path}: row {numbers[row]}", f"{name} is {column[row]:g}; expected a number")
            good[row] = False
    if not good.all():
        batch = batch.filter(arrow().array(good))
        labels, dense = labels[good], [column[good] for column in dense]
    return ClickRows(
        labels,
        np.stack(dense, axis=1) if dense else np.empty((labels.size, 0), np.float32),
        [_keys(batch.column(feature.name), feature, path) for feature in schema.features],
    )


def plain(column: Any) -> Any:
    """Return a column of lists of a fixed size as lists; other columns are returned unchanged."""
    api = arrow()
    if api.types.is_fixed_size_list(column.type):
        return column.cast(api.list_(column.type.value_type))
    return column


def _is_list(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def lists_in(schema: Any) -> set[str]:
    """Return the names of the columns that are lists."""
    return {field.name for field in schema if _is_list(field.type)}


def _numbers(column: Any, path: Path, name: str) -> npt.NDArray[np.float32]:
    api = arrow()
    kind = column.type
    try:
        if api.types.is_dictionary(kind):
            column = column.dictionary_decode()
        if api.types.is_boolean(column.type):
            column = column.cast(api.uint8())
        values = column.cast(api.float64()).to_numpy(zero_copy_only=False)
    except api.ArrowException as error:
        raise DataError(f"{path}: column {name!r} of type {kind} holds no numbers ({error})") from error
    with np.errstate(over="ignore"):  # too large for fp32 becomes infinite, which makes the row malformed
        return values.astype(np.float32)  # type: ignore[no-any-return]


def _keys(column: Any, feature: SparseFeature, path: Path) -> FeatureKeys:
    column = plain(column)
    if not feature.many:
        missing = column.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
        return FeatureKeys.of_ones(_integers(column, path, feature.name), missing)
    if not _is_list(column.type):
        raise DataError(f"{path}: column {feature.name!r} of type {column.type} is no list of keys")
    lengths = arrow().compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    values = column.flatten()
    if values.null_count:
        raise DataError(
            f"{path}: column {feature.name!r} has nulls inside its lists; leave them out of the lists"
        )
    return FeatureKeys(_integers(values, path, feature.name), np.r_[0, np.cumsum(lengths, dtype=np.int64)])


def _integers(column: Any, path: Path, name: str) -> npt.NDArray[np.int64]:
    api = arrow()
    types = api.types
    kind = column.type
    if types.is_dictionary(kind):
        keys = _integers(column.dictionary, path, name)
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return keys[places] if keys.size else np.zeros(places.size, np.int64)
    if types.is_string(kind) or types.is_large_string(kind):
        encoded = column.dictionary_encode()
        keys = np.asarray([key_of_text(text) for text in encoded.dictionary.to_pylist()], np.int64)
        places = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return keys[places] if keys.size else np.zeros(places.size, np.int64)
    try:
        if types.is_uint64(kind):
            return np.array(column.fill_null(0).to_numpy(zero_copy_only=False)).view(np.int64)
        if types.is_boolean(kind):
            column = column.cast(api.uint8())
        elif types.is_floating(kind):
            column = api.compute.if_else(column.is_null(nan_is_null=True), 0, column)
        filled = column.fill_null(0).cast(api.int64()).to_numpy(zero_copy_only=False)
    except api.ArrowException as error:
        raise DataError(
            f"{path}: column {name!r} of type {kind} holds no keys of 64 bits ({error})"
        ) from error
    return np.array(filled, np.int64)


def key_of_text(text: str) -> int:
    """Return the key of a category given as text; the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
