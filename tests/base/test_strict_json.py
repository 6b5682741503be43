"""JSON of headers and manifests: bounded, one object, exact types."""

import pytest

from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.base.strict_json import Count, StrictModel, read_object, validated


class Header(StrictModel):
    tokens: Count
    name: str = ""


def test_one_object_is_read() -> None:
    assert read_object(b'{"a": [1, 2.5, null], "b": {"c": "x"}}', "file") == {
        "a": [1, 2.5, None],
        "b": {"c": "x"},
    }


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": 1', "not the JSON that was written"),
        (b'{"a": 1, "a": 2}', "key 'a' stands twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1e999}', "1e999 is not finite"),
        (b'{"a": "\xff"}', "not the JSON that was written"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not the JSON that was written"),
    ],
)
def test_what_is_no_such_object_names_the_file(data: bytes, text: str) -> None:
    with pytest.raises(DamagedError, match=f"file: .*{text}"):
        read_object(data, "file")


def test_size_and_number_of_values_are_bounded_before_anything_is_parsed() -> None:
    data = b'{"a": 12}'
    assert read_object(data, "file", limit_bytes=len(data)) == {"a": 12}
    with pytest.raises(CheckpointError, match="9 bytes"):
        read_object(data, "file", limit_bytes=len(data) - 1, kind=CheckpointError)
    with pytest.raises(DamagedError, match="at most .* and 1000000 are read"):
        read_object(b'{"a": [' + b"," * 1_000_001, "file")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"tokens": -1}, "tokens: Input should be greater than or equal to 0"),
        ({"tokens": 2**63}, "tokens: Input should be less than"),
        ({"tokens": 1.0}, "tokens: Input should be a valid integer"),
        ({"tokens": "1"}, "tokens: Input should be a valid integer"),
        ({}, "tokens: Field required"),
        ([], "contents: Input should be"),
    ],
)
def test_a_schema_takes_exact_types_in_exact_bounds(found: object, text: str) -> None:
    with pytest.raises(DamagedError, match=f"header: {text}"):
        validated(Header, found, "header")


def test_keys_of_later_versions_are_ignored() -> None:
    assert validated(Header, {"tokens": 3, "later": 1}, "header") == Header(tokens=3)
