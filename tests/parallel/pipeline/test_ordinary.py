"""200 ordinary nets: none is refused, and every one computes in stages what it does whole, in marked passes and in
later
ones."""

import copy
from typing import Any

import pytest
from torch import Tensor, nn

from shardwise.parallel.pipeline.cut import cut
from tests.parallel.pipeline.chain import forward_backward, gradients_of
from tests.parallel.pipeline.ordinary import ordinary


def loss_of(result: Any) -> Tensor:
    if isinstance(result, dict):
        return result["loss"]
    return result[0] if isinstance(result, tuple) else result


def error(seed: int) -> float:
    """The worst over three passes: the second is of the first one's kind, the third of another length."""
    net, batch, starts = ordinary(seed)
    whole = copy.deepcopy(net)
    stages = cut(net, starts, range(len(starts) + 1))
    worst = 0.0
    for length in (4, 4, 6):
        inputs, targets = batch(length)

        def call(model: nn.Module, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            return loss_of(model(inputs, targets))

        whole.zero_grad()
        wanted = call(whole)
        wanted.backward()
        wanted = wanted.detach()
        got = forward_backward(stages, call)
        gradients = gradients_of(stages, net)
        named = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        if set(named) != set(gradients):
            return float("inf")
        scale = max(float(grad.norm()) for grad in named.values())
        worst = max(
            worst,
            float((got - wanted).abs()),
            *(float((gradients[name] - grad).norm()) / scale for name, grad in named.items()),
        )
    return worst


@pytest.mark.parametrize(
    "decade", [*range(4), *(pytest.param(i, marks=pytest.mark.soak) for i in range(4, 20))]
)
def test_ordinary_nets_are_cut_and_exact(decade: int) -> None:
    for seed in range(10 * decade, 10 * decade + 10):
        assert error(seed) <= 1e-12, seed
