"""Patterns that name no parameter are refused before anything is made of the model."""

from typing import Any

import pytest
from torch import nn

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import join


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"optimizer": {"groups": [{"match": "*norm*|*.bais"}]}},
            "group 0 matches no parameter; the model's are weight",
        ),
        (
            {"precision": {"compute": "bf16", "keep_fp32": ["bias", "haed.*"]}},
            "pattern 'haed.*' matches no parameter",
        ),
    ],
)
def test_a_pattern_without_effect(config: dict[str, Any], said: str) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with pytest.raises(ConfigError) as refused:
        shardwise.initialize(model, config, world=join(quiet=True))
    assert said in str(refused.value)
    assert model.weight is weight and not model._forward_pre_hooks
