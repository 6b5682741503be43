"""Sequences that are cut over ranks, beside experts: routing, balance, noise and loads are those of one process."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import PlanError
from shardwise.comm.world import World
from shardwise.parallel.expert.surroundings import ExpertContext
from tests.engine.test_context import batch, begin

EXPERTS: dict[str, dict[str, Any]] = {
    "balance of each sequence, noise, room": {
        "noise": "gumbel",
        "capacity": 1.0,
        "min_capacity": 1,
        "balance": "loss",
        "balance_weight": 0.5,
        "z_weight": 0.1,
    },
    "balance of the batch, jitter": {
        "noise": "jitter",
        "balance": "loss",
        "balance_over": "batch",
        "balance_weight": 0.5,
    },
    "a bias": {"balance": "bias", "score": "sigmoid"},
}


def router_of(name: str) -> dict[str, Any]:
    return {"experts": {"count": 4, "hidden": 8, "router": EXPERTS[name]}}


def trained(world: World, name: str, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norms, loads and weights of three steps."""
    engine, found = begin(world, config, **router_of(name)), []
    for step, length in enumerate((12, 13, 5)):
        each = batch(length, step)
        if step == 1:
            each["targets"][:, 3:] = -100  # a part without targets
        result = engine.train_step([each])
        found += [result.loss, float(result.grad_norm or 0)]
        for tally in engine.expert_tallies().values():
            found += [*tally.routed, *tally.kept, tally.tokens, tally.entropy]
    found.append(engine.evaluate([(each, None)]))
    state = engine.state_dict()
    engine.close()
    return found, state


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_equal_one_process(ranks: Any, name: str) -> None:
    wanted, state = trained(World(0, 1), name, {})
    for got, weights in ranks(2).run(trained, name, {"mesh": {"cp": 2, "ep": 2}, "recompute": "full"}):
        assert got == pytest.approx(wanted, rel=1e-11)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-12)


def factor_of_own_labels() -> Any:
    """Each rank balances its tokens by the factor of its own part of the loss."""
    return patch.object(ExpertContext, "scale_of", lambda self, tokens: self.scale)


def labels_of_own_tokens() -> Any:
    """Each rank weighs sequences by the labels of its own part."""
    return patch.object(ExpertContext, "labels_of", lambda self, labels, tokens: labels)


def loads_of_own_tokens() -> Any:
    """Each rank counts the pairs of its own tokens alone."""
    return patch.object(ExpertContext, "summed", lambda self, counts, tokens: counts)


MISTAKES = (factor_of_own_labels, labels_of_own_tokens, loads_of_own_tokens)


def planted(world: World) -> dict[str, str]:
    said = {}
    for mistake in MISTAKES:
        with mistake():
            experts = {"count": 4, "hidden": 8, "router": {"balance": "loss", "balance_weight": 0.5}}
            engine = begin(world, {"mesh": {"cp": 2}, "check_first_step": "auto"}, experts=experts)
            try:
                engine.train_step([batch(13)])
            except PlanError as error:
                said[mistake.__name__] = str(error)
                engine.discard()
            engine.close()
    return said


def test_the_check_of_the_first_step_sees_planted_mistakes(ranks: Any) -> None:
    for said in ranks(2).run(planted):
        assert said.keys() == {each.__name__ for each in MISTAKES}
        assert all("uncut" in each for each in said.values()), said
