"""Rules that the groups of an optimizer object name are those of the configuration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.optim.named_rules import NamedRules


def net() -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(6, 2)).double()


def trained(given: dict[str, Any] | NamedRules, model: nn.Module) -> list[Tensor]:
    arguments = {"optimizer": given} if isinstance(given, NamedRules) else {}
    config = {} if isinstance(given, NamedRules) else {"optimizer": given}
    engine = shardwise.initialize(model, config=config, **arguments)
    drawn = torch.Generator().manual_seed(4)
    for _ in range(3):
        x = torch.randn(5, 6, generator=drawn, dtype=torch.float64)
        engine.backward(engine(x).square().mean())
        engine.step()
    return [*engine.state_dict().values()]


@pytest.mark.parametrize("kind", ["adamw", "lion", "lamb", "lars"])
def test_one_rule(kind: str) -> None:
    model = net()
    named = NamedRules([{"params": model.parameters(), "type": kind, "lr": 0.02, "weight_decay": 0.1}])
    torch.testing.assert_close(
        trained(named, model), trained({"type": kind, "lr": 0.02, "weight_decay": 0.1}, net()), rtol=0, atol=0
    )


def test_muon_for_matrices_and_another_rule_for_the_rest() -> None:
    model = net()
    matrices = [p for p in model[:2].parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is each for each in matrices)]
    muon = {"momentum": 0.9, "weight_decay": 0.1, "ns_dtype": "fp64", "adjust_lr_fn": "match_rms_adamw"}
    named = NamedRules(
        [
            {"params": matrices, "type": "muon", "lr": 0.02, "name": "a key of the user's", **muon},
            {"params": rest, "type": "adamw", "lr": 0.01, "weight_decay": 0.1},
        ]
    )
    configured = {"type": "muon", "lr": 0.02, "rest_lr": 0.01, **muon}
    torch.testing.assert_close(trained(named, model), trained(configured, net()), rtol=0, atol=0)


def test_a_rule_that_is_none() -> None:
    model = net()
    with pytest.raises(UsageError, match="no rule 'adamv'"):
        trained(NamedRules([{"params": model.parameters(), "type": "adamv", "lr": 0.1}]), model)
    with pytest.raises(UsageError, match=r"engine\.step"):
        NamedRules([{"params": model.parameters(), "type": "adamw", "lr": 0.1}]).step()
