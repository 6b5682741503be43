"""The keys of ``data:`` and what is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.data.policy import DataPolicy


def test_defaults_need_nothing_from_the_user() -> None:
    policy = DataPolicy()
    assert (policy.source, policy.tokenizer, policy.validation, policy.workers) == (
        "stdlib",
        "bytes",
        0.05,
        0,
    )


def test_validation_is_a_fraction_or_a_source() -> None:
    assert DataPolicy(validation=0).validation == 0
    assert DataPolicy(validation="held_out.txt").validation == "held_out.txt"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sourc": "x"}, "did you mean 'source'"),
        ({"validation": 1.0}, "less than 1"),
        ({"workers": -1}, "greater than or equal to 0"),
        ({"target": "my_module.build"}, "module:function"),
        ({"target": "a:b", "source": "x.txt"}, "source and target are both given"),
        ({"arguments": {"size": 1}}, "without a target"),
        ({"source": []}, "empty list"),
        ({"source": 3}, "valid string"),
    ],
)
def test_refusals_say_what_is_expected(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        DataPolicy(**given)


def test_every_key_is_explained() -> None:
    assert all(field.description for field in DataPolicy.model_fields.values())
