"""Blocks of a model: found by their list, weighed with what stands around them."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.blocks import blocks_around, find_blocks, stages_of_modules, weigh
from shardwise.parallel.pipeline.uses import ModuleUses, order_of_use
from tests.engine.nets import Language, seeded
from tests.parallel.pipeline.cuttable import Images, gpt
from tests.parallel.pipeline.test_stand_in import TOKENS, WIDTH, Backwards, Looped, Net


def test_blocks_are_found() -> None:
    assert find_blocks(gpt()) == tuple(f"blocks.{i}" for i in range(4))
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == ("0", "1")
    with pytest.raises(PlanError, match="pipeline.partition"):
        find_blocks(nn.Linear(2, 2))
    assert blocks_around(Images(), ("layer3",)) == ("stem", "norm", "layer1", "layer2", "layer3", "head")


def test_weights_of_blocks_count_what_stands_around_them() -> None:
    model = seeded(Language)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    weights, front, back = weigh(model, find_blocks(model))
    assert (weights, front, back) == ([block] * 3, 66, 66 + 12)


def call(model: nn.Module) -> Tensor:
    return model(TOKENS)


class Between(Net):
    """A norm that is registered last and used in the middle, and a head whose inner part is used without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.LayerNorm(WIDTH)
        first = nn.ModuleDict({"head": nn.MultiheadAttention(WIDTH, 2, batch_first=True)})
        self._modules = {"first": first, **self._modules}

    def walk(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(self.middle(x) if i == 2 else x)
        return self.first["head"](x, x, x)[0]


def seen(net: nn.Module) -> ModuleUses:
    uses = order_of_use(net, call)
    assert uses is not None
    return uses


def test_where_they_belong() -> None:
    uses = seen(Between())
    blocks = find_blocks(Between(), uses)
    places = uses.places(blocks)
    assert (places["embed"], places["middle"], places["norm"]) == (0, 2, 4)
    assert places["first.head"] == places["first.head.out_proj"] == 4
    stage_of = stages_of_modules(Between(), blocks[2:3], uses)
    assert stage_of["middle"] == stage_of["first.head.out_proj"] == 1
    assert weigh(Between(), blocks, uses)[2] > weigh(Between(), blocks)[2]


@pytest.mark.parametrize("made", [Looped, Backwards])
def test_blocks_in_another_order_say_nothing(made: Callable[[], nn.Module]) -> None:
    net = made()
    uses = seen(net)
    assert find_blocks(net, uses) == find_blocks(net) and uses.places(find_blocks(net)) == {}
