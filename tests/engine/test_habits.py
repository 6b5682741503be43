"""What people do around a training loop by habit: right, or refused where it is called, with what to do instead.

Never a number that is silently wrong, and never a file of NaN.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World, join
from shardwise.plan.errors import UsageError
from tests.engine.nets import Language, seeded
from tests.engine.plain import against_plain, worst

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def piece(step: int, i: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + i))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def world() -> World:
    return join(quiet=True)


def start(world: Any, model: nn.Module | None = None, **config: Any) -> Any:
    model = seeded(Language) if model is None else model
    return shardwise.initialize(model, {"comm": {"deadline_s": 10.0}, **config}, world=world)


def raised(call: Callable[[], Any], kind: type[Exception] = UsageError) -> str:
    """The text of the expected error; anything else passes through."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


# p.grad between backward and step ----------------------------------------------------------------------------------


def gradient_habits(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """What training scripts do with ``p.grad``."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    first = parameters[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return {
        "clip by norm": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "clip by norm, one by one": lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
        "clip by value": lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        "scale": lambda: first.grad.mul_(0.5),
        "log": lambda: first.grad.norm().item(),
        "print": lambda: repr(first.grad),
        "noise": lambda: first.grad.add_(torch.randn_like(first)),
        "look at one": lambda: first.grad[0],
        "another loss": lambda: (first * 2).sum().backward(),
        "unscale": lambda: scaler.unscale_(optimizer),
        "scaler's step": lambda: scaler.step(optimizer),
        "step of one's own": lambda: optimizer.step(),
        "AdamW": lambda: torch.optim.AdamW(parameters).step(),
        "zero in place": lambda: optimizer.zero_grad(set_to_none=False),
    }


def refused_at_once(world: Any, stage: int) -> None:
    """p.grad was None between the two calls, so that clip_grad_norm_ returned 0.0 and clipped nothing."""
    engine = start(world, zero={"stage": stage})
    for name, habit in gradient_habits(engine.module).items():
        engine.backward(engine(*piece(0, world.rank)))
        text = raised(habit)
        assert ".grad: between engine.backward" in text and "clip: 1.0" in text, name
        assert "engine.gradients()" in text, name
        engine.step()
        assert all(p.grad is None for p in engine.module.parameters()), name
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_reading_gradients_by_habit_is_refused_where_it_is_called(ranks: Any, stage: int) -> None:
    ranks(2).run(refused_at_once, stage)


def test_zero_grad_in_the_right_places_does_nothing(world: World) -> None:
    """Before the forward pass, after the step, and in the middle of accumulation, as Accelerate has it."""

    def run(habit: Callable[[nn.Module], None]) -> dict[str, Tensor]:
        engine = start(world, batch={"accumulation": 2})
        for step in range(2):
            for i in range(2):
                habit(engine.module)
                loss = engine(*piece(step, i))
                habit(engine.module)
                engine.backward(loss)
                engine.step()
        state: dict[str, Tensor] = engine.state_dict()
        return state

    wanted = run(lambda model: None)
    assert worst(run(lambda model: model.zero_grad()), wanted) == 0


def test_gradients_that_were_dropped_or_given_are_not_ignored(world: World) -> None:
    engine = start(world)
    before = engine.state_dict()
    engine.backward(engine(*piece(0, 0)))
    engine.module.zero_grad()
    assert "engine.discard()" in raised(engine.step)
    engine.backward(engine(*piece(0, 0)))
    engine.module.norm.weight.grad = torch.ones(6, dtype=torch.float64)
    assert "norm.weight.grad was set after engine.backward" in raised(engine.step)
    engine.backward(engine(*piece(0, 0)))
    engine.discard()
    assert worst(engine.state_dict(), before) == 0
    assert all(p.grad is None for p in engine.module.parameters())
    engine.backward(engine(*piece(0, 0)))
    assert engine.step().step == 1


def exact_beside_marks(world: Any, stage: int) -> float:
    return against_plain(
        world,
        lambda: seeded(Language),
        piece,
        {"zero": {"stage": stage}, "batch": {"accumulation": 2}},
        loss_of=lambda model, batch: model(*batch),
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_marks_change_no_number(ranks: Any, stage: int) -> None:
    assert max(ranks(2).run(exact_beside_marks, stage)) <= 1e-12
