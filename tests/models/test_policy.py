"""The key ``model:``: one of ours, or a function of the user's."""

import sys
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.models import build
from shardwise.models.ctr.policy import CTR_POLICIES
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.models.policy import ModelPolicy, TargetPolicy, reads_clicks

adapter: TypeAdapter = TypeAdapter(ModelPolicy)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "def stack(depth, width=4):\n    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])\n"
        "def number(): return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    return "own_models"


def test_one_of_ours() -> None:
    policy = adapter.validate_python({"name": "gpt", "layers": 1, "width": 24, "heads": 3, "context": 8})
    assert isinstance(policy, GptPolicy)
    model = build(policy, vocab=40, seed=2)
    assert isinstance(model, Gpt)
    assert model.policy.vocab == 40
    assert torch.equal(model.embed.weight, Gpt(policy.resolved(40), seed=2).embed.weight)
    assert adapter.validate_python({}) == GptPolicy()
    assert adapter.validate_python(policy) is policy


@pytest.mark.parametrize("name", list(CTR_POLICIES))
def test_a_click_through_model(name: str) -> None:
    policy = adapter.validate_python({"name": name})
    assert policy == CTR_POLICIES[name]() and adapter.validate_python(policy.model_dump()) == policy
    assert reads_clicks(policy) and reads_clicks({"name": name}) and not reads_clicks(GptPolicy())
    assert not reads_clicks({"target": "m:f", "name": name}) and not reads_clicks(None)


def test_a_function_of_the_user_s(own_module: str) -> None:
    policy = adapter.validate_python({"target": f"{own_module}:stack", "depth": 3, "arguments": {"width": 5}})
    assert isinstance(policy, TargetPolicy)
    assert adapter.validate_python(policy) is policy
    model = build(policy)
    assert isinstance(model, nn.Sequential)
    assert [tuple(layer.weight.shape) for layer in model] == [(5, 5)] * 3
    assert adapter.validate_python(policy.model_dump()) == policy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "gtp"}, "there is no model 'gtp'; did you mean 'gpt'"),
        ({"name": "dcm"}, "there is no model 'dcm'; did you mean 'dcn'"),
        ({"name": "dlrm", "widht": 3}, "unknown key 'widht'; did you mean 'width'"),
        ({"name": "gpt", "widht": 3}, "unknown key 'widht'; did you mean 'width'"),
        ({"target": "no colon"}, "expected 'module:function'"),
        ({"target": "m:f", "a": 1, "arguments": {"a": 2}}, "a stands both in arguments and beside it"),
    ],
)
def test_wrong_keys(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        adapter.validate_python(given)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_here:f", "no module 'no_such_module_here'"),
        ("own_models:stac", "has no 'stac'; did you mean 'stack'"),
        ("own_models:number", "returned a int; expected an nn.Module"),
    ],
)
def test_wrong_targets(own_module: str, target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(TargetPolicy(target=target))
