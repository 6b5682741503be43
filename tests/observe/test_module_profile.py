"""Costs of modules as a tree."""

from fractions import Fraction

import torch
from torch import nn

from shardwise.observe.module_profile import (
    ModuleCosts,
    ModuleCounter,
    ModuleProfilePolicy,
    ModuleTree,
    scaled,
)


class Net(nn.Module):
    """Two linear layers inside a block, and a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) @ self.block(x).T


def counted() -> dict[str, ModuleCosts]:
    net, x = Net(), torch.randn(3, 4)
    counter = ModuleCounter(net.named_modules())
    with counter.forward():
        y = net(x).sum()
    with counter.backward():
        y.backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    return counter.costs


def test_products_belong_to_the_module_that_runs_them() -> None:
    costs = counted()
    product = 2 * 3 * 4 * 8
    assert [costs[f"block.{i}"].forward for i in (0, 1)] == [2 * product] * 2
    assert (costs["block"].forward, costs[""].forward) == (0, 2 * 3 * 3 * 4)
    # The input takes no gradient: of its layer the gradient of the weight alone is computed.
    assert [costs[f"block.{i}"].backward for i in (0, 1)] == [2 * product, 4 * product]
    assert costs[""].backward == 2 * costs[""].forward
    assert [costs[name].calls for name in ("", "block", "block.0")] == [1, 2, 2]


def tree() -> ModuleTree:
    kinds = {"": "Net", "block": "Sequential", "block.0": "Linear"}
    costs = {
        "": ModuleCosts(10, 20, 3.0, 1),
        "block": ModuleCosts(seconds=2.0, calls=1),
        "block.0": ModuleCosts(100, 200, 1.0, 2),
    }
    return ModuleTree(kinds, {"block.0.weight": 30, "scale": 2}, costs)


def test_a_module_has_the_costs_of_those_inside_and_its_own_seconds() -> None:
    root, block, layer = tree().rows
    assert tree().root == root and (root.parameters, block.parameters, layer.parameters) == (32, 30, 30)
    assert root.costs == ModuleCosts(110, 220, 3.0, 1) and block.costs == ModuleCosts(100, 200, 2.0, 1)


def test_the_text_names_the_most_expensive_and_ends_at_the_depth() -> None:
    text = tree().text(ModuleProfilePolicy(top=1), "step 2: ").splitlines()
    assert text[0].startswith("step 2: 32 parameters; forward 110 FLOP") and len(text) == 3 + 4
    assert text[1].startswith("depth 1: most parameters: block 30; most FLOPs: block 100")
    assert text[-1].split()[:3] == ["0", "Linear", "30"] and "90.9%" in text[-1]
    shallow = tree().text(ModuleProfilePolicy(depth=1)).splitlines()
    assert len(shallow) == 2 + 3 and not any("Linear" in line for line in shallow)
    assert len(tree().text(ModuleProfilePolicy(tree=False)).splitlines()) == 3


def test_the_share_that_the_model_needs() -> None:
    assert scaled(ModuleCosts(9, 6, 1.5, 2), Fraction(2, 3)) == ModuleCosts(6, 4, 1.5, 2)
