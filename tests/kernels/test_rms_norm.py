"""RMSNorm against the formula, in values and in gradients."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.rms_norm import plain_rms_norm, rms_norm


def gradients(function, x: Tensor, weight: Tensor) -> list[Tensor]:
    out = function(x, weight, 1e-5)
    pull = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * pull).sum(), (x, weight))]


def worst(given: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        ((a.double() - b.double()).norm() / b.double().norm()).item()
        for a, b in zip(given, expected, strict=True)
    )


@pytest.mark.parametrize("shape", [(5, 7, 16), (3, 16), (1, 1, 16)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
def test_equals_the_formula(shape: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(16, dtype=dtype, requires_grad=True)
    assert worst(gradients(rms_norm, x, weight), gradients(plain_rms_norm, x, weight)) < bound


def test_gradients_by_finite_differences() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_16_bit_input_is_computed_in_fp32(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(512).to(weight_dtype).requires_grad_()
    given = gradients(rms_norm, x, weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    assert given[0].dtype == given[1].dtype == torch.bfloat16
    assert given[2].dtype == weight_dtype
    # One rounding to bf16 at the end, of 2^-8 at most.
    assert worst(given, gradients(plain_rms_norm, *wide)) < 2**-8


def test_a_gradient_that_is_not_contiguous() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(6, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(6, 4, dtype=torch.float64).T
    given = torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), pull)
    expected = torch.autograd.grad(plain_rms_norm(x, weight, 1e-5), (x, weight), pull)
    assert worst(list(given), list(expected)) < 1e-14


def test_under_autocast_it_is_the_plain_formula() -> None:
    """Autocast would run the reductions of the kernel in bf16 and mix dtypes in one call."""
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = rms_norm(x, weight, 1e-5)
        y.float().sum().backward()
    torch.testing.assert_close(y.float(), plain_rms_norm(x, weight, 1e-5).float())
    assert x.grad is not None
    assert weight.grad is not None
