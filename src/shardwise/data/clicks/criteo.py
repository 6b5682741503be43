"""Criteo's click logs: tab-separated text, plain or gzip.

    label  I1 ... I13  C1 ... C26          0 or 1, whole numbers (may be negative), up to 8 hexadecimal digits

Any number or category may be empty: missing. Decimal numbers are accepted too; other content makes a row malformed.

A piece of text is read whole lines at a time, by a compiled loop, or without numba by numpy with equal results: the
tabs of all lines are found at once, then digit k of all fields is added to all values, k = 0, 1, ... A line that does
not fit is parsed again in Python, which either reads its values or returns the reason why it is malformed.
Cost: with packing (packed.py) 160 MB of text a second, by numpy 65, on one core; memory some 5 times the piece.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import DataError
from shardwise.data.clicks.malformed import MalformedRows
from shardwise.data.clicks.rows import CRITEO, ClickRows, FeatureKeys
from shardwise.data.clicks.whole_rows import opened_text
from shardwise.kernels.tables.compiled import is_installed, loop

_PIECE_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 16
_DENSE, _SPARSE = len(CRITEO.dense), len(CRITEO.features)
_NUMBERS = 1 + _DENSE
_COLUMNS = _NUMBERS + _SPARSE
_HEX_DIGITS = 8
_NUMBER_DIGITS = 15
"""Largest number of digits of a whole number in the fast paths, because fp64 holds these numbers exactly."""
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_LARGEST = float(np.finfo(np.float32).max)
_TAB, _LINE_END, _RETURN, _MINUS, _ZERO = (ord(c) for c in "\t\n\r-0")
_HEX = np.full(256, 255, np.uint8)
for _digit in b"0123456789abcdefABCDEF":
    _HEX[_digit] = int(chr(_digit), 16)

_GOOD, _EMPTY, _DOUBTFUL = 0, 1, 2
"""Kinds of a line: a row, nothing, or to be parsed in Python."""

_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


class _FieldPositions(NamedTuple):
    """Positions of the fields of some lines in a text: [lines, columns] each."""

    left: _Ints
    length: _Ints


class _ParsedLines(NamedTuple):
    """Lines of a text with the values of their fields; fields of lines that are not good may have any value."""

    starts: _Ints
    stops: _Ints
    kinds: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.float64]
    """Label and numbers, NaN if empty: [lines, 14]."""
    keys: _Ints
    """Keys, 0 if empty: [lines, 26]."""
    missing: npt.NDArray[np.bool_]
    """True if a key is empty: [lines, 26]."""

    @classmethod
    def of(cls, count: int) -> "_ParsedLines":
        """Return arrays of zeros for ``count`` lines."""
        return cls(
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(count, np.uint8),
            np.zeros((count, _NUMBERS)),
            np.zeros((count, _SPARSE), np.int64),
            np.zeros((count, _SPARSE), bool),
        )


def read_criteo(
    path: Path, malformed: MalformedRows, progress: Callable[[int], None] | None = None
) -> Iterator[ClickRows]:
    """Yield the rows of one file in its order, some thousands at a time.

    Args:
        path: path of the log.
        malformed: counts the rows that cannot be read.
        progress: called with the number of bytes of text just read.

    Raises:
        DataError: if the file cannot be read, or if too many rows are malformed.
    """
    line = 1
    for text in whole_lines(path):
        piece = np.frombuffer(text, np.uint8)
        yield _parse(piece, path, line, malformed)
        line += int(np.count_nonzero(piece == _LINE_END))
        if progress is not None:
            progress(len(text))


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the text of a file in pieces that end with a line.

    Raises:
        DataError: if the file cannot be read, or if a line is too long.
    """
    rest = b""
    try:
        with opened_text(path) as file:
            while read := file.read(_PIECE_BYTES):
                cut = read.rfind(b"\n") + 1
                if not cut:
                    rest += read
                    if len(rest) > _LONGEST_LINE_BYTES + _PIECE_BYTES:
                        raise DataError(
                            f"{path} has a line of more than {len(rest)} bytes; expected tab-separated rows of "
                            f"{_COLUMNS} columns"
                        )
                    continue
                yield rest + read[:cut]
                rest = read[cut:]
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"click log {path} cannot be read ({reason})") from error
    if rest:
        yield rest + b"\n"


