"""Click logs as text with a header: CSV, TSV, plain or gzip.

    user,age,city,label                the first line names the columns; quotes as in RFC 4180, within one line
    17,34,Rome,1                       an empty field is missing

columns.py defines the use of each column. If the user names no columns, the texts of the first rows decide: numbers
with a point or an exponent are numbers, all else are keys. A key that is a whole number in its plain form (7 or, as
pandas writes it beside gaps, 7.0), of 64 bits, is that number; any other text is the first 63 bits of its SHA-256. A
field that should be a number and is none makes its row malformed, and so does another number of fields. A quote that
does not close in its line makes all lines up to the one in which it closes malformed (whole_rows.py). Memory: one batch
of rows.
"""

import csv
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import DataError
from shardwise.data.clicks.columns import arrow, check_names, infer, is_criteo, key_of_text, listed, row_of
from shardwise.data.clicks.malformed import MalformedRows
from shardwise.data.clicks.rows import CRITEO, ClickRows, ClickSchema, SparseFeature
from shardwise.data.clicks.whole_rows import WholeRows, opened_text

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Separator by the ending of a file's name, before .gz."""
_PIECE_BYTES = 1 << 22
_COLUMN_LIMIT = 20_000
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_MOST = 1 << 63


def separator_of(path: Path, given: str | None) -> str | None:
    """Return the separator of the fields of a file; None if the file's name is not that of a table."""
    name = Path(path.stem) if path.suffix == ".gz" else path
    return given or SEPARATORS.get(name.suffix.lower())


def csv_schema(
    path: Path, separator: str, label: str = "label", given: ClickSchema | None = None, tells: bool = True
) -> ClickSchema:
    """Return the columns of a file that are numbers and those that are keys.

    Args:
        path: path of the file.
        separator: character between two fields.
        label: column of the label.
        given: columns that the user named; None decides by the texts of the first rows.
        tells: True logs columns of whole numbers that become keys.

    Raises:
        DataError: if the texts of a column do not decide its use.
    """
    names = _header(path, separator)
    check_names(path, names, label)
    if given is not None:
        return ClickSchema(given.dense, tuple(SparseFeature(f.name) for f in given.features))
    if is_criteo(names):
        return CRITEO
    first = next(_batches(path, separator, names, names, [], lambda line, reason: None), None)
    if first is None:
        raise DataError(f"{path} has a header and no rows")
    api = arrow()
    columns = [_typed(column) for column in first.columns]
    return infer(path, api.RecordBatch.from_arrays(columns, names=names), label, tells)


def read_csv(
    path: Path,
    separator: str,
    schema: ClickSchema,
    malformed: MalformedRows,
    label: str = "label",
    progress: Callable[[int], None] | None = None,
) -> Iterator[ClickRows]:
    """Yield the rows of one file in its order, some thousands at a time.

    Args:
        path: path of the file.
        separator: character between two fields.
        schema: the columns to read.
        malformed: counts the rows that cannot be read.
        label: column of the label.
        progress: called with the number of bytes of text just read.

    Raises:
        DataError: if the file cannot be read or lacks a column, or if too many rows are malformed.
    """
    api = arrow()
    names = _header(path, separator)
    check_names(path, names, label)
    wanted = [label, *schema.dense, *(feature.name for feature in schema.features)]
    known = set(names)
    if absent := [name for name in wanted if name not in known]:
        raise DataError(f"{path} has no column {listed(absent)}; its columns are {listed(names)}")
    first_row, skipped = 0, 0
    bad_lines: list[str] = []

    def skip(line: int, reason: str) -> None:
        malformed.skip(f"{path}: line {line}", reason)

    for batch in _batches(path, separator, names, wanted, bad_lines, skip, progress):
        for reason in bad_lines[skipped:]:
            malformed.skip(f"{path}", reason)
        skipped = len(bad_lines)
        numbers = np.arange(first_row, first_row + batch.num_rows)
        first_row += batch.num_rows
        good = np.ones(batch.num_rows, bool)
        columns: list[Any] = []
        for name in wanted[: 1 + len(schema.dense)]:
            column, bad = _as_numbers(batch.column(name))
            columns.append(column)
            for row in np.flatnonzero(bad & good).tolist():
                text = str(batch.column(name)[row])
                what = "the label" if name == label else name
                malformed.skip(f"{path}: row {numbers[row]}", f"{what} is {text[:40]!r}; expected a number")
            good &= ~bad
        columns += [_as_keys(batch.column(feature.name)) for feature in schema.features]
        typed = api.RecordBatch.from_arrays(columns, names=wanted)
        if not good.all():
            typed, numbers = typed.filter(api.array(good)), numbers[good]
        yield row_of(typed, schema, label, path, numbers, malformed)
    for reason in bad_lines[skipped:]:
        malformed.skip(f"{path}", reason)


