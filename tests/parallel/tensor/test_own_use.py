"""Slices of weights are used by the layers that own them; any other use is refused by name and line in the first step.

The weights are alike in both slices, so that the ranks' losses tell nothing.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from tests.engine.nets import seeded

ROWS = {"embed": "vocabulary", "norm": "sequence", "up": "column", "down": "row", "head": "head"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.free = nn.Parameter(torch.ones(3))
        self.also: Callable[[Net, Tensor], Tensor] = lambda model, x: x.sum() * 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        extra = self.also(self, y)
        return (
            F.cross_entropy(self.head(y).flatten(0, 1), tokens.flatten()) + extra + self.free.square().sum()
        )


def net() -> nn.Module:
    made: nn.Module = seeded(Net)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(0.25)
    return made


def tokens() -> Tensor:
    return torch.arange(8).view(2, 4)


def begun(world: Any, also: Any = None, **more: Any) -> Any:
    model = net()
    if also is not None:
        model.also = also
    config = {
        "mesh": {"tp": 2},
        "tensor": {"table": ROWS | {"": "replicate"}},
        "optimizer": {"type": "sgd", "lr": 0.1},
    }
    return shardwise.initialize(model, config, world=world, **more)


def both(model: Any) -> list[nn.Parameter]:
    return [model.up.weight, model.down.weight]


PENALTIES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "all parameters": (lambda m: sum(p.square().sum() for p in m.parameters()), "'embed.weight'", "square"),
    "a norm": (lambda m: m.down.weight.norm(), "'down.weight'", "norm"),
    "orthogonal": (lambda m: (m.up.weight.T @ m.up.weight - 1).square().sum(), "'up.weight'", "(T)"),
    "a vector": (lambda m: nn.utils.parameters_to_vector(both(m)).abs().sum(), "'up.weight'", "view"),
    "detached": (lambda m: float(m.up.weight.detach().mean()), "'up.weight'", "Python number"),
    "data": (lambda m: 0 * m.free.sum() + m.up.weight.data.mean().item(), "'up.weight'", "Python number"),
    "gains": (lambda m: m.norm.weight.square().sum(), "'norm.weight'", "square"),
    "a bias": (lambda m: m.down.bias.abs().sum(), "'down.bias'", "abs"),
    "stacked": (lambda m: torch.stack([w.mean() for w in both(m)]).sum(), "'up.weight'", "mean"),
}


def text_of(act: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        act()
    return str(caught.value)


def penalties(world: Any) -> dict[str, str]:
    found = {}
    for what, (penalty, *_) in PENALTIES.items():
        engine = begun(world, loss=lambda model, batch, penalty=penalty: model(batch) + penalty(model))
        found[what] = text_of(lambda engine=engine: engine.train_step([tokens()]))
        engine.close()
    return found


def test_penalties_in_the_loss_name_parameter_operation_and_line(ranks: Any) -> None:
    for found in ranks(2).run(penalties):
        for what, (_, parameter, operation) in PENALTIES.items():
            assert parameter in found[what] and operation in found[what], found[what]
            assert "test_own_use.py:" in found[what] or what == "a vector", found[what]


def elsewhere(world: Any) -> list[str]:
    engine = begun(world)
    loss = engine(tokens())
    own_loop = text_of(lambda: loss + engine.module.up.weight.sum())
    engine.backward(loss)
    assert engine.module.up.weight.sum() != 0, "the step is over"
    engine.step()
    engine.close()
    found = [own_loop]
    for also in (
        lambda model, x: F.linear(x, model.up.weight).sum(),
        lambda model, x: F.linear(x, model.embed.weight).sum(),
        lambda model, x: F.layer_norm(x, (4,), model.norm.weight).sum(),
    ):
        engine = begun(world, also)
        found.append(text_of(lambda engine=engine: engine.train_step([tokens()])))
        engine.close()
    engine = begun(world, loss=lambda model, batch: model(batch) + model.up.weight.sum())
    found.append(text_of(lambda: engine.evaluate([(tokens(), 1.0)])))
    engine.close()
    return found


def test_uses_in_other_layers_in_own_loops_and_in_evaluation(ranks: Any) -> None:
    wanted = ["'up.weight'", "'up.weight'", "'embed.weight'", "'norm.weight'", "'up.weight'"]
    for found in ranks(2).run(elsewhere):
        for parameter, text in zip(wanted, found, strict=True):
            assert parameter in text and "test_own_use.py:" in text, text


def allowed(world: Any) -> Any:
    """What a model may do with its parameters: shapes, dtypes, whole ones, and after the first step hooks are gone."""

    def loss(model: Any, batch: Tensor) -> Tensor:
        count = sum(p.numel() for p in model.parameters() if p.requires_grad and p.is_floating_point())
        like = torch.zeros_like(model.up.weight).sum() + model.head.weight.new_zeros(())
        total: Tensor = model(batch) + model.free.abs().sum() + like.to(model.up.weight.dtype) + 0 * count
        return total

    engine = begun(world, loss=loss)
    hooks = sum(len(each._forward_hooks) for each in engine.module.modules())
    engine.evaluate([(tokens(), 1.0)])
    losses = [engine.train_step([tokens()]).loss for _ in range(2)]
    assert hooks == sum(len(each._forward_hooks) for each in engine.module.modules())
    assert all(type(each) is nn.Parameter for each in engine.module.parameters())
    engine.close()
    return losses


def test_what_reads_no_numbers_of_a_slice_is_allowed_and_nothing_stays_behind(ranks: Any) -> None:
    first, second = ranks(2).run(allowed)
    assert first == pytest.approx(second) and first[1] < first[0]
