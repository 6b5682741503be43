"""Work is counted by class of operation, and takes the slower of arithmetic and memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.base.hardware import Product
from shardwise.simulate.passes import measure, without_numbers
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
