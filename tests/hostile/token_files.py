"""Token files: headers with a right sum that say what the file does not hold, and damage of every byte."""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.token_file import MAGIC, TokenFile, TokenWriter
from shardwise.data.windows import TokenSpan, TokenWindows

from .trial import RAW_JSON, Case, Kind, edited, of_bytes, of_json

START = 4096


def make(folder: Path) -> Path:
    with TokenWriter(folder / "x.tokens", "bytes", 250) as writer:
        for document in range(5):
            writer.append(np.arange(document, 200 + document) % 250)
            writer.end_document()
    return folder / "x.tokens"


def read(path: Path) -> Any:
    """The samples of a run over it."""
    file = TokenFile(path)
    windows = TokenWindows([TokenSpan(file, 0, file.count)], 16)
    return [np.asarray(windows[i]).tolist() for i in range(len(windows))], file.ends.tolist(), file.vocab_size


def with_header(data: bytes, header: bytes) -> bytes:
    """A right sum over any header."""
    prefix = MAGIC + (1).to_bytes(4, "little") + len(header).to_bytes(4, "little")
    head = prefix + zlib.crc32(header).to_bytes(4, "little") + header
    return head[:START].ljust(START, b"\0") + data[START:]


def header_of(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[12:16], "little")
    return json.loads(data[20 : 20 + length])


def lying(**entry: Any) -> Case:
    def change(data: bytes) -> bytes:
        return with_header(data, json.dumps(header_of(data) | entry).encode())

    return Case(f"header says {entry}", edited(change))


def resummed(change: Callable[[bytearray], None]) -> Callable[[Path], None]:
    """Tokens or tables changed, and every sum made right again."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        header = header_of(data)
        tables = START + -(-header["count"] // 8) * 8
        block = zlib.crc32(data[START : START + header["count"]])
        data[-4:] = block.to_bytes(4, "little")
        header["tables_crc"] = zlib.crc32(data[tables:])
        path.write_bytes(with_header(bytes(data), json.dumps(header).encode()))

    return damage


def cases(count: int) -> Iterator[Case]:
    def outside(data: bytearray) -> None:
        data[START + 7] = 255

    def backwards(data: bytearray) -> None:
        data[-12:-4] = (3).to_bytes(8, "little")

    def beyond(data: bytearray) -> None:
        data[-12:-4] = (2**60).to_bytes(8, "little")

    yield Case("a token outside the vocabulary", resummed(outside))
    yield Case("documents that go back", resummed(backwards))
    yield Case("a document beyond the end", resummed(beyond))
    yield lying(dtype="u16", count=500)
    yield lying(vocab_size=2)
    yield lying(vocab_size="256")
    yield lying(vocab_size=60_000)
    yield lying(tokenizer=["bytes"])
    yield lying(count=2**62, blocks=2**46)
    yield lying(documents=2**60)
    for number, raw in enumerate(RAW_JSON):
        yield Case(f"raw {number}", edited(lambda data, raw=raw: with_header(data, raw)))
    for number in range(count):
        draws = random.Random(f"tokens {number}")
        if number % 2:
            yield of_bytes(draws)
        else:

            def change(data: bytes, draws: random.Random = draws) -> bytes:
                return with_header(data, json.dumps(of_json(draws, header_of(data))[1]).encode())

            yield Case(f"header, edit {number}", edited(change))


KIND = Kind("tokens", make, read, cases)
