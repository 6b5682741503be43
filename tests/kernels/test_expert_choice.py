"""The choice of experts: the gradient that is written out is autograd's, and counts are those of a loop."""

import pytest
import torch

from shardwise.kernels.expert_choice import (
    _ExpertWeights,
    chosen_experts,
    load_counts,
    plain_expert_weights,
    route_counts,
)


@pytest.mark.parametrize("uses_scores", [False, True])
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_the_gradient_is_autograds(is_sigmoid: bool, normalizes: bool, uses_scores: bool) -> None:
    logits = torch.randn(
        6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    index = chosen_experts(logits.detach(), None, 2, is_sigmoid)
    found = []
    for function in (_ExpertWeights.apply, plain_expert_weights):
        weights, scores = function(logits, index, is_sigmoid, normalizes, 2.5)
        loss = (weights * torch.tensor([1.0, -2.0])).sum() + (scores.square().sum() if uses_scores else 0)
        found.append([weights, scores, *torch.autograd.grad(loss, logits)])
    torch.testing.assert_close(found[0], found[1])


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert chosen_experts(logits, None, 2, False).tolist() == [[1, 2], [0, 1]]
    assert chosen_experts(logits, torch.tensor([0.0, 0, 9, 9]), 2, True).tolist() == [[2, 3], [2, 3]]


def test_counts() -> None:
    index = torch.tensor([[0, 3], [1, 0], [-1, 2], [-1, -1]])
    # pairs of each expert; rows that reach each of 1 place, of 2 places
    assert route_counts(index, 4, (1, 2), 7).tolist() == [7, 2, 1, 1, 1, 3, 2, 2]
    scores = torch.full((4, 4), 0.25)
    loads = load_counts(torch.tensor([[0, 3], [1, 0], [2, 2], [-1, -1]]), index, scores, False, 4)
    assert loads[:11].tolist() == [2, 1, 2, 1, 2, 1, 1, 1, 3, 0, 0]
    assert float(loads[-1]) == pytest.approx(3 * torch.log(torch.tensor(4.0)).item())
