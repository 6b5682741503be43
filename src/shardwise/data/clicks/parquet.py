"""Click logs in Parquet files; columns.py defines the use of each column. Memory: one batch of rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import DataError
from shardwise.data.clicks.columns import arrow, check_names, infer, is_criteo, lists_in, row_of
from shardwise.data.clicks.malformed import MalformedRows
from shardwise.data.clicks.rows import CRITEO, ClickRows, ClickSchema, SparseFeature

_ROWS_AT_ONCE = 1 << 15
MAGIC = b"PAR1"


def parquet_schema(
    path: Path, label: str = "label", given: ClickSchema | None = None, tells: bool = True
) -> ClickSchema:
    """Return the columns of a file that are numbers and those that are keys.

    Args:
        path: path of the file.
        label: column of the label.
        given: columns that the user named, of which types decide which are lists; None decides by type.
        tells: True logs columns of whole numbers that become keys.

    Raises:
        DataError: if a type does not decide the use of a column.
    """
    file = _open(path)
    names = file.schema_arrow.names
    check_names(path, names, label)
    if given is not None:
        lists = lists_in(file.schema_arrow)
        return ClickSchema(given.dense, tuple(SparseFeature(f.name, f.name in lists) for f in given.features))
    if is_criteo(names):
        return CRITEO
    try:
        first = next(file.iter_batches(_ROWS_AT_ONCE), None)
    except (OSError, arrow().ArrowException) as error:
        raise DataError(f"Parquet file {path} cannot be read ({error})") from error
    if first is None:
        first = arrow().RecordBatch.from_pylist([], file.schema_arrow)
    return infer(path, first, label, tells)


def read_parquet(
    path: Path,
    schema: ClickSchema,
    malformed: MalformedRows,
    label: str = "label",
    progress: Callable[[int], None] | None = None,
) -> Iterator[ClickRows]:
    """Yield the rows of one file in its order, some thousands at a time.

    Args:
        path: path of the file.
        schema: the columns to read.
        malformed: counts the rows that cannot be read.
        label: column of the label.
        progress: called with the approximate number of bytes of the file just read.

    Raises:
        DataError: if the file cannot be read or lacks a column, or if too many rows are malformed.
    """
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
            numbers = np.arange(first_row, first_row + batch.num_rows)
            yield row_of(batch, schema, label, path, numbers, malformed)
            first_row += batch.num_rows
            if progress is not None:
                progress(size_bytes * batch.num_rows // total)
    except (OSError, arrow().ArrowException) as error:
        raise DataError(f"Parquet file {path} cannot be read behind row {first_row} ({error})") from error


def _open(path: Path) -> Any:
    api = arrow()
    try:
        return api.parquet.ParquetFile(path)
    except (OSError, api.ArrowException) as error:
        raise DataError(f"{path} cannot be read as a Parquet file ({error})") from error
