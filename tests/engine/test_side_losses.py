"""Side losses that blocks keep for the model's loss, at stage 3: exact, or refused by name; never NaN.

A side loss that is made of a block's output asks for the block's weights before the output's own gradient has come.
Under recomputation these were released by then.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.up = nn.Linear(4, 4)
        self.aux: Any = None

    def forward(self, x: Tensor, sink: list[Tensor] | None = None) -> Tensor:
        gate = self.router(x).softmax(-1)
        out = x + gate * self.up(x).tanh()
        aux = (out * self.router.weight.sum(0)).square().mean()  # behind the output: its gradient comes first
        if sink is None:
            self.aux = {"balance": aux}
        else:
            sink.append(aux)
        return out


class Net(nn.Module):
    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)
        self.shares = shares

    def forward(self, x: Tensor) -> Tensor:
        sink: list[Tensor] = []
        for block in self.blocks:
            x = block(x, sink) if self.shares else block(x)
        side = sink or [block.aux["balance"] for block in self.blocks]
        return self.head(x).square().mean() + torch.stack(side).sum()


def net(shares: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(shares).double()


def batch(i: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i))


def trained(world: Any, recompute: str, shares: bool) -> Any:
    config = {
        "zero": {"stage": 3},
        "recompute": recompute,
        "precision": "fp64",
        "optimizer": {"type": "sgd", "lr": 0.1},
    }
    engine = shardwise.initialize(net(shares), config, world=world)
    try:
        for step in range(2):
            engine.train_step([batch(2 * step + world.rank)])
        return {name: value.tolist() for name, value in engine.state_dict().items()}
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_side_losses_in_attributes_are_exact(ranks: Callable[[int], Any], recompute: str) -> None:
    plain = net()
    for step in range(2):
        plain.zero_grad()
        sum(plain(batch(2 * step + i)) / 2 for i in range(2)).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
    for found in ranks(2).run(trained, recompute, False):
        assert isinstance(found, dict), found
        for name, parameter in plain.named_parameters():
            difference = torch.tensor(found[name], dtype=torch.float64) - parameter.detach()
            assert float(difference.abs().max()) <= 1e-12, name


def test_side_losses_in_a_shared_list_are_refused(ranks: Callable[[int], Any]) -> None:
    for found in ranks(2).run(trained, "full", True):
        assert isinstance(found, str) and "keep it in an attribute" in found and "router.weight" in found
