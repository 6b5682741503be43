"""MixtureOfExperts against loops over tokens and experts, in fp64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError, NonFiniteError, UsageError
from shardwise.kernels.philox import key_of, uniform_of
from shardwise.models.initial import draw_all, torch_rules
from shardwise.passes.replay import BatchPosition, DrawReplay
from tests.parallel.expert import naive
from tests.parallel.expert.small import EXPERTS, HIDDEN, WIDTH, batch, close, gradients, made

MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()


def compare(
    layer: shardwise.MixtureOfExperts, x: Tensor, mask: Tensor | None = None, **given: Tensor
) -> dict[str, Any]:
    """Values, gradients with the balance term, and counts."""
    x = x.requires_grad_()
    weight = batch(*x.shape[:2], seed=2)
    parameters, policy = dict(layer.named_parameters()), layer.router.policy
    given |= dict(layer.router.named_buffers())
    theirs, value, seen = naive.layer(parameters, policy, x, mask, **given)
    mine = layer(x, mask)
    assert close(mine, theirs)
    expected = gradients((theirs * weight).sum() + value, layer, x)
    for name, found in gradients((mine * weight).sum(), layer, x).items():
        assert close(found, expected[name]), name
    assert layer.surroundings.routed is not None and layer.surroundings.routed.tolist() == seen["routed"]
    return seen


@pytest.mark.parametrize(
    "router",
    [
        {},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 3, "normalize": False, "scale": 2.5},
        {"score": "sigmoid", "scale": 1.5},
        {"groups": 2, "top_groups": 1},
        {"score": "sigmoid", "groups": 2, "top_groups": 1, "normalize": False},
        {"balance": "loss", "balance_weight": 0.7},
        {"balance": "loss", "score": "sigmoid", "z_weight": 0.3},
        {"balance": "loss", "balance_over": "batch", "capacity": 0.75},
        {"z_weight": 0.4, "top_k": 1},
        {"balance": "bias", "score": "sigmoid"},
        {"capacity": 0.5},
        {"capacity": 0.4, "min_capacity": 2, "drop": "position"},
        {"capacity": 1.0, "balance": "loss", "z_weight": 0.1, "top_k": 3},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_loops(router: dict[str, Any]) -> None:
    layer = made(**router)
    if layer.router.bias is not None:
        layer.router.bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
    if layer.router.loads is not None:
        layer.router.loads.copy_(torch.tensor([0.5, 0.25, 0.0, 0.25]))
    whole = compare(layer, batch(3))
    if "capacity" in router:
        assert 0 < sum(whole["kept"]) < sum(whole["routed"]), "a case that drops nothing shows nothing"
    layer.surroundings.routed = None
    compare(layer, batch(3), MASK)


def test_shared_experts_and_a_dense_branch() -> None:
    compare(made(shared=2, balance="loss"), batch())
    compare(made(residual=True), batch())
    layer = made(shared=2, residual=True)
    assert {name: list(each.shape) for name, each in layer.named_parameters()} == {
        "router.weight": [EXPERTS, WIDTH],
        "experts.gate_up": [EXPERTS, 2 * HIDDEN, WIDTH],
        "experts.down": [EXPERTS, WIDTH, HIDDEN],
        "shared.gate_up.weight": [4 * HIDDEN, WIDTH],
        "shared.down.weight": [WIDTH, 2 * HIDDEN],
        "residual.gate_up.weight": [2 * HIDDEN, WIDTH],
        "residual.down.weight": [WIDTH, HIDDEN],
        "mix.weight": [2, WIDTH],
        "mix.bias": [2],
    }


def drawn(replay: DrawReplay, name: str, sequences: int, numbers: int, width: int) -> Tensor:
    """Noise as its docstring says."""
    at, key = replay.place, key_of(7, f"router:{name}")
    rows = [(0, at.first_sample + b, at.step) for b in range(sequences)]
    return uniform_of(key, 0, numbers * width, rows).view(sequences, numbers, width)


@pytest.mark.parametrize("noise", ["jitter", "gumbel"])
def test_noise_is_a_function_of_its_place(noise: str) -> None:
    layer, replay = made(noise=noise, balance="loss"), DrawReplay()
    layer.surroundings.name, layer.surroundings.seed, layer.surroundings.replay = "mlp", 7, replay
    with replay.at(BatchPosition(step=3, first_sample=4)):
        if noise == "jitter":
            given = {"jitter": 0.99 + 0.02 * drawn(replay, "mlp", 2, 6, WIDTH)}
        else:
            given = {"gumbel": -(-drawn(replay, "mlp", 2, 6, EXPERTS).log()).log()}
        compare(layer, batch(), **given)
        again = layer(batch())
    with replay.at(BatchPosition(step=3, first_sample=5)):
        assert not close(layer(batch())[0], again[0]), "a second call, and another sample, draw anew"
        layer.eval()
        assert close(
            layer(batch()), naive.layer(dict(layer.named_parameters()), layer.router.policy, batch())[0]
        )


def test_noise_without_an_engine_is_torchs() -> None:
    layer = made(noise="gumbel")
    torch.manual_seed(3)
    first = layer(batch())
    torch.manual_seed(3)
    assert torch.equal(layer(batch()), first) and not torch.equal(layer(batch()), first)


def test_an_index_of_minus_one_adds_nothing() -> None:
    layer, hidden = made(), batch()[0]
    index = torch.tensor([[0, 1], [2, -1], [-1, -1], [-1, 3], [3, 0], [1, 2]])
    weights = torch.rand(6, 2, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    rows = layer.experts(hidden, index, weights)
    for row, into, weight, x in zip(rows, index, weights, hidden, strict=True):
        parts = [w * naive.expert(parameters, int(e), x) for e, w in zip(into, weight, strict=True) if e >= 0]
        assert close(row, sum(parts, torch.zeros(WIDTH, dtype=torch.float64)))


def test_experts_without_rows_have_gradients_of_zero() -> None:
    layer, x = made(top_k=1), batch(1, 1)
    layer(x).sum().backward()
    assert layer.experts.down.grad is not None and int(layer.experts.down.grad.any(-1).any(-1).sum()) == 1


def test_one_token_and_none() -> None:
    compare(made(), batch(1, 1))
    layer = made(balance="loss", z_weight=1.0, capacity=1.0)
    x = batch(0, 3).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and not layer.experts.down.grad.any()
    masked = batch().requires_grad_()
    layer(masked, torch.zeros(2, 6).bool()).sum().backward()
    assert not masked.grad.any(), "where no token counts, nothing is routed and nothing is balanced"


def test_the_gradient_check_of_torch() -> None:
    layer = made(capacity=1.0, score="sigmoid", shared=1).eval()
    assert torch.autograd.gradcheck(layer, batch(1, 4).requires_grad_())


def test_the_router_works_in_fp32_at_least() -> None:
    layer, x = made(balance="bias").bfloat16(), batch().bfloat16()
    assert layer.router.bias is not None and layer.router.bias.dtype == torch.float32
    tokens = layer.surroundings.take(x)
    assert layer.router(tokens, layer.surroundings).weights.dtype == torch.float32
    assert layer(x).dtype == torch.bfloat16


class Made(nn.Module):
    """An expert of the user's own: a parameter beside a net."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


