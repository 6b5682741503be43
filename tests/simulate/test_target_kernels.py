"""A pass on shapes runs the kernels of the target device, on a machine without the device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.attention import causal_attention
from shardwise.simulate.passes import without_numbers
from shardwise.simulate.storages import LiveBytes, composition
from shardwise.simulate.target_kernels import kernels_like

B, H, T, K = 2, 3, 256, 16


def made(
    operation: Any, dtype: torch.dtype, device: str, names: tuple[str, ...] = (), **given: Any
) -> LiveBytes:
    """The storages of one forward and backward pass of an attention."""
    live = LiveBytes(records=True)
    with without_numbers(), kernels_like(device, names):
        q, k, v = (torch.empty(B, H, T, K, dtype=dtype, requires_grad=True) for _ in range(3))
        with live:
            out = operation(q, k, v, **given)
            out.sum().backward()
    return live


def sizes(live: LiveBytes) -> set[int]:
    return {entry.origin.nbytes for entry in live.log}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_on_a_device_keeps_no_scores(dtype: torch.dtype) -> None:
    largest = B * H * T * K * dtype.itemsize
    assert max(sizes(made(causal_attention, dtype, "cpu"))) > largest, "a CPU keeps blocks of scores"
    there = made(causal_attention, dtype, "cuda")
    assert max(sizes(there)) == largest
    assert any(nbytes == B * H * T * 4 for nbytes in sizes(there)), "one number a row: lse"


def test_named_kernels_decide() -> None:
    attend = F.scaled_dot_product_attention
    scores = B * H * T * T * 2
    assert scores in sizes(made(attend, torch.bfloat16, "cuda", ("math",)))
    assert scores not in sizes(made(attend, torch.bfloat16, "cuda", ("flash",)))
    mask = torch.ones(T, T, dtype=torch.bool)
    names = {
        entry.origin.what
        for entry in made(attend, torch.bfloat16, "cuda", attn_mask=mask).log
        if "attention" in entry.origin.what
    }
    assert all("efficient" in name for name in names) and names, "flash takes no mask"


def test_norm_and_dropout_on_a_device_are_one_kernel() -> None:
    weight = torch.ones(64, dtype=torch.bfloat16)

    def keeps(device: str, function: Any) -> int:
        live = LiveBytes(records=True)
        with without_numbers(), kernels_like(device):
            x = torch.empty(32, 64, dtype=torch.bfloat16, requires_grad=True)
            with live:
                kept: Tensor = function(x)
                assert kept.shape == x.shape
                return live.held

    rows, elements = 32 * 4, 32 * 64 * 2
    assert keeps("cuda", lambda x: F.rms_norm(x, (64,), weight)) == elements + rows
    assert keeps("cpu", lambda x: F.rms_norm(x, (64,), weight)) > elements + rows
    assert keeps("cuda", lambda x: F.dropout(x, 0.1)) == elements + elements // 2


def test_norm_and_dropout_on_a_device_read_and_write_each_element_once() -> None:
    """The price of a pass counts these bytes: one tensor in and one out, and two in and one out on the way back."""
    weight = torch.ones(64, dtype=torch.bfloat16)
    elements = 4096 * 64 * 2

    def touched(function: Any) -> float:
        live = LiveBytes()
        with without_numbers(), kernels_like("cuda"):
            x = torch.empty(4096, 64, dtype=torch.bfloat16, requires_grad=True)
            with live:
                grad = torch.empty_like(x)
                function(x).backward(grad)
        return live.touched / elements

    assert touched(lambda x: F.rms_norm(x, (64,), weight)) == pytest.approx(5, abs=0.02)
    assert touched(lambda x: F.dropout(x, 0.1)) == pytest.approx(5, abs=0.02), "a mask of one byte, both ways"


def test_a_composition_is_that_of_the_largest_moment() -> None:
    live = LiveBytes(records=True)
    with live:
        a = torch.empty(10)
        b = torch.empty(20)
        del a
        c = torch.empty(5)
    most, end = composition(live.log)
    assert sum(each.nbytes * count for each, count in most.items()) == live.most == 120
    assert {each.nbytes for each in end} == {80, 20} and live.held == 100
    del b, c
    assert live.held == 0
