"""The keys of ``data:`` and what is refused."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from shardwise.data.clicks import ClickPolicy
from shardwise.data.policy import AnyDataPolicy, DataPolicy, with_kind


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
        ({"documents": True, "target": "a:b"}, "reads the ends of documents"),
        ({"source": 3}, "valid string"),
    ],
)
def test_refusals_say_what_is_expected(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        DataPolicy(**given)


def test_every_key_is_explained() -> None:
    assert all(field.description for field in DataPolicy.model_fields.values())


def test_text_unless_it_says_clicks() -> None:
    adapter: TypeAdapter = TypeAdapter(AnyDataPolicy)
    assert adapter.validate_python({}) == DataPolicy()
    assert adapter.validate_python({"kind": "clicks"}) == ClickPolicy()
    for policy in (DataPolicy(source="x"), ClickPolicy(source="x")):
        assert adapter.validate_python(policy) is policy
        assert adapter.validate_python(policy.model_dump()) == policy
    with pytest.raises(ValidationError, match="'text'"):
        adapter.validate_python({"kind": "click"})


def test_a_kind_is_added_where_there_is_none() -> None:
    assert with_kind(None, "clicks") == {"kind": "clicks"}
    assert with_kind({"source": "x"}, "clicks") == {"kind": "clicks", "source": "x"}
    assert with_kind({"kind": "text"}, "clicks") == {"kind": "text"}
    policy = ClickPolicy()
    assert with_kind(policy, "clicks") is policy