def test_any_module_is_an_expert() -> None:
    torch.manual_seed(0)
    modules: list[Made] = []

    def make() -> Made:
        modules.append(Made())
        return modules[-1]

    layer = shardwise.MixtureOfExperts(WIDTH, HIDDEN, 3, expert=make, residual=True).double()
    one, *others = (copy.deepcopy(module).double() for module in modules[1:])
    x = batch()
    tokens = layer.surroundings.take(x)
    routing = layer.router(tokens, layer.surroundings)
    (layer(x) ** 2).sum().backward()
    assert layer.get_parameter("experts.net.0.weight").shape == (3, 7, WIDTH)
    assert layer.get_parameter("experts.scale").grad.shape == (3, WIDTH)
    for n, hidden in enumerate(tokens.hidden):
        e = int(routing.index[n, 0])
        only = layer.experts(hidden[None], routing.index[n : n + 1, :1], torch.ones(1, 1).double())
        if e:
            assert close(only[0], [one, *others][e - 1](hidden))
    assert copy.deepcopy(layer)(x).equal(layer(x))
    assert layer.state_dict().keys() == dict(layer.named_parameters()).keys()


@pytest.mark.parametrize(
    ("expert", "said"),
    [
        (
            lambda: nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1)),
            r"dropout inside \(1 \(p=0.1\)\).*behind the layer",
        ),
        (lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), "has buffers .*running_mean"),
        (lambda: nn.Tanh(), "has no parameters"),
        (lambda: nn.Linear(5, 4), r"made \[\d+, 4\] of rows \[\d+, 5\]"),
    ],
    ids=["dropout", "buffers", "empty", "shape"],
)
def test_experts_that_a_stack_cannot_be_are_refused(expert: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=said):
        shardwise.MixtureOfExperts(WIDTH, HIDDEN, 3, expert=expert).double()(batch())


