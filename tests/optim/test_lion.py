"""Lion by its formula."""

import pytest
import torch

from shardwise.optim.lion import Lion


def test_lion_by_its_formula() -> None:
    weights, momentum = torch.tensor([1.0, -2.0, 0.5]), torch.zeros(3)
    single = weights.clone().requires_grad_()
    optimizer = Lion([single], lr=0.1, betas=(0.9, 0.8), weight_decay=0.5)
    for gradient in ([1.0, -0.1, 0.0], [-0.2, 3.0, 0.0], [-0.9, 1.0, -1.0]):
        single.grad = torch.tensor(gradient)
        optimizer.step()
        signs = torch.sign(0.9 * momentum + 0.1 * single.grad)
        weights = weights - 0.1 * (signs + 0.5 * weights)
        momentum = 0.8 * momentum + 0.2 * single.grad
        torch.testing.assert_close(single.detach(), weights)
    with pytest.raises(ValueError, match="betas in"):
        Lion([single], betas=(0.9, 1.0))
