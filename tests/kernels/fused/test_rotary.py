"""Rotary positions in one launch: the plain form's numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernels.rotary import angles, plain_rotate, rotate, split_heads

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


@pytest.mark.parametrize("which", range(3))
@DRAWN
@given(SIZES.filter(lambda s: len(s) == 3), st.integers(1, 3), st.integers(1, 20), st.sampled_from(DTYPES))
def test_split_heads(which: int, sizes: list[int], group: int, half: int, dtype: torch.dtype) -> None:
    """Each of queries, keys and values, with gradients; values are copied to the bit."""
    batch, keys, places = sizes
    counts, size = (keys * group, keys, keys), 2 * half
    x = torch.randn(batch, places, sum(counts) * size, device=DEVICE).to(dtype)
    at = angles(5, 5 + places, size, 1e4, DEVICE)
    rounded = type(at)(*(part.to(dtype).double() for part in at))

    def plain(x: torch.Tensor) -> torch.Tensor:
        part = x.unflatten(-1, (-1, size)).split(list(counts), 2)[which].transpose(1, 2)
        return part.contiguous() if which == 2 else plain_rotate(part, rounded)

    compare(lambda x: split_heads(x, counts, size, at)[which], plain, [x], BOUNDS[dtype])
    assert split_heads(x, counts, size, at)[which].is_contiguous()
    if which == 2:
        assert torch.equal(split_heads(x, counts, size, at)[2], plain(x))


def test_gradients_of_any_strides_are_joined() -> None:
    """Attention returns gradients whose heads and positions are transposed; several programs."""
    x = torch.randn(2, 40, 7 * 8 + 8, device=DEVICE)[..., :56].requires_grad_()
    at = angles(0, 40, 8, 1e4, DEVICE)
    grads = [torch.randn(2, 40, heads, 8, device=DEVICE).transpose(1, 2) for heads in (3, 2, 2)]
    (found,) = torch.autograd.grad(split_heads(x, (3, 2, 2), 8, at), x, grads)
    q, k, v = (each.transpose(1, 2) for each in x.unflatten(-1, (-1, 8)).split([3, 2, 2], 2))
    (expected,) = torch.autograd.grad((plain_rotate(q, at), plain_rotate(k, at), v), x, grads)
    assert torch.allclose(found, expected, atol=1e-6)


def test_values_beside_infinite_numbers_are_copied() -> None:
    x = torch.full((1, 2, 3 * 4), float("inf"), device=DEVICE)
    at = angles(0, 2, 4, 1e4, DEVICE)
    assert split_heads(x, (1, 1, 1), 4, at)[2].isinf().all()
