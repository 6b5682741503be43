"""Tensors of a batch as one copy for each direction."""

import pytest
import torch

from shardwise.parallel.embedding import transfer
from shardwise.parallel.embedding.transfer import SlabRows, on_host, together


def test_rows_are_parted_on_both_sides() -> None:
    rows = SlabRows(torch.arange(5), torch.arange(5) + 10)
    part = rows.part(1, 3)
    assert part.here.tolist() == [1, 2] and part.there.tolist() == [11, 12]


def test_on_the_host_nothing_is_copied() -> None:
    tensors = [torch.arange(3), torch.zeros(2, 2)]
    assert all(a is b for a, b in zip(together(tensors, torch.device("cpu")), tensors, strict=True))
    assert all(a is b for a, b in zip(on_host(tensors), tensors, strict=True))
    assert together([], torch.device("cuda")) == []


def test_tensors_of_any_dtype_and_shape_go_as_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Tensor] = []

    def to_device(packed: torch.Tensor, device: torch.device, is_ours: bool) -> torch.Tensor:
        copies.append(packed)
        return packed.clone()

    monkeypatch.setattr(transfer, "to_device", to_device)
    monkeypatch.setattr(transfer, "pinned_empty", lambda size, dtype: torch.full((size,), 255, dtype=dtype))
    given = [torch.arange(3), torch.rand(2, 3), torch.zeros(0), torch.tensor([True])]
    found = together(given, torch.device("cuda"))
    assert len(copies) == 1 and len(copies[0]) == 32 + 32 + 0 + 16
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, given, strict=True))
    before = found[1]._version
    found[0].add_(1)
    assert found[1]._version == before and found[0].tolist() == [1, 2, 3]
