"""AlexNet: the least side of a picture."""

from typing import Any

import torch

from shardwise.models import build_image_model
from shardwise.models.images.policy import AlexNetPolicy


def test_an_alexnet_takes_pictures_of_its_least_side() -> None:
    model: Any = build_image_model(AlexNetPolicy(width=1, hidden=4, size=63), 5)
    model.build_all()
    assert model(torch.rand(2, 3, 63, 63)).shape == (2, 5)
    assert model(torch.rand(2, 3, 63, 63), torch.tensor([0, 4])).shape == ()
