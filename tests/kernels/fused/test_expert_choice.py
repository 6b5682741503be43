"""The choice of experts, their weights and counts in one launch: the plain forms' experts, weights and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels.expert_choice import (
    chosen_experts,
    expert_weights,
    load_counts,
    plain_chosen_experts,
    plain_expert_weights,
    plain_load_counts,
    plain_route_counts,
    route_counts,
)

from .cases import DEVICE, DRAWN, away


def logits_of(rows: int, experts: int, ties: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    found = torch.randn(rows, experts, generator=generator)
    return (found.round() if ties else found).to(DEVICE)


@DRAWN
@given(st.integers(0, 20), st.integers(3, 40), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans())
def test_choice(rows: int, experts: int, top_k: int, is_sigmoid: bool, ties: bool, has_bias: bool) -> None:
    """Of equal scores the lower expert is chosen."""
    logits = logits_of(rows, experts, ties)
    bias = torch.arange(experts, device=DEVICE).remainder(2).float() if has_bias else None
    found = chosen_experts(logits, bias, top_k, is_sigmoid)
    assert torch.equal(found, plain_chosen_experts(logits, bias, top_k, is_sigmoid))


@DRAWN
@given(st.integers(0, 20), st.integers(3, 40), st.booleans(), st.booleans(), st.booleans())
def test_weights(rows: int, experts: int, is_sigmoid: bool, normalizes: bool, uses_scores: bool) -> None:
    logits = logits_of(rows, experts, False)
    index = plain_chosen_experts(logits, None, 3, is_sigmoid)
    found = []
    for function, dtype in ((expert_weights, torch.float32), (plain_expert_weights, torch.float64)):
        leaf = logits.to(dtype).requires_grad_()
        weights, scores = function(leaf, index, is_sigmoid, normalizes, 2.5)
        loss = (weights * torch.arange(1, 4, device=DEVICE)).sum()
        loss = loss + (scores * scores).sum() if uses_scores else loss
        found.append([weights.detach(), scores.detach(), *torch.autograd.grad(loss, leaf)])
    for a, b in zip(*found, strict=True):
        assert a.dtype == torch.float32 and away(a, b, least=1) < 2e-6


def test_scores_alone_have_a_gradient() -> None:
    logits = logits_of(5, 7, False).requires_grad_()
    index = plain_chosen_experts(logits.detach(), None, 2, False)
    scores = expert_weights(logits, index, False, True, 1.0)[1]
    expected = torch.autograd.grad((logits.softmax(-1) ** 2).sum(), logits)[0]
    assert away(torch.autograd.grad((scores**2).sum(), logits)[0], expected, least=1) < 1e-6


@DRAWN
@given(st.integers(0, 40), st.sampled_from([(1,), (4,), (2, 4), (3, 12)]))
def test_counts_of_routes(rows: int, places: tuple[int, ...]) -> None:
    index = plain_chosen_experts(logits_of(rows, 12, False), None, 3, False)
    index[::3, 1] = -1
    index[1::4] = -1
    assert torch.equal(
        route_counts(index, 12, places, 1 << 31), plain_route_counts(index, 12, places, 1 << 31)
    )


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 30])
def test_counts_of_loads(monkeypatch: pytest.MonkeyPatch, rows: int, is_sigmoid: bool) -> None:
    from shardwise.kernels.fused import expert_choice as kernels

    monkeypatch.setattr(kernels, "_TILE", 64)
    scores = logits_of(rows, 12, False).sigmoid() if is_sigmoid else logits_of(rows, 12, False).softmax(-1)
    chosen = plain_chosen_experts(scores, None, 3, False)
    chosen[::5] = -1
    kept = chosen.masked_fill(chosen == 4, -1)
    found, expected = (
        function(chosen, kept, scores, is_sigmoid, 4) for function in (load_counts, plain_load_counts)
    )
    assert torch.equal(found[:-1], expected[:-1])
    assert away(found[-1:], expected[-1:], least=1) < 1e-5
