"""Keys under ``data:`` for click logs."""

import pytest
from pydantic import ValidationError

from shardwise.data.clicks.policy import ClickPolicy, SyntheticPolicy


def test_rows_of_every_table() -> None:
    assert SyntheticPolicy(tables=3, rows=7).table_rows == (7, 7, 7)
    assert SyntheticPolicy(rows=[5, 6]).table_rows == (5, 6)
    assert SyntheticPolicy(rows=[5, 6], tables=2).table_rows == (5, 6)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rows": [5, 6], "tables": 3}, "rows lists 2 tables, but tables is 3"),
        ({"fresh": 0.5}, "set keys: hashed"),
        ({"rows": []}, "at least 1"),
        ({"click_rate": 1}, "less than 1"),
    ],
)
def test_synthetic_logs_that_are_refused(given: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        SyntheticPolicy(**given)


def test_fresh_keys_need_tables_that_grow() -> None:
    assert SyntheticPolicy(fresh=0.5, keys="hashed").fresh == 0.5


def test_columns_are_named_together() -> None:
    assert ClickPolicy(dense=[], sparse=["user"]).sparse == ["user"] and ClickPolicy().dense is None
    for given in ({"dense": ["age"]}, {"sparse": ["user"]}):
        with pytest.raises(ValidationError, match="give both lists, or neither"):
            ClickPolicy(**given)
    with pytest.raises(ValidationError, match="at most 1"):
        ClickPolicy(separator="::")
