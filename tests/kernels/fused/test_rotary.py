"""Rotary positions in one launch: the plain form's numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernels.rotary import angles, plain_rotate, rotate

from .cases import BOUNDS, DEVICE, DRAWN, DTYPES, SIZES, compare


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
