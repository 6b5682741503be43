"""The keys of ``checkpoint:``."""

import pytest
from pydantic import ValidationError

from shardwise.checkpoint import CheckpointPolicy


def test_defaults_keep_two_and_save_behind_training() -> None:
    policy = CheckpointPolicy()
    assert (policy.every, policy.keep_last, policy.asynchronous, policy.read_back) == (None, 2, True, True)


@pytest.mark.parametrize("given", [{"keep_last": 0}, {"every": 0}, {"timeout_s": 0}, {"keeplast": 2}])
def test_what_cannot_be_meant_is_refused(given: dict) -> None:
    with pytest.raises(ValidationError):
        CheckpointPolicy(**given)


def test_every_field_says_what_it_is() -> None:
    assert all(field.description for field in CheckpointPolicy.model_fields.values())
