"""``deepspeed.checkpointing``: one call that runs again in the backward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.deepspeed.training import recompute_calls
from shardwise.deepspeed.training.recompute_calls import checkpoint, configure, is_configured


def test_a_call_runs_again_and_has_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recompute_calls, "living", lambda: iter(())
    )  # an earlier test's engine may not be collected
    runs: list[int] = []

    def squared(x: Tensor) -> Tensor:
        runs.append(1)
        return (x * x).sin()

    x = torch.tensor([0.5, 2.0], requires_grad=True)
    y = checkpoint(squared, x)
    assert len(runs) == 1
    (found,) = torch.autograd.grad(y.sum(), x)
    assert len(runs) == 2 and torch.allclose(found, 2 * x * (x * x).cos())


def test_inside_a_pass_the_engine_runs_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(is_in_a_pass: bool, name: str) -> Any:
        ours = SimpleNamespace(
            is_in_a_pass=is_in_a_pass, recomputed=lambda function: lambda x: (name, function(x))
        )
        return SimpleNamespace(ours=ours)

    engines = [engine(False, "idle"), engine(True, "running")]
    monkeypatch.setattr(recompute_calls, "living", lambda: iter(engines))
    assert checkpoint(lambda x: x + 1, 1) == ("running", 2)


def test_configured_is_what_was_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_calls, "_SAID", {})
    assert not is_configured()
    configure(None, partition_activations=True)
    assert is_configured()
