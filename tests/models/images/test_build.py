"""AlexNet and ResNet: the paper's shapes, gradients of a block by hand, and the same on two ranks."""

from typing import Any

import pytest
import torch

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import World
from shardwise.models import build_image_model
from shardwise.models.images.policy import AlexNetPolicy, ResNetPolicy


@pytest.mark.parametrize(
    ("policy", "parameters"),
    # As in the papers' tables and torchvision's models of the same names.
    [
        (ResNetPolicy(depth=18), 11_689_512),
        (ResNetPolicy(depth=50), 25_557_032),
        (AlexNetPolicy(), 61_100_840),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_the_real_shapes(policy: Any, parameters: int) -> None:
    with torch.device("meta"):
        model = build_image_model(policy, 1000)
        assert sum(each.numel() for each in model.parameters()) == parameters


def test_fewer_outputs_than_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.classes is 3, but the data has 10 classes"):
        build_image_model(ResNetPolicy(classes=3), 10)


def trained(world: World | None, changes: dict[str, Any]) -> list[Any]:
    """Losses of three steps in fp64, and the gradient norms."""
    policy: Any = ResNetPolicy(depth=18, width=2, size=8)
    if "pipeline" in changes:
        policy = AlexNetPolicy(width=2, hidden=8, size=63, dropout=0)
    model = build_image_model(policy, 4, 1)
    if hasattr(model, "build_all"):
        model.build_all()
    config = {
        "batch": {"global_size": 8},
        "optimizer": {"type": "sgd", "lr": 0.05},
        **changes,
    }
    engine = shardwise.initialize(model.double(), config, world=world)
    share = engine.dp_size
    accumulation = engine.accumulation
    draws = torch.Generator().manual_seed(0)
    told = []
    for _ in range(3):
        images = torch.randn(8, 3, policy.size, policy.size, generator=draws, dtype=torch.float64)
        labels = torch.randint(0, 4, (8,), generator=draws)
        parts = zip(images.chunk(share * accumulation), labels.chunk(share * accumulation), strict=True)
        mine = [part for i, part in enumerate(parts) if i % share == engine.dp_index]
        result = engine.train_step(mine)
        told.append((result.loss, result.grad_norm))
    return told


SYNCHRONIZED = {"batch_norm": "synchronized", "zero": {"stage": 2}}
PIPELINE = {
    "mesh": {"pp": 2},
    "pipeline": {"schedule": "1f1b"},
    "batch": {"global_size": 8, "accumulation": 2},
}


@pytest.mark.parametrize("changes", [SYNCHRONIZED, PIPELINE], ids=["resnet", "alexnet"])
def test_two_ranks_are_one_process(ranks: Any, changes: dict[str, Any]) -> None:
    alone = changes | {"mesh": {}}
    expected = trained(None, alone)
    for told in ranks(2).run(trained, changes):
        for (loss, norm), (wanted, wanted_norm) in zip(told, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-10)
            assert norm == pytest.approx(wanted_norm, rel=1e-9)
