"""Packed clicks whose checksums are right and whose contents no writer wrote."""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.clicks import BatchForm, ClickRows, ClickSchema, FeatureKeys, PackedClicks, SparseFeature
from shardwise.data.clicks import packed as module
from shardwise.data.clicks.packed import record_dtype, write_packed

from .trial import RAW_JSON, Case, Kind, of_bytes, of_json

ROWS = 300
SCHEMA = ClickSchema(
    ("x", "y"),
    (SparseFeature("one"), SparseFeature("many", True), SparseFeature("two"), SparseFeature("more", True)),
)


def make(folder: Path) -> Path:
    draws = np.random.default_rng(0)

    def keys(many: bool) -> FeatureKeys:
        lengths = draws.integers(0, 4, ROWS) if many else (draws.random(ROWS) < 0.9).astype(np.int64)
        values = draws.integers(-(1 << 62), 1 << 62, int(lengths.sum()))
        return FeatureKeys(values, np.r_[0, np.cumsum(lengths)])

    dense = draws.normal(size=(ROWS, 2)).astype(np.float32)
    labels = draws.integers(0, 2, ROWS).astype(np.float32)
    path = folder / "x.clicks"
    write_packed(path, SCHEMA, [ClickRows(labels, dense, [keys(each.many) for each in SCHEMA.features])])
    return path


def read(path: Path) -> Any:
    """All numbers, by the places of their columns: another name is no other number."""
    clicks = PackedClicks(path)
    clicks.check()
    order = np.random.default_rng(1).permutation(len(clicks))
    found = []
    for start in range(0, len(clicks), 64):
        batch = BatchForm().batch(clicks.rows(order[start : start + 64]), clicks.schema)
        sparse = [(each.values.tolist(), each.offsets.tolist()) for each in batch["sparse"].values()]
        found.append((batch["labels"].tolist(), batch["dense"].tolist(), sparse))
    return found


def parts_of(data: bytes) -> tuple[bytearray, dict[str, Any]]:
    _, _, length, _ = module.PREFIX.unpack(data[: module.PREFIX.size])
    return bytearray(data), json.loads(data[module.PREFIX.size : module.PREFIX.size + length])


def with_header(data: bytes, text: bytes, length: int | None = None) -> bytes:
    """Another header, with its right sum; what lies behind stays where it is."""
    prefix = module.PREFIX.pack(
        module.MAGIC, module.VERSION, len(text) if length is None else length, zlib.crc32(text)
    )
    head = prefix + text
    return head + data[len(head) :] if len(head) <= 4096 else head + data[4096:]


def of_header(name: str, change: Callable[[dict[str, Any]], Any]) -> Case:
    def damage(path: Path) -> None:
        data, header = parts_of(path.read_bytes())
        change(header)
        path.write_bytes(with_header(bytes(data), json.dumps(header).encode()))

    return Case(name, damage)


def of_content(name: str, change: Callable[[npt.NDArray[Any], npt.NDArray[np.int64]], Any]) -> Case:
    """Other records and keys, with right sums of every block, of the table of sums and of the header."""

    def damage(path: Path) -> None:
        data, header = parts_of(path.read_bytes())
        dtype = record_dtype(SCHEMA, header["key_type"])
        start, size = header["start"], header["rows"] * dtype.itemsize
        heap = start + -(-size // 8) * 8
        records = np.frombuffer(data, dtype, header["rows"], start)
        keys = np.frombuffer(data, "<i8", header["keys"], heap)
        change(records, keys)
        sums = [
            zlib.crc32(bytes(data[low : min(low + module._BLOCK_BYTES, stop)]))
            for begin, stop in ((start, start + size), (heap, heap + 8 * header["keys"]))
            for low in range(begin, stop, module._BLOCK_BYTES)
        ]
        table = np.asarray(sums, "<u4").tobytes()
        data[heap + 8 * header["keys"] :] = table
        header["table_crc"] = zlib.crc32(table)
        path.write_bytes(with_header(bytes(data), json.dumps(header).encode()))

    return Case(name, damage)


def set_at(field: str, row: int, value: Any) -> Callable[[npt.NDArray[Any], Any], None]:
    def change(records: npt.NDArray[Any], keys: Any) -> None:
        records[field][row] = value

    return change


def moved(row: int, by: int) -> Callable[[npt.NDArray[Any], Any], None]:
    def change(records: npt.NDArray[Any], keys: Any) -> None:
        records["start"][row] = np.uint64((int(records["start"][row, 0]) + by) % 2**64)

    return change


def cases(count: int) -> Iterator[Case]:
    yield from (
        of_header("dtype of 2 GB", lambda h: h.update(dense=[f"d{i}" for i in range(300_000)])),
        of_header("rows 0", lambda h: h.update(rows=0)),
        of_header("rows huge", lambda h: h.update(rows=2**62)),
        of_header("keys huge", lambda h: h.update(keys=2**60)),
        of_header("keys fewer", lambda h: h.update(keys=h["keys"] - 1)),
        of_header("start inside the header", lambda h: h.update(start=0)),
        of_header("start past the end", lambda h: h.update(start=2**40)),
        of_header("a name twice", lambda h: h.update(dense=["x", "x"])),
        of_header("one key type less", lambda h: h.update(key_type="u32")),
        of_header("a word as many", lambda h: h.update(features=[["one", "yes"]])),
    )
    for value in (np.nan, 7, -1, 0.5, np.inf):
        yield of_content(f"label {value}", set_at("label", 11, value))
    for value in (np.inf, -np.inf):
        yield of_content(f"number {value}", set_at("dense", 12, value))
    for row in (0, 5, ROWS - 1):
        for by in (-4, -1, 1, 7, 2**63, -(2**62)):
            yield of_content(f"keys of row {row} moved by {by}", moved(row, by))
        for length in (0, 1000, 2**32 - 1):
            yield of_content(f"lengths of row {row} are {length}", set_at("lengths", row, length))
    yield of_content("all starts alike", lambda records, keys: records["start"].fill(3))
    for text in RAW_JSON:
        yield Case(f"header {text[:20]!r}", lambda p, t=text: p.write_bytes(with_header(p.read_bytes(), t)))
    for length in (2**32 - 1, 2**24, 0):
        yield Case(
            f"header of {length} bytes",
            lambda p, n=length: p.write_bytes(
                with_header(p.read_bytes(), json.dumps(parts_of(p.read_bytes())[1]).encode(), n)
            ),
        )
    draws = random.Random(7)
    while count > 0:
        count -= 1
        if count % 3 == 0:
            yield of_bytes(draws)
            continue
        seed = draws.getrandbits(32)

        def damage(path: Path, seed: int = seed) -> None:
            data, header = parts_of(path.read_bytes())
            _, changed = of_json(random.Random(seed), header)
            path.write_bytes(with_header(bytes(data), json.dumps(changed).encode()))

        yield Case(f"header json {seed}", damage)


KIND = Kind("clicks", make, read, cases)
