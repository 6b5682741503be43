"""Which table a feature gets."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.models.ctr.tables import tables_for
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablesPolicy

SCHEMA = ClickSchema(("I1",), (SparseFeature("C1"), SparseFeature("C2"), SparseFeature("C3")))


def test_rows_that_the_data_knows_make_static_tables_and_else_they_grow() -> None:
    first, second, third = tables_for(SCHEMA, 4, rows={"C1": 10, "C3": 7})
    assert [table.name for table in (first, second, third)] == ["C1", "C2", "C3"]
    assert (first.rows, second.rows, third.rows) == (10, None, 7)
    assert second.dynamic == DynamicPolicy() and first.width == 4


def test_a_table_s_own_keys_go_before_the_defaults_and_these_before_the_data() -> None:
    policy = TablesPolicy.model_validate(
        {
            "defaults": {"dynamic": {"capacity": 50}, "placement": "row", "pooling": "mean"},
            "named": {
                "C2": {"rows": 9, "placement": "auto"},
                "C3": {"optimizer": {"type": "sgd", "lr": 2.0}},
            },
        }
    )
    first, second, third = tables_for(SCHEMA, 4, policy, {"C1": 10, "C3": 7})
    assert first.dynamic is not None and first.dynamic.capacity == 50 and first.placement == "row"
    assert second.rows == 9 and second.dynamic is None and second.placement == "auto"
    assert second.pooling == "mean" and second.optimizer is None
    assert third.dynamic == first.dynamic and third.optimizer == RowOptimizerPolicy(type="sgd", lr=2.0)


def test_a_feature_that_there_is_not_is_refused() -> None:
    policy = TablesPolicy.model_validate({"named": {"C4": {"rows": 9}}})
    with pytest.raises(
        ConfigError, match=r"tables.named: the data has no feature 'C4'; known here: C1, C2, C3"
    ):
        tables_for(SCHEMA, 4, policy)


def test_rows_and_dynamic_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="both of rows and dynamic"):
        TablesPolicy.model_validate({"defaults": {"rows": 3, "dynamic": {}}})
