"""Rows that cannot be read, up to a limit."""

import pytest

from shardwise.base.errors import DataError
from shardwise.data.clicks.malformed import MalformedRows


def test_without_a_limit_the_first_is_an_error() -> None:
    with pytest.raises(DataError, match=r"a\.tsv:3: two columns\. Mend the row"):
        MalformedRows().skip("a.tsv:3", "two columns")


def test_one_beyond_the_limit_names_the_first_three_and_the_last() -> None:
    rows = MalformedRows(limit=5)
    assert str(rows) == ""
    for line in range(5):
        rows.skip(f"line {line}", "short")
    assert str(rows) == "5 malformed rows skipped: line 0: short; line 1: short; line 2: short"
    with pytest.raises(DataError, match="6 malformed rows, .* which is 5: .*line 2: short; line 5: long"):
        rows.skip("line 5", "long")
