"""Safetensors files to start from: read by our reader, every tensor, by a model's names."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.formats.safetensors import SafetensorsWriter
from shardwise.models.source import open_weights

from .trial import RAW_JSON, Case, Kind, edited, of_bytes, of_json

SHAPES = {"a": (3, 4), "b.weight": (8,), "c": (), "d": (0, 5)}


def make(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    with SafetensorsWriter(folder / "x.safetensors", SHAPES, torch.float32) as writer:
        for name, shape in SHAPES.items():
            writer.write(name, torch.randn(shape, generator=generator))
    return folder / "x.safetensors"


def read(path: Path) -> Any:
    """What a model with these four tensors would start from."""
    source = open_weights(path)
    source.check(SHAPES)
    return [
        source.read(name, 0, torch.Size(shape).numel()).double().tolist() for name, shape in SHAPES.items()
    ]


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: bytes, tensors: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + tensors


def cases(count: int) -> Iterator[Case]:
    for number, raw in enumerate(RAW_JSON):
        yield Case(f"raw {number}", edited(lambda data, raw=raw: with_header(raw, header_of(data)[1])))

    def lying(**entry: Any) -> Case:
        def change(data: bytes) -> bytes:
            header, tensors = header_of(data)
            header["a"] |= entry
            return with_header(json.dumps(header).encode(), tensors)

        return Case(f"a says {entry}", edited(change))

    yield lying(shape=[-3, -4])
    yield lying(shape=[2**62, 2**62])
    yield lying(shape=[12.0])
    yield lying(shape=[[12]])
    yield lying(dtype="F64")
    yield lying(dtype=["F32"])
    yield lying(dtype="I32")
    yield lying(data_offsets=[0, 48, 0])
    yield lying(data_offsets=[8, 56])
    yield Case("a header of 2^62 bytes", edited(lambda data: (2**62).to_bytes(8, "little") + data[8:]))
    for number in range(count):
        draws = random.Random(f"safetensors {number}")
        if number % 3 == 0:
            # Of the header alone: safetensors has no sum over its data.
            case = of_bytes(draws)

            def damage(path: Path, case: Case = case) -> None:
                header, tensors = header_of(path.read_bytes())
                path.write_bytes(json.dumps(header).encode())
                case.damage(path)
                path.write_bytes(with_header(path.read_bytes(), tensors))

            yield Case(f"header: {case.name}", damage, may_differ=True)
        else:
            told: list[str] = []

            def change(data: bytes, draws: random.Random = draws, told: list[str] = told) -> bytes:
                header, tensors = header_of(data)
                what, new = of_json(draws, header)
                told.append(what)
                return with_header(json.dumps(new).encode(), tensors)

            yield Case(f"header, edit {number}", edited(change), may_differ=True)


KIND = Kind("safetensors", make, read, cases)
