"""Keys under ``zero:``."""

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.parallel.zero.policy import ZeroPolicy


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stage": 4}, "0, 1, 2 or 3"),
        ({"units": "blocks.*"}, "'auto'"),
        ({"prefetch_bytes": -1}, "greater than or equal to 0"),
        ({"reduce": "never"}, "'auto', 'microbatch' or 'step'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ZeroPolicy(**given)


def test_words_and_numbers_stand_beside_each_other() -> None:
    policy = ZeroPolicy(stage=3, units=["blocks.*"], prefetch_bytes=0, reductions_under_way=2)
    assert (policy.units, policy.prefetch_bytes, policy.reductions_under_way) == (["blocks.*"], 0, 2)
    assert ZeroPolicy().units == ZeroPolicy().prefetch_bytes == ZeroPolicy().reduce == "auto"
