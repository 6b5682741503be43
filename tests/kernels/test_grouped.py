"""Grouped products equal plain ones, whatever the counts, and keep the same tensors."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.grouped import grouped_product, plain_grouped_product, swiglu

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


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_as_many_tensors_are_kept_whatever_the_counts(counts: tuple[int, ...]) -> None:
    """A rank without rows would end a recomputation before the others, which then wait for it."""
    rows, weights, _ = parts(counts, torch.float64)
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        swiglu(grouped_product(rows.requires_grad_(), weights.requires_grad_(), counts))
    assert kept == 3


@pytest.mark.parametrize("rows", [0, 5])
def test_swiglu(rows: int) -> None:
    given = torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(swiglu, given.requires_grad_())
    gate, up = given.chunk(2, -1)
    torch.testing.assert_close(swiglu(given), torch.nn.functional.silu(gate) * up)
