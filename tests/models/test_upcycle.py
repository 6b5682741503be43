"""A mixture of experts that starts as a dense model."""

from typing import Any

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.models.gpt import Gpt, GptExperts, GptPolicy
from shardwise.models.upcycle import upcycled, upcycled_policy

DENSE = GptPolicy(layers=2, width=8, heads=2, context=8, vocab=11, hidden=6)


def experts(router: dict[str, Any] | None = None, **keys: Any) -> GptExperts:
    return GptExperts.model_validate({"count": 4, "router": router or {}, **keys})


def test_the_function_is_that_of_the_dense_model() -> None:
    torch.manual_seed(0)
    dense = Gpt(DENSE)
    weights = dense.state_dict()
    policy = upcycled_policy(DENSE, experts())
    made = upcycled(policy, weights.__getitem__, lambda name: weights[name].dtype, seed=3)
    tensors = {name: each.make() for name, each in made.items()}
    assert all(
        tensors[name].shape == each.shape and tensors[name].dtype == each.dtype for name, each in made.items()
    )
    model = Gpt(policy)
    model.load_state_dict(tensors, strict=False)
    tokens = torch.arange(8).view(1, 8)
    assert torch.allclose(model(tokens), dense(tokens), atol=1e-5)
    router = next(name for name in made if name.endswith("router.weight"))
    other = upcycled(policy, weights.__getitem__, lambda name: weights[name].dtype, seed=4)[router].make()
    assert not torch.equal(tensors[router], other) and torch.equal(made[router].make(), tensors[router])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"hidden": 7}, "each expert is a copy of 6 features"),
        ({"shared": 1}, "nothing to make shared experts of"),
        ({"router": {"top_k": 1}}, "must add up to 1"),
        ({"router": {"scale": 2.0}}, "must add up to 1"),
        ({"router": {"capacity": 1.5}}, "must add up to 1"),
    ],
)
def test_a_model_that_would_not_start_as_the_dense_one(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"experts: .*{text}"):
        upcycled_policy(DENSE, experts(**given))


def test_a_model_with_experts_and_one_of_the_same_width() -> None:
    policy = upcycled_policy(DENSE, experts(hidden=6))
    assert policy.experts is not None and policy.layers == 2
    with pytest.raises(ConfigError, match="has experts already"):
        upcycled_policy(policy, experts())
