"""Blocks of columns in a compiled loop."""

import numpy as np
import pytest

from shardwise.kernels.tables.blocks import (
    BLOCK,
    block,
    each,
    each_at,
    lane,
    lanes_of_squares,
    minus,
    multiplied_on,
    no_lanes,
    over,
    plus,
    put,
    times,
    whole,
)
from shardwise.kernels.tables.compiled import has_numba, loop

pytestmark = pytest.mark.skipif(not has_numba(), reason="blocks are values of numba's loops")


@loop
def _all_of_them(x: np.ndarray, y: np.ndarray, number: float, out: np.ndarray) -> None:
    for c in range(0, whole(x.shape[1]), BLOCK):
        a, b = block(x, 1, c), block(y, 0, c)
        put(out, 0, c, plus(a, b))
        put(out, 1, c, minus(a, b))
        put(out, 2, c, times(a, each(number)))
        put(out, 3, c, over(a, each_at(y, 0, 1)))
        put(out, 4, c, multiplied_on(a, a, b))


@loop
def _squares(x: np.ndarray, zero: float, out: np.ndarray) -> None:
    sums = no_lanes(zero)
    for c in range(0, whole(x.shape[1]), BLOCK):
        sums = lanes_of_squares(sums, block(x, 0, c))
    for j in range(4):
        out[j] = lane(sums, j)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_operations_round_as_those_of_numbers_do(dtype: type) -> None:
    drawn = np.random.default_rng(0).normal(size=(3, 20)).astype(dtype)
    x, y = drawn[:2], drawn[2:]
    number, out = dtype(0.3), np.full((5, 20), 7, dtype)
    _all_of_them(x, y, number, out)
    a, b = x[1, :16], y[0, :16]
    assert np.array_equal(out[:4, :16], np.stack([a + b, a - b, a * number, a / y[0, 1]]))
    assert np.allclose(out[4, :16], a + a * b, rtol=1e-5 if dtype == np.float32 else 1e-14)
    assert (out[:, 16:] == 7).all(), "columns outside whole blocks are left to the caller"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares_are_added_to_four_sums_in_the_order_of_columns(dtype: type) -> None:
    x = np.random.default_rng(1).normal(size=(1, 24)).astype(dtype)
    out, expected = np.empty(4, dtype), np.zeros(4, dtype)
    _squares(x, dtype(0), out)
    for j in range(24):
        expected[j % 4] += x[0, j] * x[0, j]
    assert np.array_equal(out, expected)


@loop
def _copied(x: np.ndarray, out: np.ndarray) -> None:
    for c in range(0, whole(x.shape[1]), BLOCK):
        put(out, 0, c, block(x, 1, c))


def test_a_block_of_upper_halves_is_widened() -> None:
    wide = np.random.default_rng(2).normal(size=(2, 16)).astype(np.float32).view(np.uint32)
    out = np.empty((1, 16), np.float32)
    _copied((wide >> 16).astype(np.uint16), out)
    assert np.array_equal(out[0].view(np.uint32), wide[1] >> 16 << 16)
