"""ResNets: a block by its formula, the sides of its maps, and a start at which blocks do nothing."""

import pytest
import torch
import torch.nn.functional as F

from shardwise.models.images.policy import ResNetPolicy
from shardwise.models.images.resnet import ResidualBlock, ResNet


def test_sides_through_a_resnet() -> None:
    sides: list[int] = []
    model = ResNet(ResNetPolicy(depth=50, width=2), 10)
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: sides.append(output.shape[-1]))
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 10)
    assert sides == [16] * 3 + [8] * 4 + [4] * 6 + [2] * 3
    assert model.blocks[3].convolutions[1].stride == (2, 2), "version 1.5: in the 3 x 3"  # type: ignore[index, union-attr]


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
