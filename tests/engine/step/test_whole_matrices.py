"""Matrices that are updated whole: a Muon of torch, and blocks that say which they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import join
from shardwise.engine.step.whole_matrices import WholeMatrices
from shardwise.plan.action import Kind
from tests.engine.nets import seeded
from tests.engine.plain import worst


class Branches(nn.Module):
    """A part that runs where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, is_long: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(x)) if is_long else x).square().mean()


def two_matrices() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 8, bias=False))


def user_muon(world: Any) -> tuple[float, list[int], list[int]]:
    """``torch.optim.Muon`` on a model of matrices; what ALL_TO_ALL sent, and what it should."""
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    model, plain = seeded(two_matrices), seeded(two_matrices)
    theirs = optim.Muon(plain.parameters(), **options)
    engine = shardwise.initialize(
        model,
        {"zero": {"stage": 3}},
        optimizer=optim.Muon(model.parameters(), **options),
        loss=lambda model, x: model(x).square().mean(),
        world=world,
    )
    largest, sent = 0.0, []
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).double()
        engine.train_step([x.chunk(world.size)[world.rank]])
        sent += [
            size
            for action, size in zip(engine.trace.actions, engine.trace.bytes, strict=True)
            if action.kind is Kind.ALL_TO_ALL
        ]
        plain.zero_grad()
        plain(x).square().mean().backward()
        theirs.step()
        largest = max(largest, worst(engine.state_dict(), plain.state_dict()))
    parts = engine._parts.trained
    counts = WholeMatrices(parts, engine._parts.slices, engine._parts.stage_peers, engine.device)._rounds[0]
    rank = world.rank
    there = sum(n for to, n in enumerate(counts.there[rank]) if to != rank)
    back = sum(n for to, n in enumerate(counts.back[rank]) if to != rank)
    engine.close()
    return largest, sent, [2 * (there + back)] * 2


def test_a_muon_of_torch_is_served(ranks: Any) -> None:
    found = ranks(2).run(user_muon)
    for error, sent, wanted in found:
        assert error <= 1e-5
        assert sent == wanted
    # The larger matrix goes to rank 1, which has 72 of its 80 elements, the other to rank 0, which has all of it. The 8
    # come back: 2 bytes an element each way.
    assert sum(sent[0] for _, sent, _ in found) == 2 * 2 * 8


def test_muon_without_blocks_asks_which_matrices() -> None:
    with pytest.raises(ConfigError, match=r"muon updates the matrices of repeated blocks.*matrices: true"):
        shardwise.initialize(Branches(), {"optimizer": {"type": "muon"}}, world=join(quiet=True))