def is_criteo_line(text: bytes) -> bool:
    """Return whether the first line of a text is one of Criteo's: 40 fields between tabs, the first of them 0 or 1."""
    fields = text.split(b"\n", 1)[0].split(b"\t")
    return len(fields) == _COLUMNS and fields[0] in (b"0", b"1")


def _parse(text: _Bytes, path: Path, first_line: int, malformed: MalformedRows) -> ClickRows:
    lines = _by_loop(text) if is_installed() else _by_numpy(text)
    for i in np.flatnonzero(lines.kinds == _DOUBTFUL).tolist():
        reason = _by_hand(text[lines.starts[i] : lines.stops[i]].tobytes(), lines, i)
        if reason:
            malformed.skip(f"{path}:{first_line + i}", reason)
        else:
            lines.kinds[i] = _GOOD
    good = lines.kinds == _GOOD
    keys, missing = (np.ascontiguousarray(each[good].T) for each in (lines.keys, lines.missing))
    return ClickRows(
        lines.numbers[good, 0].astype(np.float32),
        lines.numbers[good, 1:].astype(np.float32),
        [FeatureKeys.of_ones(own, absent) for own, absent in zip(keys, missing, strict=True)],
    )


def _by_loop(text: _Bytes) -> _ParsedLines:
    lines = _ParsedLines.of(int(np.count_nonzero(text == _LINE_END)))
    _scan(text, _HEX, *lines)
    return lines


@loop
def _scan(
    text: Any, hexadecimal: Any, starts: Any, stops: Any, kinds: Any, numbers: Any, keys: Any, missing: Any
) -> None:
    """Parse the text in one pass over its bytes; a field ends at a tab or at the end of its line."""
    at = 0
    for i in range(starts.size):
        starts[i] = at
        column = 0
        doubtful = False
        while True:
            value, length, negative = 0, 0, False
            while text[at] != _TAB and text[at] != _LINE_END:
                byte = text[at]
                if byte == _RETURN and text[at + 1] == _LINE_END:
                    at += 1
                    break
                if column < _NUMBERS:
                    if byte == _MINUS and length == 0 and not negative:
                        negative = True
                        at += 1
                        continue
                    digit = byte - _ZERO
                    doubtful |= digit < 0 or digit > 9 or length >= _NUMBER_DIGITS
                    value = value * 10 + digit
                else:
                    digit = hexadecimal[byte]
                    doubtful |= digit == 255 or length >= _HEX_DIGITS
                    value = value << 4 | digit
                length += 1
                at += 1
            if column < _NUMBERS:
                doubtful |= negative and length == 0
                numbers[i, column] = np.nan if length == 0 else (-value if negative else value)
            elif column < _COLUMNS:
                keys[i, column - _NUMBERS] = value
                missing[i, column - _NUMBERS] = length == 0
            column += 1
            at += 1
            if text[at - 1] == _LINE_END:
                break
        stops[i] = at - 1
        if stops[i] > starts[i] and text[stops[i] - 1] == _RETURN:
            stops[i] -= 1
        label = numbers[i, 0]
        if stops[i] == starts[i]:
            kinds[i] = _EMPTY
        elif doubtful or column != _COLUMNS or not (label == 0 or label == 1):
            kinds[i] = _DOUBTFUL


