"""AlexNet and ResNet: the paper's shapes, gradients of a block by hand, and the same on two ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import World
from shardwise.models import build_image_model
from shardwise.models.images.policy import AlexNetPolicy, ResNetPolicy
from shardwise.models.images.resnet import ResidualBlock, ResNet


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


def test_sides_through_a_resnet() -> None:
    sides: list[int] = []
    model = ResNet(ResNetPolicy(depth=50, width=2), 10)
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: sides.append(output.shape[-1]))
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 10)
    assert sides == [16] * 3 + [8] * 4 + [4] * 6 + [2] * 3
    assert model.blocks[3].convolutions[1].stride == (2, 2), "version 1.5: in the 3 x 3"  # type: ignore[index, union-attr]


def test_an_alexnet_takes_pictures_of_its_least_side() -> None:
    model: Any = build_image_model(AlexNetPolicy(width=1, hidden=4, size=63), 5)
    model.build_all()
    assert model(torch.rand(2, 3, 63, 63)).shape == (2, 5)
    assert model(torch.rand(2, 3, 63, 63), torch.tensor([0, 4])).shape == ()


@pytest.mark.parametrize("is_narrow", [True, False])
def test_a_block_is_its_formula(is_narrow: bool) -> None:
    torch.manual_seed(0)
    block = ResidualBlock(6, 4, 2, is_narrow).double()
    x = torch.randn(3, 6, 8, 8, dtype=torch.float64)
    convolutions, norms = list(block.convolutions), list(block.norms)
    strides = [2, 1] if is_narrow else [1, 2, 1]
    h = x
    for i, (convolution, norm) in enumerate(zip(convolutions, norms, strict=True)):
        h = F.conv2d(h, convolution.weight, stride=strides[i], padding=convolution.weight.shape[-1] // 2)
        mean, var = h.mean((0, 2, 3), keepdim=True), h.var((0, 2, 3), correction=0, keepdim=True)
        h = (h - mean) / (var + norm.eps).sqrt()
        h = h.relu() if i < len(norms) - 1 else h
    assert block.shortcut is not None
    s = F.conv2d(x, block.shortcut[0].weight, stride=2)
    s = (s - s.mean((0, 2, 3), keepdim=True)) / (s.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    expected = (h + s).relu()
    weights = [convolution.weight for convolution in convolutions]
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * direction).sum(), weights, retain_graph=True)
    given = torch.autograd.grad((block(x) * direction).sum(), weights)
    assert torch.allclose(block(x), expected, rtol=1e-10)
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(wanted, given, strict=True))


def test_a_resnet_starts_with_blocks_that_do_nothing() -> None:
    model = ResNet(ResNetPolicy(depth=18, width=4, size=16), 3).eval()
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(model.blocks[0](x), x)
    again = ResNet(ResNetPolicy(depth=18, width=4, size=16), 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


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
