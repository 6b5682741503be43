"""Dropout in one launch: the plain form's bits, in every dtype, for every cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernels import choice, dropout, philox
from shardwise.kernels.dropout import EqualPart, MaskKey, keyed_dropout

from .cases import DEVICE, DRAWN, DTYPES, plain

NUMBERS = st.integers(0, 2**31 - 1) | st.integers(2**32, 2**40)
"""Triton's interpreter trips over the integers between."""


@st.composite
def draws(take) -> tuple[list[int], MaskKey, EqualPart | None]:
    shape = take(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    samples = take(st.sampled_from([None, 1, 2, shape[0]]))
    key = take(NUMBERS | st.integers(2**62, 2**64 - 2**32))
    step, first, call = take(NUMBERS), take(NUMBERS), take(st.integers(0, 5))
    parts = take(st.integers(1, 3))
    cut = EqualPart(take(st.integers(-1, len(shape) - 1)), parts, take(st.integers(0, parts - 1)))
    return shape, MaskKey(key, step, first, samples, call), take(st.sampled_from([None, cut]))


@DRAWN
@given(draws(), st.sampled_from(DTYPES), st.sampled_from([0.1, 0.5, 2**-16, 1 - 2**-16]))
def test_the_plain_forms_bits(case: tuple, dtype: torch.dtype, p: float) -> None:
    shape, draw, cut = case
    x = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    grad = torch.randn(shape, device=DEVICE).to(dtype)
    found = keyed_dropout(x, p, draw, cut)
    (d_x,) = torch.autograd.grad(found, x, grad)
    with plain():
        expected = keyed_dropout(x, p, draw, cut)
        (d_expected,) = torch.autograd.grad(expected, x, grad)
    assert torch.equal(found, expected)
    assert torch.equal(d_x, d_expected)
    assert found.dtype == dtype


def test_many_blocks_and_a_tensor_of_strides() -> None:
    x = torch.randn(3, 130, 37, device=DEVICE).transpose(0, 1)
    draw = MaskKey(philox.key_of(1, "x"), 3, 5)
    for cut in (None, EqualPart(2, 2, 1)):
        found = keyed_dropout(x, 0.3, draw, cut)
        with plain():
            assert torch.equal(found, keyed_dropout(x, 0.3, draw, cut))


def test_nan_and_infinity_pass_as_in_the_plain_form() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf")] * 20, device=DEVICE)[None]
    found = keyed_dropout(x, 0.5, MaskKey(3, 0, 0))
    with plain():
        assert torch.equal(found.isnan(), keyed_dropout(x, 0.5, MaskKey(3, 0, 0)).isnan())


def test_nothing_is_kept() -> None:
    kept = []
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        keyed_dropout(x, 0.5, MaskKey(3, 0, 0))
    assert kept == []


def test_fp64_takes_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_DeviceDropout", None)
    x = torch.randn(4, 8, device=DEVICE, dtype=torch.float64)
    assert not choice.fused(x)
    keyed_dropout(x, 0.5, MaskKey(3, 0, 0))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")
def test_in_a_compiled_graph() -> None:
    run = torch.compile(
        lambda x, step: keyed_dropout(x, 0.5, MaskKey(3, step, 0)), backend="aot_eager", fullgraph=True
    )
    for step in (2, 3):
        x = torch.randn(2, 3, 4, device=DEVICE, requires_grad=True)
        found, expected = run(x, step), keyed_dropout(x, 0.5, MaskKey(3, step, 0))
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
