"""Models that call ``F.scaled_dot_product_attention``, cut over ranks, equal one process or are refused by name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.test_context import VOCABULARY, batch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import PlanError, UsageError
from shardwise.comm.world import World

WIDTH, HEADS, GROUPS = 16, 4, 2


class Layer(nn.Module):
    def __init__(self, **call: Any) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * size) for heads in (HEADS, GROUPS, GROUPS))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.call = {"is_causal": True, "scale": 0.3, "enable_gqa": True, **call}

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        call = self.call
        if call.get("attn_mask") is True:
            call = {**call, "attn_mask": torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)}
        found = F.scaled_dot_product_attention(q, k, v, **call)
        return x + self.drop(self.out(found.transpose(1, 2).flatten(2)))


class Own(nn.Module):
    """A model of a user: learned positions, two layers, a loss of its targets or logits."""

    def __init__(self, **call: Any) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Layer(**call) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embed(tokens) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def numbers(world: World, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    given = {"optimizer": {"type": "sgd", "lr": 0.1}, "max_grad_norm": 1.0, **config}
    engine, found = shardwise.initialize(Own().double(), given, world=world), []
    for step, length in enumerate((12, 13, 5)):
        each = batch(length, step)
        if step == 1:  # positions that the batch brings are cut as the tokens are
            each["position_ids"] = 7 + torch.arange(length).expand(2, -1)
        result = engine.train_step([each])
        found += [result.loss, float(result.grad_norm or 0)]
    engine.eval()
    found.append(engine.evaluate([(each, None)]))
    state = {**engine.state_dict(), "logits": engine.predict([{"tokens": each["tokens"]}])[0]}
    engine.close()
    return found, state


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "recomputed": (2, {"mesh": {"cp": 2}, "zero": {"stage": 3}, "recompute": "full"}),
    "three ranks": (3, {"mesh": {"cp": 3}, "zero": {"stage": 1}}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_a_user_equals_one_process(ranks: Any, name: str) -> None:
    size, config = CONFIGS[name]
    wanted, state = numbers(World(0, 1), {})
    for got, weights in ranks(size).run(numbers, config):
        assert got == pytest.approx(wanted, rel=1e-11)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-12)


class WithoutPositions(Own):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, targets)


class WithoutAttention(Own):
    def forward(  # type: ignore[override]
        self, tokens: Tensor, targets: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets.flatten())


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.out(features)[:, 0], labels)


def with_multihead() -> nn.Module:
    model = Own()
    model.layers[1].mixer = nn.MultiheadAttention(WIDTH, HEADS)
    return model


def refused(world: World) -> list[str]:
    said = []
    for model in (WithoutPositions(), Clicks(), with_multihead()):
        try:
            shardwise.initialize(model, {"mesh": {"cp": 2}}, world=world)
        except PlanError as error:
            said.append(str(error))
    models = [WithoutAttention()]
    models += [
        Own(**call)
        for call in ({"dropout_p": 0.1}, {"is_causal": False}, {"is_causal": False, "attn_mask": True})
    ]
    for model in models:
        given = {"mesh": {"cp": 2}, "optimizer": {"type": "sgd", "lr": 0.1}}
        engine = shardwise.initialize(model, given, world=world)
        before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        try:
            engine.train_step([batch(8)])
        except UsageError as error:
            said.append(str(error))
            engine.discard()
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
        engine.close()
    return said


def test_what_no_exchange_computes_is_refused_by_name(ranks: Any) -> None:
    for said in ranks(2).run(refused):
        positions, clicks, multihead, without, dropout, both_ways, mask = said
        assert "has no argument 'positions' [T] or 'position_ids' [B, T]" in positions
        assert "no sequence of tokens to cut" in clicks
        assert "layers.1.mixer (MultiheadAttention)" in multihead
        assert "WithoutAttention calls no F.scaled_dot_product_attention" in without
        assert "dropout_p=0.1" in dropout and "is_causal=False" in both_ways
        assert "attn_mask and is_causal=False" in mask
