"""The rule of a policy, and the state that it keeps for a row."""

from typing import Any

import pytest

from shardwise.kernels.tables import row_rules as rule
from shardwise.parallel.embedding.policy import RowOptimizerPolicy
from shardwise.parallel.embedding.rules import history_of, optimizer_of, state_columns


@pytest.mark.parametrize(
    ("given", "made", "columns"),
    [
        ({"type": "sgd", "weight_decay": 0.1}, rule.Sgd(0.1), []),
        (
            {"type": "momentum", "momentum": 0.5, "nesterov": True},
            rule.Momentum(0.5, True, 0.0),
            [("momentum_buffer", 4)],
        ),
        ({"type": "adagrad", "eps": 0.1, "initial_accumulator": 2}, rule.Adagrad(0.1, 2, 0.0), [("sum", 4)]),
        ({"eps": 0.1, "weight_decay": 0.2}, rule.RowwiseAdagrad(0.1, 0.0, 0.2), [("row_sum", 1)]),
        (
            {"type": "adam", "betas": (0.5, 0.6), "eps": 0.1},
            rule.Adam(0.5, 0.6, 0.1, 0.0, False),
            [("exp_avg", 4), ("exp_avg_sq", 4)],
        ),
        (
            {"type": "adam", "exact": True, "weight_decay": 0.1},
            rule.Adam(0.9, 0.999, 1e-8, 0.1, True),
            [("exp_avg", 4), ("exp_avg_sq", 4), ("step", 1)],
        ),
        (
            {"type": "ftrl", "l1": 1, "l2": 2, "beta": 3, "initial_accumulator": 4},
            rule.Ftrl(1, 2, 3, 4),
            [("z", 4), ("n", 4)],
        ),
    ],
)
def test_each_type(given: dict[str, Any], made: rule.RowOptimizer, columns: list[tuple[str, int]]) -> None:
    found = optimizer_of(RowOptimizerPolicy(**given))
    assert found == made and type(found) is type(made)
    assert [*state_columns(found, 4)] == columns
    assert (history_of(found) is not None) == (("step", 1) in columns)
