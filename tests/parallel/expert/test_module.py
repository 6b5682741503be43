"""MixtureOfExperts against loops over tokens and experts, in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.models.initial import draw_all, torch_rules
from shardwise.plan.errors import ConfigError, NonFiniteError, UsageError
from tests.parallel.expert import naive

WIDTH, HIDDEN, EXPERTS = 5, 3, 4


def made(seed: int = 0, **router: Any) -> shardwise.MixtureOfExperts:
    torch.manual_seed(seed)
    policy = shardwise.RouterPolicy(**router)
    return shardwise.MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, router=policy).double()


def batch(b: int = 2, t: int = 6, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, t, WIDTH, generator=generator, dtype=torch.float64)


def gradients(loss: Tensor, layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, [x, *parameters])
    return dict(zip(("x", *names), found, strict=True))


def close(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return bool((a - b).norm() <= 1e-12 * max(float(b.norm()), 1.0))


@pytest.mark.parametrize(
    "router",
    [{}, {"top_k": 1}, {"top_k": 4}, {"top_k": 3, "normalize": False, "scale": 2.5}],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_loops(router: dict[str, Any]) -> None:
    layer, x = made(**router), batch().requires_grad_()
    weight = batch(seed=2)
    mine, theirs = layer(x), naive.layer(dict(layer.named_parameters()), layer.router.policy, x)
    assert close(mine, theirs)
    expected = gradients((theirs * weight).sum(), layer, x)
    for name, found in gradients((mine * weight).sum(), layer, x).items():
        assert close(found, expected[name]), name
        assert found.any(), f"{name}: a gradient of 0 shows nothing"


def test_equal_scores_go_to_the_lower_experts() -> None:
    layer, x = made(top_k=2), batch()
    nn.init.zeros_(layer.router.weight)
    tokens = layer.surroundings.take(x)
    assert layer.router(tokens, layer.surroundings).index.tolist() == [[0, 1]] * 12


def test_an_index_of_minus_one_adds_nothing() -> None:
    layer, hidden = made(), batch()[0]
    index = torch.tensor([[0, 1], [2, -1], [-1, -1], [-1, 3], [3, 0], [1, 2]])
    weights = torch.rand(6, 2, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    for row, into, weight, x in zip(
        layer.experts(hidden, index, weights), index, weights, hidden, strict=True
    ):
        parts = [w * naive.expert(parameters, int(e), x) for e, w in zip(into, weight, strict=True) if e >= 0]
        assert close(row, sum(parts, torch.zeros(WIDTH, dtype=torch.float64)))


def test_experts_without_rows_have_gradients_of_zero() -> None:
    layer, x = made(top_k=1), batch(1, 1)
    layer(x).sum().backward()
    assert layer.experts.down.grad is not None and int(layer.experts.down.grad.any(-1).any(-1).sum()) == 1


def test_one_token_and_none() -> None:
    layer = made()
    assert layer(batch(1, 1)).shape == (1, 1, WIDTH)
    x = batch(0, 3).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and not layer.experts.down.grad.any()  # type: ignore[union-attr]


def test_the_router_works_in_fp32_at_least() -> None:
    layer = made().bfloat16()
    x = batch().bfloat16()
    tokens = layer.surroundings.take(x)
    assert layer.router(tokens, layer.surroundings).weights.dtype == torch.float32
    assert layer(x).dtype == torch.bfloat16


def test_a_layer_made_on_meta_starts_by_its_rules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, WIDTH), shardwise.MixtureOfExperts(WIDTH, HIDDEN, EXPERTS))
    rules = torch_rules(model)
    model = model.to_empty(device="cpu")
    draw_all(model, rules, seed=0)
    down = model.get_parameter("1.experts.down")
    assert float(down.detach().abs().max()) <= HIDDEN**-0.5 and float(down.detach().std()) > 0.2


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="top_k is 5 but there are 4 experts"):
        made(top_k=5)
    with pytest.raises(ConfigError, match="experts is 0"):
        shardwise.MixtureOfExperts(4, 4, 0)
    with pytest.raises(ValueError, match="the router gets no gradient"):
        made(top_k=1, normalize=True)
    with pytest.raises(UsageError, match=r"shape \[2, 5\]; expected \[batch, sequence, 5\]"):
        made()(batch()[:, 0])
    layer, x = made(), batch()
    layer.surroundings.name = "blocks.3.mlp"
    x[1, 2, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"^blocks.3.mlp: the router .* for 1 of 12 tokens"):
        layer(x)
