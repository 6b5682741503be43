"""Cross entropy in two kernels: the plain form's numbers, over a whole vocabulary and over parts of one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels.cross_entropy import (
    IGNORE,
    cross_entropy,
    plain_cross_entropy,
    plain_row_gradient,
    plain_row_numbers,
    row_gradient,
    row_numbers,
)

from .cases import BOUNDS, DEVICE, DRAWN, DTYPES, away, given_and_gradients


@DRAWN
@given(st.integers(1, 6), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_the_plain_forms_loss(rows: int, width: int, dtype: torch.dtype, data: st.DataObject) -> None:
    logits = torch.randn(rows, width, device=DEVICE).to(dtype) * 4
    labels = st.integers(0, width - 1) | st.just(IGNORE)
    targets = torch.tensor(data.draw(st.lists(labels, min_size=rows, max_size=rows)), device=DEVICE)
    found = given_and_gradients(lambda z: cross_entropy(z, targets), [logits])
    expected = given_and_gradients(lambda z: plain_cross_entropy(z, targets), [logits.double()])
    assert found[0].dtype == torch.float32 and found[1].dtype == dtype
    # A loss near 0 is the difference of two numbers as large as the logits.
    assert away(found[0], expected[0], least=float(logits.abs().max())) < 1e-6
    assert away(found[1], expected[1], least=0.5) < max(BOUNDS[dtype], 2e-6)


def several_blocks(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    from shardwise.kernels.fused import cross_entropy as kernels

    monkeypatch.setattr(kernels, "_BLOCK", 8)
    logits = torch.randn(3, 60, device=DEVICE)[:, 7:37]
    logits[0, :9] = -float("inf")
    logits[1, 12] = 300
    return logits


def test_the_numbers_of_rows_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, columns = several_blocks(monkeypatch), torch.tensor([[20], [12], [29]], device=DEVICE)
    found, expected = row_numbers(logits, columns), plain_row_numbers(logits.double(), columns)
    assert torch.equal(found[[0, 2]].double(), expected[[0, 2]])
    assert torch.allclose(found[1].double(), expected[1], rtol=1e-6)
    lse, a, b = torch.randn(3, 3, device=DEVICE)
    numbers = (columns, lse.abs() + 300, a[:, None], b[:, None])
    wide = (columns, *(each.double() for each in numbers[1:]))
    assert away(row_gradient(logits, *numbers), plain_row_gradient(logits.double(), *wide)) < 1e-5


def test_no_target_and_no_row() -> None:
    logits = torch.randn(2, 5, device=DEVICE, requires_grad=True)
    loss = cross_entropy(logits, torch.full((2,), IGNORE, device=DEVICE))
    assert loss == 0 and not torch.autograd.grad(loss, logits)[0].any()
    assert cross_entropy(logits[:0], torch.zeros(0, dtype=torch.int64, device=DEVICE)) == 0


def test_a_target_outside_is_nan() -> None:
    logits = torch.randn(2, 5, device=DEVICE)
    for wrong in (5, -1):
        assert cross_entropy(logits, torch.tensor([1, wrong], device=DEVICE)).isnan()
