"""unit_norms.csv: the gradient norm of every Unit, one row per optimizer step, whole across kills and resumes.

    step,(root),blocks.0,blocks.1
    1,0.8125,0.25,0.125

The columns are the Units of the model, in the order of registration; the rows of all embedding tables are one column,
``(tables)``. Numbers are written by ``repr`` and a row that a kill cut short is dropped, as in ``metrics.csv``.

Opening the file for a step cuts the later rows off. Where a run goes on with other Units (another mesh may give experts
Units of their own), the columns of both are kept, and a Unit that a row does not know is an empty cell.

Cost: one small write and one flush per step, on rank 0 alone.
"""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from shardwise.base.errors import DataError
from shardwise.base.regular_files import open_regular
from shardwise.base.words import in_words

NAME = "unit_norms.csv"
_LINE_BYTES = 4 << 20
"""Limit for a line: a hundred thousand Units."""


class UnitNormsFile:
    """The file of one run folder, cut back to ``resume_step``; 0 starts it anew."""

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None
        self._names: list[str] = []
        if self.path.exists():
            header, *rows = _read(self.path, resume_step)
            if rows:
                self._replace([header, *rows])
            else:
                self.path.unlink()

    def write(self, step: int, norms: Mapping[str, float]) -> None:
        """Append the row of a step and hand it to the operating system at once."""
        if self._file is None:
            self._file = self._begun(norms)
        cells = (repr(float(norms[name])) if name in norms else "" for name in self._names)
        csv.writer(self._file, lineterminator="\n").writerow((int(step), *cells))
        self._file.flush()

    def close(self) -> None:
        """Close the file; every row is in it already."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begun(self, names: Iterable[str]) -> IO[str]:
        """Return the file, open for rows with these columns and those that its earlier rows have besides."""
        header, *rows = _read(self.path) if self.path.exists() else [["step"]]
        self._names = list(dict.fromkeys((*names, *header[1:])))
        if self._names != header[1:]:
            by_name = (dict(zip(header, row, strict=True)) for row in rows)
            moved = ([row["step"], *(row.get(name, "") for name in self._names)] for row in by_name)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._replace([["step", *self._names], *moved])
        return self.path.open("a", encoding="utf-8", newline="")

    def _replace(self, lines: Iterable[Sequence[str]]) -> None:
        """Write the file anew, beside and renamed: a kill leaves the old file or the new one."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.unlink(missing_ok=True)  # a link would have the file behind it overwritten
        with fresh.open("x", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)


def _read(path: Path, last_step: int | None = None) -> list[list[str]]:
    """Return the header and the whole rows, those after ``last_step`` left out, as text.

    Raises:
        DataError: if the file cannot be read, or is no such file.
    """
    found: list[list[str]] = []
    try:
        with open_regular(path) as file:
            for number, row in enumerate(csv.reader(_whole_lines(file), strict=True), start=1):
                if number == 1:
                    if row[:1] != ["step"] or len(set(row)) < len(row):
                        raise ValueError(f"the header is {','.join(row)[:200]!r}")
                    found.append(row)
                    continue
                if len(row) != len(found[0]):
                    raise ValueError(f"line {number} has {len(row)} cells under {len(found[0])} columns")
                step = int(row[0])
                for cell in row[1:]:
                    float(cell or 0)
                if last_step is None or step <= last_step:
                    found.append(row)
    except OSError as error:
        raise DataError(f"unit norms {in_words(error)}; move it away") from None
    except (ValueError, csv.Error) as error:
        raise DataError(
            f"{path}: expected a column step and one for each Unit, with numbers below, and {str(error)[:400]}; this "
            "is not a file of monitor.unit_norms, move it away"
        ) from None
    return found or [["step"]]


def _whole_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of the file; a last one that a kill cut short is left out."""
    for line in iter(partial(file.readline, _LINE_BYTES), b""):
        if line.endswith(b"\n"):
            yield line.decode("utf-8", errors="replace")
        elif len(line) == _LINE_BYTES:
            raise ValueError(f"a line has more than {_LINE_BYTES} bytes")
