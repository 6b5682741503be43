"""``compile: blocks``: breaks in a block's graph are counted by reason; a clean block has none."""

from pathlib import Path

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


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_what_a_user_compiles(whole: bool, tmp_path: Path) -> None:
    """A module that the user compiles runs its hooks inside of the graph: where weights came from a disk, that ended in
    a RecursionError, or in memory that was gone."""
    disk = {"optimizer": "disk", "disk_path": str(tmp_path)}
    losses = []
    for offload in ({}, disk, {**disk, "parameters": "disk"}):
        torch.manual_seed(0)
        net = Net(False)
        for module in ([net] if whole else net.blocks) if offload else []:
            module.compile(backend="eager")
        engine = shardwise.initialize(net, {"offload": offload}, world=join(quiet=True))
        losses.append([engine.train_step([torch.ones(2, 4)]).loss.hex() for _ in range(2)])
        engine.close()
    torch._dynamo.reset()
    assert losses == losses[:1] * 3
