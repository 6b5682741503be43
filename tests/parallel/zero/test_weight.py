"""The weight of a bucket: when its elements are there, and steps out of turn."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.base.errors import UsageError
from shardwise.parallel.zero.weight import WeightState
from shardwise.plan.strategy import Strategy
from tests.parallel.zero.buckets import CUT, WHOLE, bucket

WINDOWS = replace(WHOLE, windows=True)


@pytest.mark.parametrize("strategy", [CUT, WINDOWS], ids=["cut", "windows"])
def test_a_weight_with_windows_is_there_in_them_alone(strategy: Strategy) -> None:
    """Cut, or whole on one rank."""
    here = bucket(strategy)
    weight, seen = here.weight, []
    assert weight.state is WeightState.SUMMONED
    weight.attach()
    for _ in range(2):
        seen.append((weight.state, weight.in_the_way))
        weight.start_unshard()
        seen.append((weight.state, weight.in_the_way))
        with pytest.raises(UsageError, match="'a' of the bucket"):
            _ = here.parameters[0] + 1
        weight.finish_unshard()
        seen.append((weight.state, weight.in_the_way))
        assert here.parameters[1].tolist() == [1, 2, 3, 4, 5]
        weight.reshard()
    in_turn = [
        (WeightState.SHARDED, None),
        (WeightState.GATHERING, None),
        (WeightState.UNSHARDED, None),
    ]
    assert seen == in_turn * 2


@pytest.mark.parametrize("strategy", [WHOLE, CUT], ids=["whole", "cut"])
def test_a_summoned_weight_stays_until_it_is_restored(strategy: Strategy) -> None:
    here = bucket(strategy)
    weight = here.weight
    weight.attach()
    at_rest = weight.state
    for keep in (False, True):
        assert weight.summon([0, 1]) == [0, 1] and weight.is_whole
        weight.start_unshard()
        weight.finish_unshard()
        weight.reshard()
        assert weight.is_summoned
        with torch.no_grad():
            here.parameters[0].fill_(7.0)
        assert weight.restore([0, 1], keep) == ["a"]
        assert weight.state is at_rest
        assert weight.shard[:3].tolist() == [7.0] * 3  # one rank: what is shown is the shard itself


@pytest.mark.parametrize(
    "wrong",
    [
        lambda weight: weight.attach(),  # shown already
        lambda weight: weight.restore([0], keep=False),  # never summoned
    ],
    ids=["attached twice", "restored without a summon"],
)
@pytest.mark.parametrize("strategy", [WHOLE, CUT], ids=["whole", "cut"])
def test_a_weight_refuses_a_step_out_of_turn(strategy: Strategy, wrong: Any) -> None:
    weight = bucket(strategy).weight
    weight.attach()
    with pytest.raises(AssertionError, match="does not become"):
        wrong(weight)
