"""The text of a table in which every line is a row: lines that a quote joins are left out and counted.

    17,"Rome,IT",1            a field in quotes may hold separators, and "" is a quote in it
    18,"Oslo,0                a quote that opens and does not close in its line: a stray quote, or a field with a line
    19,Paris,1                end in it. The text does not show which, so no line of it is read: up to the line in
    20,"Bern",0               which the quote closes, each line counts as one malformed row

A CSV reader that accepts line ends in fields makes one row, with one absurd key, of all rows between two stray quotes.
This module counts them, and a quote that never closes is an error. Memory: one piece of text, and one line.
"""

import contextlib
import gzip
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from shardwise.base.errors import DataError
from shardwise.base.regular_files import open_regular

_PIECE_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 22


@contextlib.contextmanager
def opened_text(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file of text, plain or gzip by the ending of its name."""
    with open_regular(path) as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield cast(IO[bytes], unpacked)


class WholeRows(io.RawIOBase):
    """File that returns only the lines that are rows by themselves.

    Args:
        file: the file, at its beginning.
        path: path of the file, for errors.
        separator: character between two fields.
        columns: number of fields of a row.
        skip: called with (number of the line, from 1; reason) for every line that is left out.
        progress: called with the number of bytes of text just read.
    """

    def __init__(
        self,
        file: IO[bytes],
        path: Path,
        separator: str,
        columns: int,
        skip: Callable[[int, str], None],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        outside = rb"[^" + re.escape(separator.encode()) + rb"]*+"
        quoted = rb'(?:[^"]++|"")*+"' + outside
        field = rb'(?:"' + quoted + rb'|(?!")' + outside + rb")"
        rest = rb"(?:" + re.escape(separator.encode()) + field + rb")*+"
        self._begins_closed, self._begins_open = re.compile(field + rest), re.compile(quoted + rest)
        self._columns = columns
        self._whole_row = re.compile(
            field + rb"(?:" + re.escape(separator.encode()) + field + rb"){%d}" % (columns - 1)
        )
        self._file, self._path, self._skip, self._progress = file, path, skip, progress
        self._ready = memoryview(b"")
        self._partial = b""
        self._line = 0
        self._opened_in = 0
        """Line in which the open quote stands; 0 if none is open."""
        self._is_at_end = False

    def readable(self) -> bool:
        """Return True, as a raw stream that can be read must."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes of whole rows; all that remain if ``size`` is negative.

        Raises:
            DataError: if a line is too long, or if a quote never closes.
        """
        parts: list[memoryview] = []
        found = 0
        while size is None or size < 0 or found < size:
            if not self._ready:
                if self._is_at_end:
                    break
                self._ready = memoryview(self._next())
            part = self._ready if size is None or size < 0 else self._ready[: size - found]
            self._ready = self._ready[len(part) :]
            parts.append(part)
            found += len(part)
        return b"".join(parts)

    def _next(self) -> bytes:
        """Return the rows of one more piece of the file, perhaps none."""
        piece = self._file.read(_PIECE_BYTES)
        if piece and self._progress is not None:
            self._progress(len(piece))
        text = self._partial + piece
        self._is_at_end = not piece
        # A \r at the very end may be the first half of a line end.
        cut = len(text) if not piece else (text.rfind(b"\n") + 1 or text.rfind(b"\r", 0, -1) + 1)
        text, self._partial = text[:cut], text[cut:]
        if len(self._partial) > _LONGEST_LINE_BYTES:
            number = self._line + text.count(b"\n") + 1
            raise DataError(
                f"{self._path}: line {number} has more than {_LONGEST_LINE_BYTES} bytes; expected a row of a table"
            )
        if not self._opened_in and b'"' not in text and _is_utf8(text):
            self._line += text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")
        else:
            text = b"".join([line for line in text.splitlines(keepends=True) if self._is_row(line)])
        if self._is_at_end and self._opened_in:
            raise DataError(
                f"{self._path}: the quote that opens in line {self._opened_in} does not close before the end of the "
                "file; remove it, or double it where it is meant"
            )
        return text

    def _is_row(self, line: bytes) -> bool:
        """Return True if all quotes of the line open and close in it; count the line if not."""
        self._line += 1
        if not self._opened_in and b'"' not in line:
            return self._has_all_fields(line)
        was_open = bool(self._opened_in)
        is_closed = (self._begins_open if was_open else self._begins_closed).fullmatch(line.rstrip(b"\r\n"))
        if is_closed and not was_open:
            return self._has_all_fields(line)
        opened_in = self._opened_in or self._line
        self._opened_in = 0 if is_closed else opened_in
        where = "in its line" if opened_in == self._line else f"of line {opened_in}, up to this line"
        self._skip(
            self._line,
            f"a quote does not close {where}; a row is one line: remove the quote, or double it where it is meant",
        )
        return False

    def _has_all_fields(self, line: bytes) -> bool:
        """Return True if the line has as many fields as the table; count the line if not.

        Only lines that are not UTF-8 are checked, because pyarrow reports all others but drops these silently.
        """
        bare = line.rstrip(b"\r\n")
        if not bare or _is_utf8(bare) or self._whole_row.fullmatch(bare):
            return True
        said = bare[:40].decode("utf-8", "replace")
        self._skip(
            self._line,
            f"another number of fields than {self._columns} in {said!r}, which is not text in UTF-8",
        )
        return False


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
