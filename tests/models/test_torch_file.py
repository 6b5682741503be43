"""Files of torch.save: every tensor under its own name, or a refusal that names the one that cannot be."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.formats.safetensors import SafetensorsWriter
from shardwise.models.torch_file import read_torch_file, summary


def saved(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "x.pt")
    return folder / "x.pt"


def test_tensors_in_lists_and_tuples_are_not_dropped(tmp_path: Path) -> None:
    a, b, c = torch.randn(2, 3), torch.randn(4), torch.arange(5)
    content = {"model": {"a": a, "layers": [b, {"c": c}]}, "pair": (a.T, 0.5), "epoch": 3, "args": None}
    tensors, left_out = read_torch_file(saved(tmp_path, content))
    expected = {"model.a": a, "model.layers.0": b, "model.layers.1.c": c, "pair.0": a.T}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert left_out == ["pair.1", "epoch", "args"]
    assert summary(left_out) == "left out, no tensors: pair.1, epoch, args"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, r"two entries are called 'a\.b'"),
        ({1: torch.ones(2), "1": torch.zeros(2)}, "two entries are called '1'"),
        ({"__metadata__": torch.ones(1)}, "which safetensors reserves"),
        (
            {"x": torch.ones(1).expand(3 * 10**9)},
            "x of shape .* has only 4 bytes in the file: it is an expanded",
        ),
        ({"x": torch.eye(3).to_sparse()}, "x is torch.sparse_coo"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, "x is torch.complex128, which the file cannot hold"),
        (torch.ones(2), "one tensor without a name"),
        ({"x\x1b[2J": torch.ones(2)}, "a name must be printable"),
        ({(1, 2): torch.ones(2)}, "a key of the file is a tuple"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_cannot_be_written_as_it_is_is_named(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_torch_file(saved(tmp_path, content))


def test_what_holds_itself(tmp_path: Path) -> None:
    content: dict[str, Any] = {"x": torch.ones(1)}
    content["again"] = content
    with pytest.raises(CheckpointError, match="'again' contains itself"):
        read_torch_file(saved(tmp_path, content))


def test_tied_and_cut_tensors_keep_their_values(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    content = {"embed": whole, "head": whole, "half": whole[::2], "empty": torch.empty(0, 3)}
    tensors, _ = read_torch_file(saved(tmp_path, content))
    out = tmp_path / "x.safetensors"
    with SafetensorsWriter(out, {n: tuple(t.shape) for n, t in tensors.items()}, torch.float32) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    read = load_file(out)
    assert all(torch.equal(read[name], content[name]) for name in content)


def test_a_part_that_is_shorter_than_the_pickle_says(tmp_path: Path) -> None:
    """torch reads on behind it, into the next tensor's bytes, and says nothing."""
    path = saved(tmp_path, {"a": torch.randn(50), "b": torch.randn(50)})
    with zipfile.ZipFile(path) as archive:
        parts = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts:
            archive.writestr(name, data[:8] if name.endswith("data/0") else data)
    with pytest.raises(DamagedError, match="not where its parts are"):
        read_torch_file(path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.zeros(500)})
    data = bytearray(path.read_bytes())
    data[data.index(bytes(1000)) + 300] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"the CRC-32 of its part '.*data/0' differs"):
        read_torch_file(path)


@pytest.mark.parametrize("other", ["data/0", "DATA/0"])
def test_two_parts_of_one_name_are_refused(tmp_path: Path, other: str) -> None:
    """torch looks parts up by name, whatever its case, and read the second."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(f"{root}/{other}", torch.ones(4).numpy().tobytes())
    with pytest.raises(DamagedError, match=r"two of its parts are called '.*data/0'"):
        read_torch_file(path)
