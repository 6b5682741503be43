"""Small functions that scripts import from DeepSpeed."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.deepspeed.calls.small_functions import (
    call_to_str,
    clip_grad_norm_,
    clone_tensors_for_torch_save,
    ensure_directory_exists,
    partition_balanced,
    partition_uniform,
    prefix_sum_inc,
    recursive_getattr,
    required_torch_version,
)


def test_parts_of_equal_length_and_of_equal_weight() -> None:
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10] and partition_uniform(2, 3) == [0, 1, 2, 2]
    weights = [5.0, 1.0, 1.0, 4.0, 2.0, 2.0]
    for parts in (1, 2, 3):
        best = min(
            sum(sum(weights[a:b]) ** 2 for a, b in zip((0, *cuts), (*cuts, 6), strict=True))
            for cuts in combinations(range(7), parts - 1)
        )
        borders = partition_balanced(weights, parts)
        assert len(borders) == parts + 1 and (borders[0], borders[-1]) == (0, 6)
        assert sum(sum(weights[a:b]) ** 2 for a, b in zip(borders, borders[1:], strict=False)) == best
    for function in (lambda: partition_uniform(3, 0), lambda: partition_balanced([1.0], 0)):
        with pytest.raises(UsageError, match="0 parts"):
            function()
    assert prefix_sum_inc([1, 2, 3]) == [1, 3, 6]


def test_gradients_of_one_or_of_many_are_clipped() -> None:
    for given in (lambda p: p, lambda p: iter([p])):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        assert float(clip_grad_norm_(given(parameter), 1.0)) == 5.0
        assert torch.allclose(parameter.grad, torch.tensor([0.6, 0.8]))


def test_a_copy_for_a_file_holds_the_elements_of_a_view_alone() -> None:
    buffer = torch.arange(100.0)
    given = {"a": [buffer[:2]], "b": (buffer[2:3].requires_grad_(), "text"), "c": 3}
    copied = clone_tensors_for_torch_save(given)
    assert copied["a"][0].untyped_storage().nbytes() == 8 and copied["a"][0].tolist() == [0, 1]
    assert isinstance(copied["b"], tuple) and not copied["b"][0].requires_grad and copied["b"][1] == "text"
    assert copied["c"] == 3


def test_versions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert (
        required_torch_version()
        and required_torch_version(2.1)
        and required_torch_version(min_version="2.10")
    )
    assert not required_torch_version(2.11) and not required_torch_version(max_version=2.9)
    assert required_torch_version(2.0, 3.0) and not required_torch_version(max_version=1.13)


def test_calls_names_and_folders(tmp_path: Path) -> None:
    assert call_to_str("f", 1, "a", b=2) == "f(1, 'a', b=2)" and call_to_str("f") == "f()"
    assert recursive_getattr(SimpleNamespace(a=SimpleNamespace(b=3)), "a.b") == 3
    ensure_directory_exists(tmp_path / "a" / "b" / "file")
    ensure_directory_exists(tmp_path / "a" / "b" / "file")
    assert (tmp_path / "a" / "b").is_dir() and not (tmp_path / "a" / "b" / "file").exists()
