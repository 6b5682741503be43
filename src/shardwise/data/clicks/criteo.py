"""Criteo's click logs: tab-separated text, plain or gzip.

    label  I1 ... I13  C1 ... C26          0 or 1, whole numbers (may be negative), up to 8 hexadecimal digits

Any number or category may be empty: missing. Decimal numbers are taken too; other content makes a row malformed.

A piece of text is read whole lines at a time and parsed column-wise: the tabs of all lines are found at once, then
digit k of all fields is added to all values, k = 0, 1, ... A line that does not fit is read again by hand, which
either finds what it means or says what is wrong with it.
Cost: about 25 ns a byte, memory some 100 times the piece's number of rows in bytes and the piece itself.
"""

import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.data.clicks.malformed import Malformed
from shardwise.data.clicks.rows import CRITEO, Keys, Rows
from shardwise.plan.errors import DataError

_PIECE_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 16
_DENSE, _SPARSE = len(CRITEO.dense), len(CRITEO.features)
_COLUMNS = 1 + _DENSE + _SPARSE
_HEX_DIGITS = 8
_NUMBER_DIGITS = 15
"""Longer whole numbers are read by hand: fp64 holds these exactly."""
_TAB, _LINE_END, _RETURN, _MINUS, _ZERO = (ord(c) for c in "\t\n\r-0")
_HEX = np.full(256, 255, np.uint8)
for _digit in b"0123456789abcdefABCDEF":
    _HEX[_digit] = int(chr(_digit), 16)

_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


class _Fields(NamedTuple):
    """Where the fields of some lines lie in a text: [lines, columns] each."""

    left: _Ints
    length: _Ints


class _Parsed(NamedTuple):
    """Values of whole lines: labels [n], numbers [n, 13] with NaN, keys [n, 26] with what is missing, doubts [n]."""

    labels: npt.NDArray[np.float64]
    dense: npt.NDArray[np.float64]
    keys: _Ints
    missing: npt.NDArray[np.bool_]
    doubtful: npt.NDArray[np.bool_]


