"""RMSNorm in one launch: the plain form's numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels import rms_norm as norms
from shardwise.kernels.rms_norm import joins_sum, plain_rms_norm, rms_norm, rms_norm_of_sum

from .cases import BOUNDS, DEVICE, DRAWN, DTYPES, SIZES, compare


@DRAWN
@given(SIZES, st.integers(1, 70), st.sampled_from(DTYPES), st.booleans())
def test_rms_norm(sizes: list[int], width: int, dtype: torch.dtype, wide_weight: bool) -> None:
    x = torch.randn(*sizes, width, device=DEVICE).to(dtype)
    weight = torch.randn(width, device=DEVICE).to(torch.float32 if wide_weight else dtype)
    # Terms of x's gradient are so large, and cancel in a row of one element.
    largest = float((x.double().square().mean(-1) + 1e-3).rsqrt().max())
    both = (lambda x, w: rms_norm(x, w, 1e-3)), (lambda x, w: plain_rms_norm(x, w, 1e-3))
    compare(*both, [x, weight], BOUNDS[dtype], max(1.0, largest))


def test_rms_norm_over_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient is then a sum within programs, and over them."""
    from shardwise.kernels.fused import rms_norm as kernels

    monkeypatch.setattr(kernels, "_PROGRAMS", 3)
    monkeypatch.setattr(kernels, "_TILE", 32)
    x, weight = torch.randn(23, 13, device=DEVICE), torch.randn(13, device=DEVICE)
    compare(lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: plain_rms_norm(x, w, 1e-3), [x, weight], 1e-6)


def test_rms_norm_of_strides_and_of_nothing() -> None:
    x, weight = torch.randn(7, 4, 6, device=DEVICE).transpose(0, 1), torch.randn(6, device=DEVICE)
    compare(lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: plain_rms_norm(x, w, 1e-3), [x, weight], 1e-6)
    empty = torch.randn(0, 6, device=DEVICE, requires_grad=True)
    held = weight.requires_grad_()
    assert rms_norm(empty, held, 1e-3).shape == (0, 6)
    assert not torch.autograd.grad(rms_norm(empty, held, 1e-3).sum(), held)[0].any()


def test_a_row_too_wide_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_WIDEST", 4)
    monkeypatch.setattr(norms, "_normed", None)
    x, weight = torch.randn(2, 5, device=DEVICE), torch.randn(5, device=DEVICE)
    assert torch.allclose(rms_norm(x, weight, 1e-3), plain_rms_norm(x, weight, 1e-3))


def _both(pair: tuple[Tensor, Tensor]) -> Tensor:
    """The sum and its norm in one tensor, so that gradients reach both."""
    return torch.cat([pair[0], pair[1]], -1)


@DRAWN
@given(SIZES, st.integers(1, 70), st.sampled_from(DTYPES))
def test_rms_norm_of_sum(sizes: list[int], width: int, dtype: torch.dtype) -> None:
    x, added = (torch.randn(*sizes, width, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=DEVICE).to(dtype)
    assert joins_sum(weight, x, added)
    # The sum is rounded before the norm, as it is where the two are apart.
    rounding = (x + added).double() - (x.double() + added.double())

    def plain(x: Tensor, added: Tensor, w: Tensor) -> Tensor:
        total = x + added + rounding
        return _both((total, plain_rms_norm(total, w, 1e-3)))

    largest = float(((x + added).double().square().mean(-1) + 1e-3).rsqrt().max())
    bound = BOUNDS[dtype]
    compare(
        lambda x, a, w: _both(rms_norm_of_sum(x, a, w, 1e-3)),
        plain,
        [x, added, weight],
        bound,
        max(1.0, largest),
    )
    assert torch.equal(rms_norm_of_sum(x, added, weight, 1e-3)[0], x + added)


def test_rms_norm_beside_its_input_adds_their_gradients() -> None:
    x, weight = torch.randn(3, 4, 6, device=DEVICE), torch.randn(6, device=DEVICE)
    compare(
        lambda x, w: _both(rms_norm_of_sum(x, None, w, 1e-3)),
        lambda x, w: _both((x, plain_rms_norm(x, w, 1e-3))),
        [x, weight],
        1e-6,
    )
    assert torch.equal(rms_norm_of_sum(x, None, weight, 1e-3)[0], x)


def test_sums_of_strides_and_of_nothing() -> None:
    x, added = (torch.randn(7, 4, 6, device=DEVICE).transpose(0, 1) for _ in range(2))
    weight = torch.randn(6, device=DEVICE, requires_grad=True)
    compare(
        lambda x, a, w: _both(rms_norm_of_sum(x, a, w, 1e-3)),
        lambda x, a, w: _both((x + a, plain_rms_norm(x + a, w, 1e-3))),
        [x, added, weight.detach()],
        1e-6,
    )
    empty = torch.randn(0, 6, device=DEVICE, requires_grad=True)
    total, out = rms_norm_of_sum(empty, empty, weight, 1e-3)
    assert total.shape == out.shape == (0, 6)
    assert not torch.autograd.grad((total + out).sum(), weight)[0].any()


def test_unlike_dtypes_are_summed_apart() -> None:
    """Then the weights are those of a mode that chooses dtypes by operation, or of norms kept in fp32."""
    x, weight = torch.randn(2, 6, device=DEVICE), torch.randn(6, device=DEVICE)
    assert joins_sum(weight, x)
    assert not joins_sum(weight, x, x.bfloat16())
    assert not joins_sum(weight, x.bfloat16())
    assert not joins_sum(weight.double(), x.double())
