"""The gate of SwiGLU in one launch: the plain form's numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernels.gated import gated, plain_gated

from .cases import BOUNDS, DEVICE, DRAWN, DTYPES, SIZES, compare


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
