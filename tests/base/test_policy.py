"""The base of all policies."""

import pytest
from pydantic import ValidationError

from shardwise.base.policy import Policy, nearest


class Small(Policy):
    """Keys of a test."""

    stage: int = 0
    """A number."""
    units: list[str] = []  # noqa: RUF012
    """Names."""


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(ValidationError, match="unknown key 'stge'; did you mean 'stage'?"):
        Small.model_validate({"stge": 1})
    with pytest.raises(ValidationError, match="unknown key 'zzz'; known here: stage, units"):
        Small.model_validate({"zzz": 1})
    with pytest.raises(ValidationError, match="unknown key 3;"):
        Small.model_validate({3: 1})


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Small().stage = 1


def test_docstrings_are_descriptions() -> None:
    assert Small.model_fields["stage"].description == "A number."


def test_nearest() -> None:
    assert nearest("moddel", ["model", "data"]) == "; did you mean 'model'?"
    assert nearest("x", []) == "; known here: none"
