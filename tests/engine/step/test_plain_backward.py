"""A script's own ``loss.backward()`` counts as the engine's, once it is asked to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from tests.ranks import RankPool


class Two(nn.Module):
    """Two outputs, of which a loss may take either."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.below(x))
        return self.left(x), self.right(x)


def net() -> Two:
    torch.manual_seed(2)
    return Two().double()


def batch(rank: int, place: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * place + rank), dtype=torch.float64)


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "zero": {"stage": stage},
        "batch": {"accumulation": 2, "weigh_by": "batches"},
        "optimizer": {"type": "sgd", "lr": 0.1},
        **more,
    }


def loss_of(outputs: tuple[Tensor, Tensor], place: int) -> Tensor:
    return 3 * outputs[0].square().mean() + (outputs[1].sum() if place % 2 else 0)


def losses_own_backward(world: World, stage: int) -> tuple[dict[str, Tensor], float]:
    engine = shardwise.initialize(net(), config=config(stage))
    engine.adopt_backward()
    for place in range(4):
        x = batch(world.rank, place).requires_grad_()
        outputs = engine(x)
        loss = loss_of(outputs, place)
        torch.autograd.grad(
            outputs[0].sum(), x, retain_graph=True
        )  # lands in no weight, so it counts nothing
        if place == 2:
            engine.backward(loss, weight=1)
        else:
            loss.backward()
        result = engine.step()
    assert result is not None and engine.step_count == 2 and not result.divergences
    found = engine.state_dict(), result.grad_norm
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_equals_plain_torch(ranks: Callable[[int], RankPool], stage: int) -> None:
    (weights, norm), _ = ranks(2).run(losses_own_backward, stage)
    model = net()
    for step in range(2):
        model.zero_grad()
        for place in (2 * step, 2 * step + 1):
            for rank in range(2):
                (loss_of(model(batch(rank, place)), place) / 4).backward()
        last = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(norm, float(last), rtol=1e-12, atol=0)
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-12, atol=1e-15)


def test_without_being_asked_it_is_refused_as_ever() -> None:
    engine = shardwise.initialize(net(), config=config(0))
    with pytest.raises(UsageError, match=r"outside engine\.backward"):
        loss_of(engine(batch(0, 0)), 0).backward()
    engine.discard()
    engine.adopt_backward()
    loss_of(engine(batch(0, 0)), 0).backward()
    engine.close()
    model = engine.module
    model(batch(0, 0))[0].sum().backward()
    assert model.below.weight.grad is not None, "given back, it is plain torch"


def test_a_step_may_be_divided_by_a_fixed_number() -> None:
    """As scripts do that divide each loss by a constant, whatever became of the others of the step."""
    model = net()
    engine = shardwise.initialize(model, config=config(0))
    engine.set_boundary(True)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    engine.backward(loss_of(engine(batch(0, 0)), 0), weight=1)
    engine.step(weight=2)
    plain = net()
    (loss_of(plain(batch(0, 0)), 0) / 2).backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            moved = before[name] - engine.state_dict()[name]
            torch.testing.assert_close(moved, 0.1 * parameter.grad, rtol=1e-9, atol=1e-12)
    engine.close()
