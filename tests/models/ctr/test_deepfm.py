"""The factorisation machine by its sum over pairs."""

import torch

from shardwise.models.ctr.deepfm import pairs
from tests.models.ctr.parts import inputs, small


def test_pairs_are_the_dot_products_of_all_pairs() -> None:
    v = torch.randn(3, 4, 5, dtype=torch.float64)
    by_hand = sum((v[:, i] * v[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4))
    assert torch.allclose(pairs(v), by_hand)
    assert pairs(torch.ones(1, 3, 2, dtype=torch.float16)).dtype == torch.float32


def test_a_logit_is_linear_part_pairs_and_network() -> None:
    model = small("deepfm", width=3, hidden=(4,))
    dense, rows = inputs(1 + 3)
    first, v = rows[:, :, 0], rows[:, :, 1:]
    linear = first.sum(1) + model.linear.bias + dense @ model.linear.weight
    deep = model.deep(torch.cat([dense, v.flatten(1)], 1)).squeeze(1)
    assert torch.allclose(model.logits(dense, rows), linear + (v[:, 0] * v[:, 1]).sum(1) + deep)
    assert float(model.deep(torch.randn(50, 9, dtype=torch.float64)).detach().min()) < 0, (
        "the last layer is linear"
    )
