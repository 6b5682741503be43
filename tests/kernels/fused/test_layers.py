"""RMSNorm, rotary positions and the gate of SwiGLU, each in one launch: the plain form's numbers."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels import rms_norm as norms
from shardwise.kernels.gated import gated, plain_gated
from shardwise.kernels.rms_norm import plain_rms_norm, rms_norm
from shardwise.kernels.rotary import angles, plain_rotate, rotate

from .cases import BOUNDS, DEVICE, DRAWN, DTYPES, away, given_and_gradients

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def compare(
    fused: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    bound: float,
    least: float = 1,
) -> None:
    """Values and gradients, against the reference in fp64 on the same rounded inputs; ``least``: of terms that may
    cancel each other."""
    found = given_and_gradients(fused, inputs)
    expected = given_and_gradients(reference, [x.detach().double() for x in inputs])
    for a, b, x in zip(found, expected, [inputs[0], *inputs], strict=True):
        assert a.dtype == x.dtype
        assert away(a, b, least=least) < bound


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


@DRAWN
@given(SIZES.filter(lambda s: len(s) == 3), st.integers(1, 20), st.sampled_from(DTYPES), st.booleans())
def test_rotate(sizes: list[int], half: int, dtype: torch.dtype, is_dense: bool) -> None:
    batch, heads, places = sizes
    x = torch.randn(batch, places, heads, 2 * half, device=DEVICE).to(dtype).transpose(1, 2)
    at = angles(5, 5 + places, 2 * half, 1e4, DEVICE)
    # What is rounded before the products is the same in both.
    rounded = type(at)(*(part.to(dtype).double() for part in at))
    held = x.contiguous() if is_dense else x
    compare(lambda x: rotate(x, at), lambda x: plain_rotate(x, rounded), [held], BOUNDS[dtype])
    assert rotate(held, at).is_contiguous()


def test_rotate_over_several_programs() -> None:
    x = torch.randn(2, 3, 40, 16, device=DEVICE)[..., :8]
    at = angles(0, 40, 8, 1e4, DEVICE)
    compare(lambda x: rotate(x, at), lambda x: plain_rotate(x, at), [x], 1e-6)


@DRAWN
@given(SIZES, st.integers(1, 40), st.sampled_from(DTYPES))
def test_gated(sizes: list[int], hidden: int, dtype: torch.dtype) -> None:
    x = torch.randn(*sizes, 2 * hidden, device=DEVICE).to(dtype) * 3
    compare(gated, plain_gated, [x], BOUNDS[dtype])


def test_gated_over_several_programs_and_of_strides() -> None:
    x = torch.randn(2, 3, 2 * 1030, device=DEVICE).transpose(0, 1)
    compare(gated, plain_gated, [x], 1e-6)


def test_a_wrong_kernel_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.kernels.fused import gated as kernels

    monkeypatch.setattr(kernels, "gradient", lambda grad, gate_up: torch.zeros_like(gate_up))
    with pytest.raises(AssertionError):
        compare(gated, plain_gated, [torch.randn(2, 6, device=DEVICE)], 1e-6)