@pytest.mark.parametrize("expert", [None, Made], ids=["ours", "made"])
def test_a_layer_made_on_meta_starts_by_its_rules(expert: Any) -> None:
    policy = shardwise.RouterPolicy(balance="bias")
    with torch.device("meta"):
        layer = shardwise.MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, policy, expert, residual=True)
        model = nn.Sequential(nn.Linear(2, WIDTH), layer)
    if expert is not None:
        with pytest.raises(shardwise.ShardwiseError, match="parameter scale of an expert belongs to a Made"):
            torch_rules(model)
        return
    rules = torch_rules(model)
    model = model.to_empty(device="cpu")
    draw_all(model, rules, seed=0)
    down = model.get_parameter("1.experts.down").detach()
    assert float(down.abs().max()) <= HIDDEN**-0.5 and float(down.std()) > 0.2
    assert not model.get_buffer("1.router.bias").any(), "a bias begins at zero"


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="top_k is 5 but there are 4 experts"):
        made(top_k=5)
    with pytest.raises(ConfigError, match="groups is 3, which does not divide 4 experts"):
        made(groups=3)
    with pytest.raises(
        ConfigError, match=r"1 groups of 2 experts have 2, fewer than the 3 .* expected at least 2"
    ):
        made(top_k=3, groups=2, top_groups=1)
    with pytest.raises(ConfigError, match="experts is 0"):
        shardwise.MixtureOfExperts(4, 4, 0)
    with pytest.raises(ConfigError, match="shared is 1 beside expert="):
        shardwise.MixtureOfExperts(4, 4, 2, expert=Made, shared=1)
    for wrong, said in (
        ({"top_k": 1, "normalize": True}, "the router gets no gradient"),
        ({"capacity": 0}, "greater than 0"),
        ({"min_capacity": 2}, "min_capacity is 2, which acts with capacity alone"),
        ({"bias_rate": 0.1}, "acts with balance: bias alone"),
        ({"top_groups": 2}, "top_groups is 2 of 1 groups"),
    ):
        with pytest.raises(ValueError, match=said):
            shardwise.RouterPolicy(**wrong)
    with pytest.raises(UsageError, match=r"shape \[2, 5\]; expected \[batch, sequence, 5\]"):
        made()(batch()[:, 0])
    with pytest.raises(UsageError, match=r"mask of shape \[2, 5\]; expected \[2, 6\]"):
        made()(batch(), torch.ones(2, 5))
    x = batch()
    x[1, 2, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="no finite logits for 1 of 12 tokens"):
        made()(x)
