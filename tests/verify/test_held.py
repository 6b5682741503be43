"""Each rank's own gradients add up to the sums, and a rank without room keeps neither weights nor gradients."""

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import shardwise
from shardwise.verify import held
from shardwise.verify.held import HeldState


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def run(records: bool = True) -> tuple[HeldState, Any]:
    config = {"optimizer": {"type": "sgd", "lr": 0.1}, "batch": {"accumulation": 2}, "precision": "fp64"}
    engine = shardwise.initialize(model(), config, loss=lambda module, batch: module(batch).square().mean())
    kept = HeldState(engine, records, steps=1)
    batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(2)]
    with kept.step():
        result = engine.train_step(batches, [1.0, 3.0])
    engine.close()
    return kept, result


def test_addends_add_up_to_the_summed_gradients() -> None:
    kept, result = run()
    (addends,), (divisor,) = kept.found["addends"], kept.found["divisors"]
    assert set(addends) == set(kept.summed.gradients) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, own in addends.items():
        assert len(own) == 2
        assert torch.allclose(sum(own) / divisor, kept.summed.gradients[name])
    squares = sum(sum(each) for each in kept.found["squares"]) / divisor**2
    assert abs(squares**0.5 - result.grad_norm) < 1e-12
    before, after = kept.found["copies"]
    assert torch.allclose(before["2.bias"] - 0.1 * kept.summed.gradients["2.bias"], after["2.bias"])
    assert kept.found["positions"]["0.weight"].flatten().tolist() == list(range(12))


def test_a_rank_without_room_keeps_neither_weights_nor_gradients() -> None:
    with patch.object(held, "available_bytes", lambda device: 1000):
        kept, _ = run()
    assert "may be used" in kept.lacks
    assert not kept.found["addends"] and not kept.found["copies"] and kept.found["positions"]
    assert kept.summed.gradients
