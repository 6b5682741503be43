"""One weight for every key and a linear function of the numbers."""

import torch

from tests.models.ctr.parts import inputs, small


def test_a_logit_is_a_sum() -> None:
    model = small("logistic_regression")
    dense, rows = inputs(1)
    by_hand = rows[:, 0, 0] + rows[:, 1, 0] + dense @ model.linear.weight + model.linear.bias
    assert torch.allclose(model.logits(dense, rows), by_hand)


def test_without_numbers_there_is_a_bias_alone() -> None:
    model = small("logistic_regression", dense=False)
    dense, rows = inputs(1, dense=0)
    assert model.linear.weight is None
    assert torch.allclose(model.logits(dense, rows), rows.sum((1, 2)) + model.linear.bias)
