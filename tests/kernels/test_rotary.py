"""Rotary positions: the formula, distances alone, and the slower angles of long contexts."""

import math

import pytest
import torch

from shardwise.kernels.rotary import FrequencyScaling, RotaryAngles, angles, plain_rotate, rotate

CPU = torch.device("cpu")


def at(start: int, stop: int, size: int = 8) -> RotaryAngles:
    return angles(start, stop, size, 10_000.0, CPU)


def test_equals_the_formula_in_values_and_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    out, plain = rotate(x, at(0, 5)), plain_rotate(x, at(0, 5))
    assert torch.allclose(out, plain, atol=1e-15, rtol=0)
    assert torch.allclose(*[torch.autograd.grad(y, x, pull)[0] for y in (out, plain)], atol=1e-15, rtol=0)


def test_each_pair_turns_by_its_angle() -> None:
    x = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    x[..., 1] = 1
    out = rotate(x, at(3, 7))
    for i, position in enumerate(range(3, 7)):
        angle = position / 10_000 ** (2 / 8)
        assert out[0, 0, i, 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert out[0, 0, i, 5].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        return (rotate(q, at(i, i + 1)) * rotate(k, at(j, j + 1))).sum().item()

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-2)


def test_strided_input_gives_contiguous_heads() -> None:
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    assert rotate(x, at(0, 5)).is_contiguous()
    assert torch.equal(rotate(x, at(0, 5)), rotate(x.contiguous(), at(0, 5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_is_that_of_the_input(dtype: torch.dtype) -> None:
    assert rotate(torch.ones(1, 1, 2, 8, dtype=dtype), at(0, 2)).dtype == dtype
    assert at(0, 2).cos.dtype == torch.float32


def test_the_stretch_slows_slow_angles_and_leaves_fast_ones() -> None:
    scaling = FrequencyScaling(factor=8, low=1, high=4, original_context=256)
    plain = angles(1, 2, 64, 10_000.0, CPU).sin.asin()[0]
    slowed = angles(1, 2, 64, 10_000.0, CPU, scaling).sin.asin()[0]
    turns = 256 / 10_000 ** (torch.arange(0, 64, 2) / 64) / (2 * math.pi)
    ratio = slowed / plain
    assert torch.allclose(ratio[turns > 4][1:], torch.tensor(1.0), atol=1e-5)
    assert torch.allclose(ratio[turns < 1], torch.tensor(1 / 8), rtol=1e-3)
    between = ratio[(turns > 1) & (turns < 4)]
    expected = (turns[(turns > 1) & (turns < 4)] - 1) / 3
    assert torch.allclose(between, expected + (1 - expected) / 8, rtol=1e-4)
