"""Optimizer groups by name."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config.rules import check
from shardwise.config.run import RunConfig
from shardwise.optim.policy import OptimizerPolicy


def policy() -> OptimizerPolicy:
    return OptimizerPolicy.model_validate(
        {
            "lr": 0.1,
            "weight_decay": 0.5,
            "groups": [
                {"match": "*norm*|*.bias", "weight_decay": 0.0},
                {"match": "embed.*", "lr": 0.01},
            ],
        }
    )


def test_the_first_match_wins() -> None:
    names = ["blocks.0.norm.weight", "head.bias", "embed.weight", "embed.bias", "blocks.0.up.weight"]
    assert [policy().group_of(name) for name in names] == [1, 1, 2, 1, 0]


def test_groups_change_what_they_name_alone() -> None:
    own, plain, embed = policy().options()
    assert own == {"lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    assert plain == {**own, "weight_decay": 0.0}
    assert embed == {**own, "lr": 0.01}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"momentum": 0.9}, "adamw does not read momentum; it reads lr, betas.* belongs to sgd, rmsprop"),
        (
            {"type": "sgd", "betas": [0.9, 0.9], "eps": 1},
            "sgd does not read betas, eps; it reads lr, momentum",
        ),
        ({"type": "lion", "eps": 1e-8}, "lion does not read eps"),
        (
            {"type": "rprop", "groups": [{"match": "*", "weight_decay": 0.1}]},
            "rprop does not read groups.0.weight_decay; it reads lr, etas, step_sizes. Leave it out",
        ),
        ({"type": "sgd", "nesterov": True}, "nesterov needs a momentum above 0"),
        ({"betas": [0.9, 1.0]}, "optimizer.betas"),
        ({"type": "adafactor"}, "optimizer.type"),
        ({"lr": -1.0}, "optimizer.lr"),
        ({"betas": [0.9]}, "optimizer.betas"),
        (
            {"groups": [{"match": "*", "lrr": 1}]},
            r"optimizer\.groups\.0: unknown key 'lrr'; did you mean 'lr'",
        ),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(RunConfig.parse({"optimizer": given}))
