"""Our reader and writer of safetensors against the library's, and files that are damaged."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from shardwise.base.errors import CheckpointError, DamagedError, MismatchError
from shardwise.formats.safetensors import SafetensorsWriter, read_header

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {f"t.{str(dtype)[6:]}": (9 * torch.randn(5, 7)).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "row": torch.arange(9.0)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"note": "odd length"})
    return tmp_path / "x.safetensors"


def test_reads_what_the_library_wrote(file: Path) -> None:
    expected = safetensors.torch.load_file(file)
    header = read_header(file)
    assert set(header) == set(expected)
    for name, tensor in header.items():
        assert tensor.shape == tuple(expected[name].shape)
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.read(0, tensor.elements), expected[name].reshape(-1))


@pytest.mark.parametrize("transposed", [False, True])
def test_every_slice(file: Path, transposed: bool) -> None:
    stored = read_header(file)["t.bfloat16"]
    whole = safetensors.torch.load_file(file)["t.bfloat16"]
    flat = (whole.T if transposed else whole).reshape(-1)
    for start in range(36):
        for stop in range(start, 36):
            assert torch.equal(stored.read(start, stop, transposed), flat[start:stop])


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 4), "a": torch.randn(2), "c": torch.tensor(1.5), "d": torch.empty(0, 2)}
    with SafetensorsWriter(
        tmp_path / "w.safetensors", {n: tuple(t.shape) for n, t in tensors.items()}, torch.bfloat16
    ) as f:
        for name in reversed(tensors):
            f.write(name, tensors[name])
    read = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert {n: t.bfloat16() for n, t in tensors.items()}.keys() == read.keys()
    assert all(torch.equal(read[n], t.bfloat16()) for n, t in tensors.items())
    with safetensors.safe_open(tmp_path / "w.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_a_file_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    with (
        pytest.raises(MismatchError, match="1 tensors were never written: b"),
        SafetensorsWriter(file, {"a": (2,), "b": (1,)}, torch.float32) as f,
    ):
        f.write("a", torch.zeros(2))
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(file, {"a": (2,)}, torch.float32):
        raise KeyboardInterrupt
    with (
        pytest.raises(MismatchError, match=r"a has shape \[3\], not \[2\]"),
        SafetensorsWriter(file, {"a": (2,)}, torch.float32) as f,
    ):
        f.write("a", torch.zeros(3))
    with (
        pytest.raises(MismatchError, match="a was written twice"),
        SafetensorsWriter(file, {"a": (2,)}, torch.float32) as f,
    ):
        f.write("a", torch.zeros(2))
        f.write("a", torch.zeros(2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_cut_short(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DamagedError, match=r"x\.safetensors"):
        read_header(file)


@pytest.mark.parametrize(
    "header",
    [
        b"[1, 2]",
        b"{not json",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b"\xff\xfe",
    ],
)
def test_headers_that_lie(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DamagedError, match=r"x\.safetensors"):
        read_header(file)


def test_a_header_that_claims_to_be_huge(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(DamagedError, match="header of 4611686018427387904 bytes"):
        read_header(file)


def test_a_dtype_that_we_cannot_read(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1))
    with pytest.raises(CheckpointError, match="a is stored as F4; readable are"):
        read_header(file)
