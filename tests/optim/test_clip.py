"""The global norm over any cut."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.optim.clip import clip_factor, share, square_sum


@given(st.integers(0, 20_000), st.integers(1, 7), st.integers(0, 1000))
def test_shares_cover_each_element_once(elements: int, count: int, seed: int) -> None:
    flat = torch.arange(elements)
    assert torch.cat([share(flat, i, count) for i in range(count)]).tolist() == flat.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [0, 1, 4096, 12_289])
def test_square_sum(dtype: torch.dtype, elements: int) -> None:
    flat = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = square_sum(flat)
    assert found.dtype is torch.float64
    wanted = float(flat.double().square().sum())
    assert float(found) == pytest.approx(wanted, rel=1e-6 if dtype is not torch.float64 else 1e-13)


def test_what_is_not_finite_shows() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 4999):
            flat = torch.zeros(5000)
            flat[place] = bad
            assert not math.isfinite(float(square_sum(flat)))


def test_factor_is_torchs() -> None:
    for norm, limit in ((0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (3.0, 1.0), (1e30, 0.1)):
        parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        parameter.grad = torch.full((1,), norm, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([parameter], limit)
        assert norm * clip_factor(norm, limit) == pytest.approx(float(parameter.grad), rel=1e-12)
    assert clip_factor(5.0, None) == 1.0
    assert clip_factor(float("nan"), 1.0) == 1.0
