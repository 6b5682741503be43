"""Attributes of a model's modules, restored after the engine."""

from typing import Any

import torch
from torch import nn

from shardwise.engine.model.original import OriginalAttributes


class Block(nn.Module):
    """A block with a child and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.scale: Any = "own"
        self.gone: Any = "own"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Ours(nn.Module):
    """What the engine puts in the place of a dropout."""

    p = 0.25


def replaced() -> tuple[Block, OriginalAttributes, nn.Module]:
    block = Block()
    own = block.drop
    original = OriginalAttributes(block)
    block.forward = lambda x: x + 1  # type: ignore[method-assign]
    block.scale = "ours"
    del block.gone
    block.drop = Ours().eval()  # type: ignore[assignment]
    original.compare()
    return block, original, own


def test_everything_is_what_it_was() -> None:
    block, original, own = replaced()
    assert block(1) == 2
    original.put_back()
    assert block(1) == 1 and "forward" not in vars(block)
    assert (block.scale, block.gone) == ("own", "own") and block.drop is own


def test_a_dropout_takes_share_and_mode_of_its_replacement() -> None:
    block, original, _ = replaced()
    original.put_back()
    assert block.drop.p == 0.25 and not block.drop.training and block.training


def test_what_the_user_changed_since_stays() -> None:
    block, original, _ = replaced()
    block.scale = "the user's"
    mine = block.drop = nn.Dropout(0.1)
    block.forward = lambda x: x + 2  # type: ignore[method-assign]
    original.put_back()
    assert block.scale == "the user's" and block.drop is mine and block(1) == 3
    block.scale = "ours"
    original.put_back()
    assert block.scale == "ours", "a second call does nothing"
