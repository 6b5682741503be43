"""Keys of routers and of the exchange of experts' rows."""

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.parallel.expert.policy import ExpertsPolicy, RouterPolicy


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"top_k": 1, "normalize": True}, "set top_k to 2"),
        ({"groups": 2, "top_groups": 3}, "top_groups is 3 of 2 groups"),
        ({"min_capacity": 4}, "min_capacity is 4, which acts with capacity alone"),
        ({"drop": "position"}, "acts with capacity alone"),
        ({"balance_over": "batch"}, "acts with balance: loss alone"),
        ({"balance": "bias", "balance_weight": 0.5}, "acts with balance: loss alone"),
        ({"balance": "loss", "bias_rate": 0.5}, "acts with balance: bias alone"),
        ({"capacity": 0}, "greater than 0"),
    ],
)
def test_rules_that_exclude_each_other(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        RouterPolicy(**given)


def test_keys_with_what_they_act_with() -> None:
    assert RouterPolicy(capacity=1.5, min_capacity=4, drop="position").min_capacity == 4
    assert RouterPolicy(groups=2, top_groups=2).top_groups == 2
    assert RouterPolicy(balance="bias", bias_rate=0.5).bias_rate == 0.5


def test_weights_of_several_experts_are_normalised_unless_said() -> None:
    assert [RouterPolicy(top_k=k).normalizes for k in (1, 2)] == [False, True]
    assert not RouterPolicy(top_k=2, normalize=False).normalizes


@pytest.mark.parametrize(
    ("given", "experts", "text"),
    [
        ({"top_k": 5}, 4, "top_k is 5 but there are 4 experts"),
        ({"top_k": 4}, 4, ""),
        ({"groups": 3}, 4, "groups is 3, which does not divide 4"),
        ({"top_k": 3, "groups": 4, "top_groups": 1}, 8, "1 groups of 2 experts have 2, fewer .* at least 2"),
        ({"top_k": 4, "groups": 4, "top_groups": 2}, 8, ""),
        ({"top_k": 8, "groups": 4}, 8, ""),
    ],
)
def test_numbers_of_experts(given: dict[str, Any], experts: int, text: str) -> None:
    said = RouterPolicy(**given).check_experts(experts)
    assert bool(said) == bool(text)
    if text:
        with pytest.raises(ValueError, match=text):
            raise ValueError(said)


def test_an_evaluation_has_no_noise_and_no_terms_and_keeps_the_choice() -> None:
    trained = RouterPolicy(noise="jitter", balance="loss", balance_weight=0.5, z_weight=0.1, capacity=2.0)
    assert trained.without_training() == RouterPolicy(capacity=2.0)
    biased = RouterPolicy(balance="bias", bias_rate=0.5)
    assert biased.without_training() == biased


def test_rows_of_a_round_and_blocks_exclude_each_other() -> None:
    assert ExpertsPolicy(exchange="blocks").rows is None
    with pytest.raises(ValidationError, match="rows is 8 beside exchange: blocks"):
        ExpertsPolicy(rows=8, exchange="blocks")
