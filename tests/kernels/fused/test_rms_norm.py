"""RMSNorm in one launch: the plain form's numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernels import rms_norm as norms
from shardwise.kernels.rms_norm import plain_rms_norm, rms_norm

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
