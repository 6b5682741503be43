"""Models made in pieces: the values of rank 0's plain model, whatever init code does; trained as one made whole."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from shardwise.engine.construction.sharded_init import PieceTensor, sharded_init
from tests.ranks import RankPool

WIDTH = 6


class Block(nn.Module):
    """Parameters of its own beside those of children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 7), nn.LayerNorm(WIDTH)
        self.second = nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.second(self.first(self.norm(hidden)).tanh())


class Net(nn.Module):
    """What models do while they are made: ties, padding rows, copies, ``apply``, edits of slices, a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.blocks.append(copy.deepcopy(self.blocks[0]))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._init)
        for block in self.blocks:
            block.second.weight.data /= 2
            block.first.bias.data[:2] = torch.arange(2.0)
            nn.init.orthogonal_(block.first.weight)
        self.register_buffer("mean", torch.stack([b.second.weight.detach().mean() for b in self.blocks]))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0, 0.3)
            module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def trained(
    world: World, config: dict[str, Any], in_pieces: bool
) -> tuple[dict[str, Tensor], list[float], int]:
    """(start weights, losses, elements held before initialize)."""
    torch.manual_seed(world.rank)  # values are rank 0's
    held = 0
    if in_pieces:
        with sharded_init(world):
            model = Net()
        assert all(isinstance(p, PieceTensor) and p.piece._whole is None for p in model.parameters())
        assert model.head.weight is model.embed.weight
        held = sum(p.piece._kept.numel() for p in model.parameters() if isinstance(p, PieceTensor))
    else:
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = shardwise.initialize(
        model,
        config,
        loss=loss_of,
        optimizer=optimizer,
        world=world,
        example=torch.zeros(2, 3, dtype=torch.int64),
    )
    start = engine.state_dict()
    draws = torch.Generator().manual_seed(engine.dp_index)
    parts = engine.config.batch.accumulation or 1
    losses = []
    for _ in range(2):
        losses.append(
            engine.train_step([torch.randint(11, (2, 5), generator=draws) for _ in range(parts)]).loss
        )
    engine.close()
    return start, losses, held


@pytest.mark.parametrize(
    "config",
    [
        {"zero": {"stage": 3}},
        {"zero": {"stage": 1}, "precision": "bf16"},
        {"zero": {"stage": 0}},
        {"mesh": {"pp": 2}, "batch": {"micro_size": 2, "global_size": 4}},
    ],
    ids=["zero3", "zero1-bf16", "zero0", "pp2"],
)
def test_it_trains_as_a_model_that_was_made_whole(
    ranks: Callable[[int], RankPool], config: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = Net().state_dict()
    whole = ranks(2).run(trained, config, False)
    in_pieces = ranks(2).run(trained, config, True)
    for (start, losses, _), (start_in_pieces, losses_in_pieces, held) in zip(whole, in_pieces, strict=True):
        assert losses_in_pieces == losses
        for name, value in start_in_pieces.items():
            assert torch.equal(value, start[name]) and torch.equal(value, plain[name].to(value.dtype)), name
        total = sum(p.numel() for p in Net().parameters())
        assert total / 2 <= held <= total / 2 + 20


def edits(world: World) -> tuple[bool, bool, str]:
    with sharded_init(world):
        model = Net()
    with deepspeed.zero.GatheredParameters(model.embed.weight, modifier_rank=1), torch.no_grad():
        if world.rank == 1:
            model.embed.weight.fill_(2.5)
    with deepspeed.zero.GatheredParameters(model.blocks[0].scale):
        seen = model.blocks[0].scale.shape == (WIDTH,) and bool((model.blocks[0].scale < 1).all())
    views = [block.first.weight.data[:2] for block in model.blocks[:2]]
    try:
        model.blocks[2].first.weight.data[:2].zero_()
        said = ""
    except UsageError as error:
        said = str(error)
    del views
    engine = shardwise.initialize(model, {"zero": {"stage": 3}}, loss=loss_of, world=world)
    is_edited = bool((engine.state_dict()["embed.weight"] == 2.5).all())
    engine.close()
    return is_edited, seen, said


def test_edits_before_initialize_and_a_view_that_is_kept(ranks: Callable[[int], RankPool]) -> None:
    for is_edited, seen, said in ranks(2).run(edits):
        assert is_edited and seen
        assert "a view of a parameter of shape [7, 6] is still held" in said


def test_one_process_makes_a_model_as_always() -> None:
    with shardwise.sharded_init():
        model = Net()
    assert not any(isinstance(p, PieceTensor) for p in model.parameters())
