"""``compile: blocks``: breaks in a block's graph are counted by reason; a clean block has none."""

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import join


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4)])
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[0](x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + 1


class Net(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def breaks_of(breaks: bool) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = {"compile": {"scope": "blocks", "backend": "eager"}}
    engine = shardwise.initialize(Net(breaks), config, world=join(quiet=True))
    engine.train_step([torch.ones(2, 4)])
    return sum(engine.graph_breaks.values())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every input
def test_breaks_are_counted() -> None:
    assert breaks_of(False) == 0
    assert breaks_of(True) > 0


def test_nothing_is_counted_where_nothing_is_compiled() -> None:
    engine = shardwise.initialize(Net(False), {}, world=join(quiet=True))
    engine.train_step([torch.ones(2, 4)])
    assert engine.graph_breaks == {}
