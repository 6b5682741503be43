"""Pairwise dots: the fast form equals the plain one, gradients too."""

import pytest
import torch

from shardwise.models.ctr.interaction import pairwise_dots, pairwise_dots_plain


@pytest.mark.parametrize("shape", [(0, 3, 2), (5, 1, 3), (4, 2, 3), (3, 7, 4)], ids=str)
def test_it_equals_the_plain_form(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    z = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dots, plain = pairwise_dots(z), pairwise_dots_plain(z)
    assert dots.shape == (shape[0], shape[1] * (shape[1] - 1) // 2)
    assert torch.allclose(dots, plain, rtol=1e-14)
    weights = torch.randn(dots.shape, dtype=torch.float64)
    (ours,) = torch.autograd.grad((dots * weights).sum(), z)
    (theirs,) = torch.autograd.grad((plain * weights).sum(), z)
    assert torch.allclose(ours, theirs, rtol=1e-13)


def test_pairs_stand_row_by_row() -> None:
    z = torch.tensor([[[1.0], [10.0], [100.0]]])
    assert pairwise_dots(z).tolist() == [[10.0, 100.0, 1000.0]]
