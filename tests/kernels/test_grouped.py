"""Grouped products equal plain ones, whatever the counts, and keep the same tensors."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.grouped import (
    gated_experts,
    grouped_product,
    plain_gated_experts,
    plain_grouped_product,
    stretches,
)
from shardwise.precision.operations import DtypeByOperation

COUNTS = [(3, 4), (7, 0), (0, 7), (0, 0, 5, 2, 0), (0, 0), (1,)]


def parts(counts: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(counts), 6), (len(counts), 4, 6), (sum(counts), 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_equals_the_plain_form(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, weights, grad = parts(counts, dtype)
    rows.requires_grad_(), weights.requires_grad_()
    found, expected = grouped_product(rows, weights, counts), plain_grouped_product(rows, weights, counts)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad(found, [rows, weights], grad)
    theirs = torch.autograd.grad(expected, [rows, weights], grad)
    torch.testing.assert_close(ours, theirs)


def test_a_frozen_side_has_no_gradient() -> None:
    rows, weights, grad = parts((3, 4), torch.float64)
    weights.requires_grad_()
    grouped_product(rows, weights, (3, 4)).backward(grad)
    expected = torch.stack([grad[:3].T @ rows[:3], grad[3:].T @ rows[3:]])
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, expected)
    assert rows.grad is None


def gated(counts: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(counts), 6), (len(counts), 8, 6), (len(counts), 6, 4), (sum(counts), 6)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_gated_experts_equal_the_plain_form(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    *leaves, grad = gated(counts, dtype)
    found, expected = gated_experts(*leaves, counts), plain_gated_experts(*leaves, counts)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    )
    with torch.no_grad():
        torch.testing.assert_close(gated_experts(*leaves, counts), found.detach())


@pytest.mark.parametrize("counts", [counts for counts in COUNTS if len(counts) == 2], ids=str)
def test_as_many_tensors_are_kept_whatever_the_counts(counts: tuple[int, ...]) -> None:
    """A rank without rows would end a recomputation before the others, which then wait for it."""
    rows, weights, down, _ = gated(counts, torch.float64)
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        grouped_product(rows, weights, counts)
        gated_experts(rows, weights, down, counts)
    assert kept == 2 + 3 + 2


def test_dtypes_by_operation_are_those_of_a_product() -> None:
    *leaves, _ = gated((3, 4), torch.float32)
    expected = gated_experts(*(leaf.bfloat16() for leaf in leaves), (3, 4))
    for mode in (DtypeByOperation("bf16"), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            found = gated_experts(*leaves, (3, 4))
            product = grouped_product(leaves[0], leaves[1], (3, 4))
        assert torch.equal(found, expected) and product.dtype == torch.bfloat16
        assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(found.sum(), leaves))


def test_stretches_cover_every_row_once() -> None:
    for shape in ((0, 4), (5, 1 << 16), (5, 1 << 20), (3, 0)):
        places = list(stretches(torch.empty(shape)))
        assert [row for place in places for row in range(place.start, place.stop)] == list(range(shape[0]))
    assert len(list(stretches(torch.empty(5, 1 << 16)))) == 3
