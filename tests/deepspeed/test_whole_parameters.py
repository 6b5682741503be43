"""Parameters in pieces are read and written as if they were whole, and what is written stays."""

from typing import Any

import pytest
import torch

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError
from tests.deepspeed.files.whole import engine_of, net


def test_a_context_for_reading_refuses_edits() -> None:
    model = net()
    engine = engine_of(model, 0)
    with (
        pytest.raises(UsageError, match="was edited"),
        deepspeed.zero.GatheredParameters(model[0]),
    ):
        model[0].bias.zero_()
    with deepspeed.zero.GatheredParameters(model[0], enabled=False):
        pass
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
def test_torch_func_goes_through_the_engine(stage: int) -> None:
    """The pass of ``torch.func.grad`` accumulates in no weight, and begins no step."""
    model = net()
    config = {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    width = next(model.parameters()).shape[1]
    x = torch.randn(width)
    found = torch.func.grad(lambda each: engine(each).sum())(x)
    assert torch.allclose(found, torch.func.grad(lambda each: model(each).sum())(x))
    for _ in range(2):
        engine.backward(engine(x).sum())
        engine.step()
    assert engine.global_steps == 1 and engine.sparse_tensor_module_names == set()
    assert engine.optimizer.dynamic_loss_scale is False
    engine.destroy()


class TwoInOne(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


def test_an_optimizer_without_rates_is_refused_by_name() -> None:
    model = net()
    with pytest.raises(UsageError, match="groups of TwoInOne have no 'lr'"):
        deepspeed.initialize(
            model=model, optimizer=TwoInOne(model.parameters()), config={"train_batch_size": 1}
        )
