"""Work is counted by class of operation, and takes the slower of arithmetic and memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.base.hardware import Product
from shardwise.simulate.passes import measure, without_numbers
from shardwise.simulate.storages import LiveBytes
from shardwise.simulate.work import Work, peak_dtype
from tests.simulate.given import hardware


class Net(nn.Module):
    """Two layers, which may be computed again: then the first is, whose result the second keeps."""

    def __init__(self, recomputes: bool, dtype: torch.dtype):
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False, dtype=dtype)
        self.second = nn.Linear(16, 4, bias=False, dtype=dtype)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.layers, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.layers(x)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def counted(recomputes: bool, dtype: torch.dtype = torch.float32) -> tuple[Work, int]:
    """Work and bytes touched of a forward and backward pass of 32 samples."""
    with without_numbers():
        net, x = Net(recomputes, dtype), torch.empty(32, 8, dtype=dtype)
        passed, _ = measure(net, {"": 0}, x, lambda: [net(x).sum()])
    total, touched = Work(), 0
    for share in passed.shares.values():
        total, touched = total.then(share.work), touched + share.touched_bytes
    assert total.flops == passed.flops
    return total, touched


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_products_are_counted_by_kind_dtype_and_size(dtype: torch.dtype, name: str) -> None:
    first, second = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    work, _ = counted(False, dtype)
    # Forward, gradient of the weight, and of the second layer's input.
    assert work.products == {Product("product", name, first): 2, Product("product", name, second): 3}
    moved = (32 * 8 + 8 * 16 + 32 * 16) * dtype.itemsize
    assert work.product_bytes[Product("product", name, first)] == 2 * moved
    assert work.repeated_flops == 0
    again, _ = counted(True, dtype)
    assert again.repeated_flops == first == again.flops - work.flops
    assert again.calls > work.calls > 5


def test_a_product_takes_the_slower_of_arithmetic_and_memory() -> None:
    small, large = Product("product", "fp32", 100), Product("product", "fp32", 10_000)
    work = Work({small: 2, large: 1}, {small: 500, large: 100}, calls=7)
    rates = replace(hardware(flops_s=100.0, host_bytes_s=10.0), operation_s=3.0)
    assert work.seconds(rates, 40, "host") == pytest.approx(max(2, 50) + max(100, 10) + 40 / 10 + 7 * 3.0)


def test_a_dtype_without_units_is_priced_as_fp32() -> None:
    rates = replace(hardware(flops_s=10.0), peaks={"fp16": 80.0, "fp32": 10.0})
    assert peak_dtype(rates, "fp16") == "fp16" and peak_dtype(rates, "bf16") == "fp32"
    assert peak_dtype(replace(rates, peaks={"fp16": 80.0, "fp8": 160.0}), "bf16") == "fp16"
    one = Work({Product("product", "bf16", 100): 1})
    assert one.seconds(rates, 0, "host") == pytest.approx(10.0)


def test_other_operations_are_counted_by_class_and_bytes() -> None:
    with without_numbers():
        heads, weight = torch.empty(4, 6, 8), torch.empty(16)
        with LiveBytes() as live:
            heads.exp()
            heads.transpose(0, 1).contiguous()
            heads.clone()
            torch.cat([heads[..., 4:], heads[..., :4]], -1)
            torch.softmax(heads, -1)
            heads.mul_(2)
            torch.bmm(heads, heads.transpose(1, 2))
            weight.index_add_(0, torch.empty(2, dtype=torch.int64), torch.empty(2))
        work = live.work.take()
    whole = 2 * heads.nbytes
    assert work.others == {
        ("function", whole): 2,
        ("copy", whole): 2,
        ("arithmetic", whole): 2,
        # Two indices and two sums are read, and the sums' places are read and written.
        ("arithmetic", 2 * 8 + 3 * 2 * 4): 1,
    }
    assert [product.kind for product in work.products] == ["batched"] and work.calls == 8
    assert sum(nbytes * calls for (_, nbytes), calls in work.others.items()) == live.touched


def test_other_operations_take_the_rate_of_their_class() -> None:
    work = Work(calls=3, others={("function", 100): 2, ("copy", 50): 1})
    rates = hardware(host_bytes_s=10.0)
    assert work.seconds(rates, 250, "host") == pytest.approx(25.0), "hardware without classes has one rate"
    classed = replace(rates, operations={"function": ((1.0, 4.0),)})
    assert work.seconds(classed, 250, "host") == pytest.approx(200 / 4 + 50 / 10)
    assert work.then(work).others == {("function", 100): 4, ("copy", 50): 2}
    assert work.seconds(classed, 280, "host") == pytest.approx(200 / 4 + 80 / 10), (
        "the rest by the memory's rate"
    )
