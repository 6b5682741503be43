"""The balance term, its injection and the bias."""

from typing import Any

import pytest
import torch

from shardwise.parallel.expert.balance import inject, move_bias
from tests.parallel.expert import naive
from tests.parallel.expert.small import EXPERTS, batch, close, gradients, made


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_even_routing_costs_the_weight(score: str) -> None:
    """Each expert gets one token of four; with all tokens to one expert it costs E times as much."""
    layer = made(top_k=1, score=score, balance="loss", balance_weight=0.5)
    x = torch.eye(4, 5, dtype=torch.float64)[None]
    weight = layer.router.weight.detach()
    weight.copy_(60 * torch.eye(4, 5))
    even = naive.layer(dict(layer.named_parameters()), layer.router.policy, x)[1]
    weight.copy_(torch.eye(4, 1) @ torch.full((1, 5), 60.0))
    weight[1:] = -60
    skewed = naive.layer(dict(layer.named_parameters()), layer.router.policy, x)[1]
    assert float(even.detach()) == pytest.approx(0.5) and float(skewed.detach()) == pytest.approx(
        0.5 * EXPERTS
    )


def test_the_loss_stays_and_the_gradient_is_scaled() -> None:
    x, value = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    scale = [1.0]
    y = inject(x, value, lambda: scale[0])
    scale[0] = 8.0  # asked for in backward
    y.sum().backward()
    assert torch.equal(y, x) and x.grad.tolist() == [1, 1, 1] and float(value.grad) == 8.0


MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]]).bool()


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "router",
    [
        {"balance": "loss", "z_weight": 0.2, "capacity": 0.75},
        {"balance": "loss", "balance_over": "batch", "capacity": 1.0},
    ],
    ids=str,
)
def test_nothing_depends_on_how_a_batch_is_cut(router: dict[str, Any], masked: bool) -> None:
    """Gradients of a batch, and of its parts weighed by their tokens."""
    layer, x, weight = made(**router), batch(4).requires_grad_(), batch(4, seed=3)
    mask = MASK if masked else torch.ones_like(MASK)
    if layer.router.loads is not None:
        layer.router.loads.copy_(torch.tensor([0.5, 0.25, 0.0, 0.25]))
    layer.surroundings.scale = lambda: float(mask.sum())
    whole = gradients((layer(x, mask) * weight).sum(), layer, x)
    total = {name: torch.zeros_like(each) for name, each in whole.items()}
    for part in (slice(0, 1), slice(1, 2), slice(2, 4)):
        tokens = float(mask[part].sum())
        layer.surroundings.scale = lambda tokens=tokens: tokens
        for name, found in gradients((layer(x[part], mask[part]) * weight[part]).sum(), layer, x).items():
            total[name] += found
    for name, found in total.items():
        assert close(found, whole[name]), name


def test_the_bias_moves_against_the_load() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5, 0.5])
    move_bias(bias, torch.tensor([9, 3, 6, 6]), 0.25)
    assert bias.tolist() == [0.25, 0.75, 0.5, 0.5]


def test_without_an_engine_the_bias_is_moved_by_hand() -> None:
    layer = made(top_k=1, balance="bias", bias_rate=0.5)
    layer(batch()), layer(batch(seed=2))  # two microbatches
    routed = layer.surroundings.routed
    assert routed is not None and int(routed.sum()) == 24
    expected = 0.5 * (24 - EXPERTS * routed).sign()
    with torch.no_grad():
        layer(batch())
    layer.eval()(batch())
    layer.end_step()
    assert layer.router.bias.tolist() == expected.tolist() and layer.surroundings.routed is None
    layer.end_step()
    assert layer.router.bias.tolist() == expected.tolist(), "a step without tokens moves nothing"


def test_loads_of_the_step_before() -> None:
    layer = made(top_k=1, balance="loss", balance_over="batch")
    first = gradients(layer(batch().requires_grad_()).sum() * 0, layer, layer.router.weight)["router.weight"]
    assert float(first.abs().max()) <= 1e-8, "even loads pull nowhere, up to the rounding of 1/E"
    routed = layer.surroundings.routed
    layer.end_step()
    assert layer.router.loads.tolist() == (routed / 12).tolist() and max(routed) > 3
    layer.end_step()
    assert layer.router.loads.tolist() == (routed / 12).tolist(), "a step without tokens changes nothing"


def test_a_bias_spreads_tokens() -> None:
    layer, x = made(top_k=1, balance="bias", bias_rate=0.05, score="sigmoid"), batch(4, 16)
    layer.router.bias[0] = 1.0  # more than any score
    worst = []
    for _ in range(60):
        layer(x)
        worst.append(int(layer.surroundings.routed.max()))
        layer.end_step()
    assert worst[0] == 64 and max(worst[-10:]) <= 20, worst
