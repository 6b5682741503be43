"""Uniform numbers of rows in one launch: the plain form's bits, wherever a row begins."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernels.uniform import uniform_rows

from .cases import DEVICE, DRAWN, plain

NUMBERS = st.integers(0, 2**31 - 1) | st.integers(2**32, 2**40)
"""Triton's interpreter trips over the integers between."""


@DRAWN
@given(
    st.lists(st.tuples(st.integers(0, 2**20), NUMBERS), max_size=5),
    st.integers(1, 20),
    NUMBERS | st.integers(2**62, 2**64 - 2**32),
    NUMBERS,
    NUMBERS,
)
def test_the_plain_forms_bits(
    rows: list[tuple[int, int]], width: int, key: int, call: int, step: int
) -> None:
    starts, names = torch.tensor(rows, dtype=torch.int64, device=DEVICE).view(-1, 2).unbind(1)
    found = uniform_rows(starts, names, width, key, call, step)
    with plain():
        assert torch.equal(found, uniform_rows(starts, names, width, key, call, step))


def test_many_blocks() -> None:
    starts, names = torch.arange(300, device=DEVICE) * 7, torch.arange(300, device=DEVICE) // 50
    found = uniform_rows(starts, names, 9, 1 << 63, 1, 2)
    with plain():
        assert torch.equal(found, uniform_rows(starts, names, 9, 1 << 63, 1, 2))