def read_criteo(
    path: Path, malformed: Malformed, progress: Callable[[int], None] | None = None
) -> Iterator[Rows]:
    """The rows of one file in its order, some thousands at a time; ``progress`` gets the bytes of text read."""
    line = 1
    for text in _whole_lines(path):
        piece = np.frombuffer(text, np.uint8)
        yield _parse(piece, path, line, malformed)
        line += int(np.count_nonzero(piece == _LINE_END))
        if progress is not None:
            progress(len(text))


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The text in pieces that end with a line."""
    rest = b""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
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


def _parse(text: _Bytes, path: Path, first_line: int, malformed: Malformed) -> Rows:
    ends = np.flatnonzero(text == _LINE_END)
    starts: _Ints = np.r_[0, ends[:-1] + 1]
    stops = ends - ((ends > starts) & (text[ends - 1] == _RETURN))
    tabs = np.flatnonzero(text == _TAB)
    first_tab = np.searchsorted(tabs, starts)
    count = np.searchsorted(tabs, ends) - first_tab
    has_columns = count == _COLUMNS - 1
    inner = tabs[first_tab[has_columns][:, None] + np.arange(_COLUMNS - 1)]
    left = np.concatenate([starts[has_columns][:, None], inner + 1], axis=1)
    right = np.concatenate([inner, stops[has_columns][:, None]], axis=1)
    parsed = _values(text, _Fields(left, right - left))
    lines = np.flatnonzero(has_columns)
    keep = np.ones(lines.size, bool)
    wrong = np.flatnonzero(~has_columns & (stops > starts))  # empty lines say nothing
    doubts: list[tuple[int, int]] = sorted(
        [(int(i), -1) for i in wrong]
        + [(int(lines[row]), int(row)) for row in np.flatnonzero(parsed.doubtful)]
    )
    for i, row in doubts:
        reason = _by_hand(text[starts[i] : stops[i]].tobytes(), parsed, row)
        if reason:
            malformed.skip(f"{path}:{first_line + i}", reason)
            if row >= 0:
                keep[row] = False
    keys, missing = parsed.keys[keep], parsed.missing[keep]
    return Rows(
        parsed.labels[keep].astype(np.float32),
        parsed.dense[keep].astype(np.float32),
        [Keys.of_ones(np.ascontiguousarray(keys[:, c]), missing[:, c]) for c in range(_SPARSE)],
    )


def _values(text: _Bytes, fields: _Fields) -> _Parsed:
    numbers, bad_numbers = _whole_numbers(
        text, _Fields(fields.left[:, : 1 + _DENSE], fields.length[:, : 1 + _DENSE])
    )
    keys, bad_keys = _hexadecimal(text, _Fields(fields.left[:, 1 + _DENSE :], fields.length[:, 1 + _DENSE :]))
    labels = numbers[:, 0]
    bad_label = (labels != 0) & (labels != 1)
    return _Parsed(
        labels,
        numbers[:, 1:],
        keys,
        fields.length[:, 1 + _DENSE :] == 0,
        bad_numbers.any(1) | bad_keys.any(1) | bad_label,
    )


def _whole_numbers(text: _Bytes, fields: _Fields) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Values, NaN where empty, and where a field is no whole number."""
    left, length = fields
    is_negative = (length > 0) & (text[np.minimum(left, text.size - 1)] == _MINUS)
    left, digits = left + is_negative, length - is_negative
    value = np.zeros(left.shape, np.int64)
    bad = (is_negative & (digits == 0)) | (digits > _NUMBER_DIGITS)
    for k in range(min(int(digits.max(initial=0)), _NUMBER_DIGITS)):
        there = k < digits
        digit = text[np.where(there, left + k, 0)] - np.uint8(_ZERO)  # what lies below "0" wraps above 9
        bad |= there & (digit > 9)
        value = np.where(there, value * 10 + digit, value)
    signed = np.where(is_negative, -value, value).astype(np.float64)
    return np.where(length == 0, np.nan, signed), bad


def _hexadecimal(text: _Bytes, fields: _Fields) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Keys, 0 where empty, and where a field is not hexadecimal."""
    left, length = fields
    value = np.zeros(left.shape, np.int64)
    bad = length > _HEX_DIGITS
    for k in range(_HEX_DIGITS):
        there = k < length
        digit = _HEX[text[np.where(there, left + k, 0)]]
        bad |= there & (digit == 255)
        value = np.where(there, value << 4 | digit, value)
    return value, bad


def _by_hand(line: bytes, parsed: _Parsed, row: int) -> str:
    """Read one line into ``parsed[row]``; or say what is wrong with it."""
    parts = line.decode("utf-8", "replace").split("\t")
    if len(parts) != _COLUMNS:
        return f"{len(parts)} columns; expected {_COLUMNS} between tabs: a label, {_DENSE} numbers, {_SPARSE} keys"
    if parts[0] not in ("0", "1"):
        return f"the label is {_shown(parts[0])}; expected 0 or 1"
    for c, part in enumerate(parts[1 : 1 + _DENSE]):
        number = _number(part)
        if number is None:
            return f"{CRITEO.dense[c]} is {_shown(part)}; expected a number, or nothing where it is missing"
        parsed.dense[row, c] = number
    for c, part in enumerate(parts[1 + _DENSE :]):
        if part and (len(part) > _HEX_DIGITS or not all(_HEX[min(ord(each), 255)] < 16 for each in part)):
            return (
                f"{CRITEO.features[c].name} is {_shown(part)}; expected up to {_HEX_DIGITS} hexadecimal digits, or "
                "nothing where it is missing"
            )
    return ""


def _number(text: str) -> float | None:
    if not text:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def _shown(text: Any) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
