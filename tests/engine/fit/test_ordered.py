"""The largest value that fits is found, and the next one was looked at."""

import pytest

from shardwise.engine.fit.ordered import largest


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 7, 8, 100])
@pytest.mark.parametrize("most", [1, 3, 7, 8])
def test_the_largest_value_is_found_by_doubling_and_halving(limit: int, most: int) -> None:
    seen: list[int] = []

    def look(value: int) -> int:
        seen.append(value)
        return value

    value, found = largest(look, lambda each: each <= limit, most)
    assert value == min(limit, most) and found == max(value, 1)
    assert value == most or value + 1 in seen, "the next value was looked at"
    assert max(seen) <= most
