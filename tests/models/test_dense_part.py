"""The file of a dense part: the same bytes whoever writes it, damage is named, and another model is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import DamagedError, MismatchError
from shardwise.models.dense_part import (
    DenseEntry,
    DensePart,
    DenseToWrite,
    check_same_model,
    dense_file_stem,
    read_dense,
    write_dense,
)

WEIGHTS = {"b.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(3, dtype=torch.bfloat16)}


def in_parts() -> Iterator[tuple[str, int, Tensor]]:
    yield "b.weight", 4, torch.tensor([4.0, 5.0])
    yield "a.bias", 0, WEIGHTS["a.bias"]
    yield "b.weight", 0, torch.arange(4.0)


def test_order_and_parts_leave_the_bytes_as_they_are(tmp_path: Path) -> None:
    whole = DensePart(WEIGHTS, {"step": 3})
    sums = [write_dense(tmp_path / "whole.safetensors", whole.to_write())]
    turned = DensePart(dict(reversed(WEIGHTS.items())), {})
    sums.append(write_dense(tmp_path / "turned.safetensors", turned.to_write()))
    cut = DenseToWrite(whole.to_write().shapes, whole.to_write().dtypes, {}, in_parts)
    sums.append(write_dense(tmp_path / "cut.safetensors", cut))
    assert len(set(sums)) == 1 and cut.nbytes == 6 * 4 + 3 * 2
    entry = DenseEntry(file="cut.safetensors", sha256=sums[0], about={"step": 3})
    found = read_dense(tmp_path, "index.json", entry)
    assert found.about == {"step": 3} and all(torch.equal(found.tensors[n], t) for n, t in WEIGHTS.items())
    with pytest.raises(MismatchError, match="never written: b.weight"):
        lacks = cut._replace(parts=lambda: iter([*in_parts()][:2]))
        write_dense(tmp_path / "lacks.safetensors", lacks)


def test_other_bytes_and_other_folders_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "d.safetensors"
    entry = DenseEntry(file=file.name, sha256=write_dense(file, DensePart(WEIGHTS, {}).to_write()), about={})
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(
        DamagedError, match=r"d.safetensors: its bytes do not match their SHA-256 in index.json"
    ):
        read_dense(tmp_path, "index.json", entry)
    with pytest.raises(DamagedError, match="index.json: the dense part names a file outside the folder"):
        read_dense(tmp_path, "index.json", entry.model_copy(update={"file": "../d.safetensors"}))


def test_another_model_is_refused_by_its_first_differences() -> None:
    here = DensePart(WEIGHTS, {"click_model": {"dense": 3}})
    check_same_model("x", here, here)
    for change, match in (
        ({"b.weight": torch.zeros(3, 2)}, r"'b.weight' is \[3, 2\] in torch.float32 .* and \[2, 3\]"),
        ({"a.bias": torch.ones(3)}, r"'a.bias' is \[3\] in torch.float32 .* in torch.bfloat16 in the reader"),
        ({"c": torch.ones(1)}, "'c' is only in the increment"),
    ):
        with pytest.raises(MismatchError, match=match):
            check_same_model("x", DensePart({**WEIGHTS, **change}, here.about), here)
    with pytest.raises(MismatchError, match="x: its dense part is of another model: the descriptions"):
        check_same_model("x", here._replace(about={"click_model": {"dense": 4}}), here)


def test_its_file_has_the_name_of_no_table() -> None:
    assert dense_file_stem(["user"]) == "dense" and dense_file_stem(["dense", "dense_"]) == "dense__"
