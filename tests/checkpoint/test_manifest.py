"""A hostile or broken manifest is refused with a sentence: quickly, in little memory, without doing what it says."""

import hashlib
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base import strict_json
from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, Manifest, verify

from .crew import TINY, blank_items, items_of, make_state


def seal(body: bytes) -> bytes:
    """Any forger can compute this: it guards against accidents."""
    return body + b',\n"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def example() -> dict[str, Any]:
    return {
        "format": 1,
        "run": "r",
        "generation": 1,
        "writer": "ab",
        "step": 3,
        "block_bytes": 64,
        "files": {
            "trainer.json": {"bytes": 3, "crc32": "00000000"},
            "state/m.safetensors": {"bytes": 128, "crc32": "0000000000000000"},
        },
        "tensors": [
            {
                "kind": "m",
                "name": "w",
                "shape": [4, 4],
                "dtype": "F32",
                "pieces": [
                    {"file": "state/m.safetensors", "offset": 64, "start": 0, "stop": 8, "crc32": "00000000"},
                    {
                        "file": "state/m.safetensors",
                        "offset": 96,
                        "start": 8,
                        "stop": 16,
                        "crc32": "00000000",
                    },
                ],
            }
        ],
        "aliases": {},
    }


def decode(value: Any) -> Manifest:
    return Manifest.decode(seal(json.dumps(value).encode()[:-1]), "manifest.json")


def test_the_example_and_unknown_keys_are_read() -> None:
    value = example()
    value["later"] = {"more": [1, 2]}
    value["files"]["trainer.json"]["colour"] = "blue"
    found = decode(value)
    assert found.find("m", "w") is found.tensors[0] and found.kinds == {"m": 64}


def test_encode_is_read_back() -> None:
    found = decode(example())
    again = Manifest.decode(found.encode(), "x")
    assert again.model_dump(exclude={"sha256"}) == found.model_dump(exclude={"sha256"})


def at(*path: Any) -> Callable[[dict[str, Any], Any], None]:
    def put(value: dict[str, Any], new: Any) -> None:
        place: Any = value
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = new

    return put


TENSOR, PIECE, OTHER = ("tensors", 0), ("tensors", 0, "pieces", 0), ("tensors", 0, "pieces", 1)
CHANGES: list[tuple[tuple[Any, ...], Any]] = [
    *[
        (("files", path), {"bytes": 0, "crc32": ""})
        for path in (
            "../x", "/etc/passwd", "model/../../x", "state//x", "state/", "", ".", "..", ".hidden", "model/.x", "a/b",
            "model/a/b", "manifest.json", "model\\x", "x\0", "x\n", "TRAINER.json", "x" * 300, "st\u0430te/x",
        )
    ],
    (("files", "state/m.safetensors", "bytes"), -1),
    (("files", "state/m.safetensors", "bytes"), 10**30),
    (("files", "state/m.safetensors", "bytes"), 64),
    (("files", "state/m.safetensors", "bytes"), 129),
    (("files", "state/m.safetensors", "bytes"), 128.0),
    (("files", "state/m.safetensors", "bytes"), True),
    (("files", "state/m.safetensors", "bytes"), "128"),
    (("files", "state/m.safetensors", "crc32"), "0000000"),
    (("files", "state/m.safetensors", "crc32"), "0000000g00000000"),
    (("files", "state/m.safetensors", "crc32"), "00000000" * 3),
    (("files", "state/m.safetensors", "crc32"), "00000000\n0000000"),
    (("files",), {}),
    (("files",), []),
    (("format",), "1"),
    (("block_bytes",), 0),
    (("block_bytes",), 65),
    (("block_bytes",), 2**40),
    (("step",), -1),
    (("step",), 2**80),
    (("run",), "\x1b[2J"),
    (("run",), "r" * 10_000),
    (("writer",), "../x"),
    ((*TENSOR, "shape"), [4, -4]),
    ((*TENSOR, "shape"), [10**9, 10**9, 10**9]),
    ((*TENSOR, "shape"), [4, 5]),
    ((*TENSOR, "shape"), [1] * 1000),
    ((*TENSOR, "shape"), "16"),
    ((*TENSOR, "dtype"), "O8"),
    ((*TENSOR, "dtype"), "F64"),
    ((*TENSOR, "kind"), "../m"),
    ((*TENSOR, "kind"), "M"),
    ((*TENSOR, "name"), "\x1b]0;x\x07"),
    ((*TENSOR, "name"), "__metadata__"),
    ((*TENSOR, "name"), ""),
    ((*TENSOR, "name"), None),
    ((*TENSOR, "pieces"), []),
    ((*PIECE, "file"), "state/other.safetensors"),
    ((*PIECE, "file"), "../../etc/passwd"),
    ((*PIECE, "offset"), 62),
    ((*PIECE, "offset"), -64),
    ((*PIECE, "offset"), 2**62),
    ((*OTHER, "offset"), 92),
    ((*OTHER, "offset"), 100),
    ((*OTHER, "start"), 7),
    ((*OTHER, "start"), 9),
    ((*OTHER, "stop"), 15),
    ((*OTHER, "crc32"), "xyz"),
    (("aliases",), {"w": "v"}),
    (("versions",), ["torch"]),
    (("versions",), {"torch": "2" * 101}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), CHANGES, ids=lambda part: repr(part)[:40])
