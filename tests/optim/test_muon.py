"""Muon against the class of torch, and which parameters it updates."""

from typing import Any

import pytest
import torch
from torch import optim

from shardwise.optim.classes import from_policy, update_rules
from shardwise.optim.muon import Muon
from shardwise.optim.policy import OptimizerPolicy


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_that_of_torch(adjust: Any) -> None:
    """The same bits: Newton-Schulz in bf16 and all. By name one lr serves matrices and AdamW."""
    generator, singles = torch.Generator().manual_seed(0), []
    for rows, columns in ((6, 4), (4, 6), (5, 5)):
        start = torch.randn(rows, columns, generator=generator)
        pair = [start.clone().requires_grad_(), start.clone().requires_grad_()]
        made = [
            cls([p], lr=0.1, adjust_lr_fn=adjust) for cls, p in zip((optim.Muon, Muon), pair, strict=True)
        ]
        for _ in range(3):
            gradient = torch.randn(rows, columns, generator=generator)
            for parameter, optimizer in zip(pair, made, strict=True):
                parameter.grad = gradient.clone()
                optimizer.step()
        singles.append(pair)
    for ours, theirs in singles:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_rules_of_muon_are_for_matrices_and_for_the_rest() -> None:
    policy = OptimizerPolicy.model_validate(
        {
            "type": "muon",
            "lr": 0.02,
            "rest_lr": 0.1,
            "groups": [{"match": "head*", "matrices": True, "lr": 0.5}],
        }
    )
    kinds = [(kind, options["lr"]) for kind, options in policy.rules()]
    assert kinds == [("muon", 0.02), ("muon", 0.5), ("adamw", 0.1), ("adamw", 0.5)]
    of = {"up.weight": True, "up.bias": None, "embed.weight": False, "head.weight": False, "head.bias": None}
    assert [policy.rule_of(name, is_hidden) for name, is_hidden in of.items()] == [0, 2, 2, 1, 3]
    make = from_policy(policy)
    assert [rule.needs for rule in update_rules(make, 4)] == ["matrix", "matrix", "elements", "elements"]