def _by_numpy(text: _Bytes) -> _ParsedLines:
    ends = np.flatnonzero(text == _LINE_END)
    lines = _ParsedLines.of(ends.size)
    lines.starts[1:] = ends[:-1] + 1
    starts = lines.starts
    lines.stops[:] = ends - ((ends > starts) & (text[ends - 1] == _RETURN))
    tabs = np.flatnonzero(text == _TAB)
    first_tab: _Ints = np.searchsorted(tabs, starts)
    count = np.searchsorted(tabs, ends) - first_tab
    whole = count == _COLUMNS - 1
    inner = tabs[first_tab[whole][:, None] + np.arange(_COLUMNS - 1)]
    left = np.concatenate([starts[whole][:, None], inner + 1], axis=1)
    length = np.concatenate([inner, lines.stops[whole][:, None]], axis=1) - left
    numbers, bad_numbers = _whole_numbers(text, _FieldPositions(left[:, :_NUMBERS], length[:, :_NUMBERS]))
    keys, bad_keys = _hexadecimal(text, _FieldPositions(left[:, _NUMBERS:], length[:, _NUMBERS:]))
    lines.numbers[whole], lines.keys[whole] = numbers, keys
    lines.missing[whole] = length[:, _NUMBERS:] == 0
    label = numbers[:, 0]
    doubtful = bad_numbers.any(1) | bad_keys.any(1) | ((label != 0) & (label != 1))
    lines.kinds[:] = _DOUBTFUL
    lines.kinds[whole] = np.where(doubtful, _DOUBTFUL, _GOOD)
    lines.kinds[lines.stops == starts] = _EMPTY
    return lines


def _whole_numbers(
    text: _Bytes, fields: _FieldPositions
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return values, NaN if empty, and a mask of the fields that are no whole number."""
    left, length = fields
    is_negative = (length > 0) & (text[np.minimum(left, text.size - 1)] == _MINUS)
    left, digits = left + is_negative, length - is_negative
    value = np.zeros(left.shape, np.int64)
    bad = (is_negative & (digits == 0)) | (digits > _NUMBER_DIGITS)
    for k in range(min(int(digits.max(initial=0)), _NUMBER_DIGITS)):
        there = k < digits
        digit = text[np.where(there, left + k, 0)] - np.uint8(_ZERO)  # bytes below "0" wrap to above 9
        bad |= there & (digit > 9)
        value = np.where(there, value * 10 + digit, value)
    signed = np.where(is_negative, -value, value).astype(np.float64)
    return np.where(length == 0, np.nan, signed), bad


def _hexadecimal(text: _Bytes, fields: _FieldPositions) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Return keys, 0 if empty, and a mask of the fields that are not hexadecimal."""
    left, length = fields
    value = np.zeros(left.shape, np.int64)
    bad = length > _HEX_DIGITS
    for k in range(_HEX_DIGITS):
        there = k < length
        digit = _HEX[text[np.where(there, left + k, 0)]]
        bad |= there & (digit == 255)
        value = np.where(there, value << 4 | digit, value)
    return value, bad


def _by_hand(line: bytes, lines: _ParsedLines, i: int) -> str:
    """Parse one line into line i of ``lines``; return the reason if it is malformed, else an empty string."""
    parts = line.decode("utf-8", "replace").split("\t")
    if len(parts) != _COLUMNS:
        return (
            f"{len(parts)} columns; expected {_COLUMNS} between tabs: a label, {_DENSE} numbers, {_SPARSE} keys. Text "
            "with a header ends in .csv or .tsv, or has data.separator"
        )
    if parts[0] not in ("0", "1"):
        is_header = parts[0].isidentifier() and len(parts[0]) > 1
        hint = "; text with a header ends in .csv or .tsv, or has data.separator" if is_header else ""
        return f"the label is {_shown(parts[0])}; expected 0 or 1{hint}"
    lines.numbers[i, 0] = float(parts[0])
    for c, part in enumerate(parts[1:_NUMBERS]):
        number = _number(part)
        if number is None:
            return f"{CRITEO.dense[c]} is {_shown(part)}; expected a number of fp32, or nothing where it is missing"
        lines.numbers[i, 1 + c] = number
    for c, part in enumerate(parts[_NUMBERS:]):
        if len(part) > _HEX_DIGITS or not all(_HEX[min(ord(each), 255)] < 16 for each in part):
            return (
                f"{CRITEO.features[c].name} is {_shown(part)}; expected up to {_HEX_DIGITS} hexadecimal digits, or "
                "nothing where it is missing"
            )
        lines.keys[i, c], lines.missing[i, c] = int(part or "0", 16), not part
    return ""


def _number(text: str) -> float | None:
    if not text:
        return math.nan
    if not _NUMBER.fullmatch(text):  # float() also accepts digits of any script, underscores and spaces
        return None
    value = float(text)
    return value if abs(value) <= _LARGEST else None


def _shown(text: Any) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