def _header(path: Path, separator: str) -> list[str]:
    """Return the names of the columns, or raise DataError if the first line names none."""
    try:
        with opened_text(path) as file:
            line = file.readline(_PIECE_BYTES)
        names = next(csv.reader(io.StringIO(line.decode("utf-8-sig")), delimiter=separator), [])
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"click log {path} cannot be read ({reason})") from error
    if any(not name or not name.isprintable() for name in names) or not names:
        raise DataError(f"{path}: the first line does not name every column; expected a header")
    if len(names) > _COLUMN_LIMIT:
        raise DataError(
            f"{path} has {len(names)} columns, and at most {_COLUMN_LIMIT} are read; is it a click log?"
        )
    if all(re.fullmatch(_NUMBER, name) for name in names):
        raise DataError(
            f"{path}: the first line holds numbers; expected a header with the names of the columns"
        )
    return names


def _batches(
    path: Path,
    separator: str,
    names: list[str],
    wanted: list[str],
    bad_lines: list[str],
    skip: Callable[[int, str], None],
    progress: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """Yield batches of texts, null for empty fields.

    ``bad_lines`` receives a sentence for each line with another number of fields; ``skip`` is called with number and
    reason for each line that a quote joins to another.
    """
    api = arrow()

    def wrong(row: Any) -> str:
        bad_lines.append(f"{row.actual_columns} fields in {str(row.text)[:40]!r}; expected {len(names)}")
        return "skip"

    read = api.csv.ReadOptions(use_threads=False, block_size=_PIECE_BYTES)
    parse = api.csv.ParseOptions(delimiter=separator, invalid_row_handler=wrong)
    convert = api.csv.ConvertOptions(
        include_columns=wanted,
        column_types={name: api.string() for name in names},
        null_values=[""],
        strings_can_be_null=True,
    )
    try:
        with opened_text(path) as file:
            rows = WholeRows(file, path, separator, len(names), skip, progress)
            reader = api.csv.open_csv(rows, read_options=read, parse_options=parse, convert_options=convert)
            yield from reader
    except (OSError, EOFError, zlib.error, api.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"click log {path} cannot be read ({reason})") from error


def _as_numbers(column: Any) -> tuple[Any, npt.NDArray[np.bool_]]:
    """Return a column as fp64, null for fields that are empty or no number, and a mask of the latter."""
    api = arrow()
    fits = api.compute.match_substring_regex(column, _NUMBER)
    bad = api.compute.invert(fits.fill_null(True)).to_numpy(zero_copy_only=False)
    column = api.compute.if_else(fits.fill_null(False), column, None)
    signless = api.compute.replace_substring_regex(column, r"^\+", "")
    return signless.cast(api.float64()), bad


def _as_keys(column: Any) -> Any:
    """Return a column of texts as int64 keys, null for empty fields."""
    api = arrow()
    encoded = column.dictionary_encode()
    keys = np.asarray([_key(text) for text in encoded.dictionary.to_pylist()], np.int64)
    return api.DictionaryArray.from_arrays(encoded.indices, api.array(keys)).dictionary_decode()


def _key(text: str) -> int:
    number = text.removesuffix(".0")
    return int(number) if _is_whole(number) else key_of_text(text)


def _is_whole(text: str) -> bool:
    return _WHOLE.fullmatch(text) is not None and -_MOST <= int(text) < _MOST


def _typed(column: Any) -> Any:
    """Return a column of texts with the type of all of them: whole numbers, numbers, or texts."""
    api = arrow()
    texts = column.drop_null().to_pylist()
    if texts and all(map(_is_whole, texts)):
        return column.cast(api.int64())
    numbers, bad = _as_numbers(column)
    # Whole numbers in another form, such as 007, are codes.
    is_number = texts and not bad.any() and any(not text.lstrip("+-").isdigit() for text in texts)
    return numbers if is_number else column
