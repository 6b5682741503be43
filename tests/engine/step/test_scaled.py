"""Factors of a plain loop around a loss: refused by name in the first step, and weights of losses pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from tests.engine.nets import seeded


def made(accumulation: int, has_loss: bool = True, **batch: Any) -> shardwise.Engine:
    model = seeded(nn.Linear, 3, 1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out.square().mean() / 2 if has_loss else out  # the half is a part of the loss

    return shardwise.initialize(
        model, {"batch": {"accumulation": accumulation} | batch}, loss=loss, world=World(0, 1)
    )


SCALER = torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda loss: loss / 2, "by 1/2, and batch.accumulation is 2"),
        (lambda loss: loss * 0.5, "by 1/2"),
        (lambda loss: 0.5 * loss, "by 1/2"),
        (lambda loss: -(loss / 2), "by 1/2"),
        (SCALER.scale, "as torch's GradScaler does"),
        (lambda loss: SCALER.scale(loss / 2), "as torch's GradScaler does"),
        (lambda loss: SCALER.scale(loss.float() / 3), "as torch's GradScaler does"),
    ],
    ids=lambda given: None if isinstance(given, str) else "",
)
def test_a_factor_of_a_plain_loop_is_refused(change: Callable[[Tensor], Tensor], said: str) -> None:
    engine = made(2)
    with pytest.raises(UsageError, match=said):
        engine.backward(change(engine(torch.randn(4, 3).double())))
    engine.discard()
    allowed = made(2, scaled_losses="allow")
    allowed.backward(change(allowed(torch.randn(4, 3).double())))
    engine.close()
    allowed.close()


def test_weights_of_losses_pass(caplog: pytest.LogCaptureFixture) -> None:
    factor = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    for change in (
        lambda loss: loss,
        lambda loss: 0.3 * loss,
        lambda loss: loss / 3,
        lambda loss: loss * 512,
        lambda loss: loss * 3000,
        lambda loss: loss * factor,
        lambda loss: (loss + loss.square()) * 0.5,
    ):
        engine = made(2)
        engine.backward(change(engine(torch.randn(4, 3).double())))
        engine.close()
    alone = made(1)
    alone.backward(alone(torch.randn(4, 3).double()) / 2)
    alone.close()
    assert not [each for each in caplog.records if "averages" in each.getMessage()]


def test_a_loss_of_the_loop_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Half a square may be meant where the loop computes the loss, so this is a warning."""
    engine = made(2, has_loss=False)
    with caplog.at_level("WARNING", logger="shardwise"):
        engine.backward(engine(torch.randn(4, 3).double()).square().mean() / 2)
    (said,) = [each.getMessage() for each in caplog.records if "averages" in each.getMessage()]
    assert "1/2" in said
    engine.close()