def test_what_does_not_fit_is_refused(path: tuple[Any, ...], value: Any) -> None:
    changed = example()
    at(*path)(changed, value)
    with pytest.raises(CheckpointError, match="manifest.json"):
        decode(changed)


@pytest.mark.parametrize("extra", [("tensors", 0), ("tensors", 0, "pieces", 1)], ids=["tensor", "piece"])
def test_a_thing_twice_is_refused(extra: tuple[Any, ...]) -> None:
    changed = example()
    place: Any = changed
    for key in extra[:-1]:
        place = place[key]
    place.append(place[extra[-1]])
    with pytest.raises(DamagedError, match="does not follow|stands twice"):
        decode(changed)


def test_another_format_is_not_damage_and_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="format 2; this version reads format 1") as caught:
        decode({**example(), "format": 2})
    assert not isinstance(caught.value, DamagedError)


RAW: dict[str, bytes] = {
    "duplicate key": b'{"format":1,"format":1',
    "NaN": b'{"format":NaN',
    "infinity": b'{"format":1e999',
    "minus infinity": b'{"format":-Infinity',
    "nothing": b"",
    "not UTF-8": b'{"\xff":1',
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000,
    "long number": b'{"a":' + b"9" * 100_000,
    "list": b"[1",
    "many values": b'{"a":[' + b"[]," * 2_000_000 + b"[]]",
    "many objects": b'{"a":[' + b'{"":0},' * 2_000_000 + b"0]",
    "large text": b'{"a":"' + b"x" * (65 * 2**20) + b'"',
}


@pytest.mark.parametrize(
    ("text", "story"),
    [
        ('{"a": {"b": 1, "b": 2}}', "key 'b' stands twice"),
        ('{"a": [NaN]}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": -1e999}', "-1e999 is not finite"),
        ("[1]", "expected a JSON object, found list"),
        ('{"a": 1} {', "Extra data"),
        ("{'a': 1}", "not the JSON that was written"),
    ],
)
def test_only_strict_json_is_read(text: str, story: str) -> None:
    with pytest.raises(DamagedError, match=f"x: .*{story}"):
        strict_json.read_object(text.encode(), "x")


@pytest.mark.parametrize("name", RAW)
def test_hostile_json_costs_neither_time_nor_memory(name: str) -> None:
    data = seal(RAW[name])
    started = time.process_time()
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="manifest.json"):
        Manifest.decode(data, "manifest.json")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 200e6
    assert time.process_time() - started < 10  # a bound against explosion, not a measurement


def test_the_largest_manifest_allowed_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a twentieth of the limit, for the memory grows with the nodes."""
    monkeypatch.setattr(strict_json, "JSON_NODES", strict_json.JSON_NODES // 20)
    body = b'{"format":1,"x":[' + b'{"":0},' * (strict_json.JSON_NODES // 2 - 10) + b"0]"
    tracemalloc.start()
    with pytest.raises(DamagedError):
        Manifest.decode(seal(body), "manifest.json")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 200e6 / 20


@pytest.mark.parametrize("tail", [b"", b" ", b"\n", b"}"])
def test_bytes_after_the_seal_are_refused(tail: bytes) -> None:
    data = decode(example()).encode()
    assert Manifest.decode(data, "x")
    for changed in (data + tail if tail else data[:-1], tail + data if tail else data[1:]):
        with pytest.raises(DamagedError):
            Manifest.decode(changed, "x")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_sealed_json_is_read_or_refused(data: st.DataObject) -> None:
    """One place of the example replaced by anything at all: no exception but our own."""
    changed = example()
    place: Any = changed
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
        else:
            break
    place[key] = data.draw(ANYTHING)
    try:
        found = decode(changed)
    except CheckpointError:
        return
    for tensor in found.tensors:
        for piece in tensor.pieces:
            end = piece.offset + (piece.stop - piece.start) * tensor.torch_dtype.itemsize
            assert end <= found.files[piece.file].bytes


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    for contents in (data, seal(data)):
        with pytest.raises(CheckpointError):
            Manifest.decode(contents, "x")


def test_a_hostile_header_is_found(tmp_path: Path) -> None:
    """The manifest agrees with the bytes, but plain safetensors would read other tensors from them."""
    checkpoints = Checkpoints(tmp_path, policy=CheckpointPolicy(asynchronous=False), sizes=TINY)
    checkpoints.save(1, items_of(make_state(1)), {})
    step = tmp_path / "step_00000001"
    for length in (10**15, 4096 - 8, 2**62):
        forge_header(step, length)
        found = verify(step)
        assert [damage.file for damage in found] == ["state/exp_avg-00001-of-00002.safetensors"], length
        assert "header" in found[0].what
    assert (
        checkpoints.load(blank_items()) is not None
    )  # offsets come from the manifest: nothing else was read


def forge_header(step: Path, length: int) -> None:
    name = "state/exp_avg-00001-of-00002.safetensors"
    contents = bytearray((step / name).read_bytes())
    contents[:8] = length.to_bytes(8, "little")
    contents[8:4096] = contents[8:4096].replace(b"F32", b"I32")
    (step / name).write_bytes(contents)
    value = json.loads((step / "manifest.json").read_bytes())
    del value["sha256"]
    size = value["block_bytes"]
    blocks = [contents[start : start + size] for start in range(0, len(contents), size)]
    value["files"][name]["crc32"] = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
    (step / "manifest.json").write_bytes(seal(json.dumps(value).encode()[:-1]))
