"""Keys under ``comm:``."""

import pytest
from pydantic import ValidationError

from shardwise.comm.policy import LONGEST_WAIT_S, CommPolicy


def test_the_limit_before_any_step_was_measured() -> None:
    assert CommPolicy().limit_s == LONGEST_WAIT_S
    assert CommPolicy(timeout_s=7.0).limit_s == 7.0


@pytest.mark.parametrize(
    "given", [{"timeout_s": 0}, {"timeout_s": "long"}, {"transport": "mail"}, {"wait_s": 1}]
)
def test_what_is_refused(given: dict) -> None:
    with pytest.raises(ValidationError):
        CommPolicy(**given)
