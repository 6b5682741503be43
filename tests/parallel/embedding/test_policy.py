"""Keys of tables, of their optimizers and of their growth."""

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.parallel.embedding.policy import (
    AdmissionPolicy,
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TableOptions,
    TablePolicy,
)


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (RowOptimizerPolicy, {"betas": (0.9, 1.0)}, "each lies in"),
        (RowOptimizerPolicy, {"exact": True}, "exact is for adam alone"),
        (
            RowOptimizerPolicy,
            {"type": "adam", "exact": True, "lr": 2, "weight_decay": 0.5},
            "turn weights round",
        ),
        (RowOptimizerPolicy, {"l1": 0.1}, "l1, l2 and beta are FTRL's"),
        (RowOptimizerPolicy, {"beta": 0.5, "type": "adam"}, "l1, l2 and beta are FTRL's"),
        (RowOptimizerPolicy, {"type": "ftrl", "weight_decay": 0.1}, "it takes l2"),
        (
            RowOptimizerPolicy,
            {"type": "sgd", "nesterov": True},
            "momentum and nesterov are for type momentum",
        ),
        (RowOptimizerPolicy, {"type": "adagrad", "momentum": 0.5}, "momentum and nesterov are for"),
        (RowOptimizerPolicy, {"type": "sgd", "betas": (0.5, 0.9)}, "betas are Adam's"),
        (AdmissionPolicy, {"count": 3}, "count 3 is for type frequency"),
        (AdmissionPolicy, {"type": "frequency", "probability": 0.1}, "is for type probability"),
        (AdmissionPolicy, {"count": 1 << 20}, "less than or equal to 1048575"),
        (EvictionPolicy, {"type": "age"}, "they go together"),
        (EvictionPolicy, {"type": "lru", "max_age_steps": 3}, "they go together"),
        (DynamicPolicy, {"eviction": {"type": "lfu"}}, "without one the table is never full"),
        (TableOptions, {"rows": 3, "dynamic": {}}, "both of rows and dynamic"),
    ],
)
def test_what_is_refused(kind: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        kind(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "has neither of rows and dynamic"),
        ({"rows": 3, "dynamic": {}}, "has both of rows and dynamic"),
        (
            {"rows": 3, "pooling": {"b": "sum"}},
            r"pooling names feature 'b', which is none of its features \(a\)",
        ),
        ({"rows": 3, "exchange": "pooled", "placement": "column"}, "is for placements table and row"),
        ({"rows": 3, "exchange": "pooled", "pooling": "max"}, "needs pooling sum or mean"),
        ({"dynamic": {}, "exchange": "pooled"}, "a dynamic table has exchange: rows"),
    ],
)
def test_tables_that_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        TablePolicy(name="a", width=2, **given)


def test_what_goes_together() -> None:
    assert RowOptimizerPolicy(type="ftrl", l1=0.1).l1 == 0.1
    assert RowOptimizerPolicy(type="adam", exact=True).exact
    assert DynamicPolicy(budget_bytes=9, eviction=EvictionPolicy(type="lru")).budget_bytes == 9
    assert TablePolicy(name="a", width=2, rows=3, exchange="pooled", pooling="mean").exchange == "pooled"


def test_features_poolings_and_start_bounds() -> None:
    table = TablePolicy(name="a", width=2, rows=4, features=("b", "c"), pooling={"b": "max"})
    assert (table.feature_names, table.pooling_of("b"), table.pooling_of("c")) == (("b", "c"), "max", "sum")
    alone = TablePolicy(name="a", width=2, dynamic=DynamicPolicy(), pooling="mean")
    assert (alone.feature_names, alone.pooling_of("a"), alone.start_bound) == (("a",), "mean", 0.01)
    assert table.start_bound == 0.5 and TablePolicy(name="a", width=2, rows=4, init_bound=0).start_bound == 0
