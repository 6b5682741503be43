"""A linear model beside a network."""

import torch

from tests.models.ctr.parts import inputs, small


def test_a_logit_is_wide_and_deep_together() -> None:
    model = small("wide_deep", width=3, hidden=(4,))
    dense, rows = inputs(1 + 3)
    wide = rows[:, :, 0].sum(1) + model.linear.bias + dense @ model.linear.weight
    x = torch.cat([dense, rows[:, :, 1:].flatten(1)], 1)
    deep = model.deep[2](model.deep[0](x).clamp(min=0)).squeeze(1)
    assert torch.allclose(model.logits(dense, rows), wide + deep)
