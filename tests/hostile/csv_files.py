"""Click logs as CSV: stray quotes, line ends in fields, headers without end."""

import gzip
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.clicks import MalformedRows
from shardwise.data.clicks.csv_text import csv_schema, read_csv

from .trial import Case, Kind, edited, of_bytes

ROWS = 400


def make(folder: Path) -> Path:
    draws = random.Random(0)
    rows = [f'{i % 2},"k{draws.randrange(99)}, x",{draws.random()},u{i}\n' for i in range(ROWS)]
    (folder / "x.csv").write_text("label,key,price,user\n" + "".join(rows))
    return folder / "x.csv"


def read(path: Path) -> Any:
    schema = csv_schema(path, ",")
    found = list(read_csv(path, ",", schema, MalformedRows()))
    keys = [
        np.concatenate([rows.keys[i].values for rows in found]).tolist() for i in range(len(schema.features))
    ]
    dense = [np.concatenate([rows.dense[:, i] for rows in found]).tolist() for i in range(len(schema.dense))]
    return schema, np.concatenate([rows.labels for rows in found]).tolist(), keys, dense


def cases(count: int) -> Iterator[Case]:
    def replaced(name: str, data: bytes) -> Case:
        return Case(name, lambda path: path.write_bytes(data), may_differ=True)

    header = b"label,key,price,user\n"
    yield replaced(
        "100,000 columns", ",".join(["label", *(f"c{i}" for i in range(100_000))]).encode() + b"\n"
    )
    yield replaced(
        "100,000 columns, a row", ",".join(["label"] * 100_000).encode() + b"\n" + b"1," * 99_999 + b"1\n"
    )
    yield replaced("one line", header + b"x" * (6 << 20))
    yield replaced("one quote to the end", header + b'1,"' + b"a\n" * 200_000)
    yield replaced("quotes alone", header + b'"' * 300_000)
    yield replaced("quotes in lines", header + b'"\n' * 100_000)
    yield replaced("separators alone", header + b"," * 1_000_000)
    yield replaced("returns alone", header.replace(b"\n", b"\r") * 10_000)
    yield replaced("zeros", bytes(1 << 20))
    yield replaced("no rows", header)
    yield replaced("a long number", header + b"1,k," + b"9" * 100_000 + b",u\n")

    def bomb(path: Path) -> None:
        packed = gzip.compress(header + b'0,"' + b"a" * (64 << 20))
        path.unlink()
        path.with_name("x.csv.gz").write_bytes(packed)
        path.symlink_to("x.csv.gz")

    yield Case("gzip under the name of text", bomb)
    for number in range(count):
        draws = random.Random(f"csv {number}")
        if number % 2:
            # A byte of plain text may be another byte: there is no sum.
            yield of_bytes(draws)._replace(may_differ=True)
            continue
        row, field = draws.randrange(1, ROWS), draws.randrange(4)

        def stray(data: bytes, row: int = row, field: int = field) -> bytes:
            lines = data.split(b"\n")
            at = [0, 2, lines[row].index(b'",') + 2, lines[row].rindex(b",") + 1][field]
            lines[row] = lines[row][:at] + b'"' + lines[row][at:]
            return b"\n".join(lines)

        yield Case(f"a quote before field {field} of row {row}", edited(stray))


KIND = Kind("csv", make, read, cases)
