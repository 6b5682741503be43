"""Kinds of values in a DeepSpeed configuration: what fits, and what a message shows of a value."""

import math
from typing import Any

import pytest

from shardwise.config.deepspeed_kinds import fault_of, in_words_of, is_number, shown


@pytest.mark.parametrize(
    ("kind", "fits", "fails"),
    [
        ("bool", [True, 0, 1], [2, "true", None]),
        ("int", [3, 3.0], [3.5, True, "3", math.inf]),
        ("num > 0", [0.1], [0, -1, math.nan]),
        ("num >= 0 <= 1", [0, 1], [-0.1, 1.1]),
        ("num >= 0 < 1", [0], [1]),
        ("text", ["a", ""], [1]),
        ("list", [[]], [()]),
        ("texts", [["a"], []], [["a", 1], "a"]),
        ("numbers", [[1, 2.5], (1,)], [[True], ["a"]]),
        ("decays", [[0, 0.5]], [[0.5, 1], [0.5], 0.5]),
        ("pair", [[0.5, 1.2]], [[0, 1], [1, 2, 3]]),
        ("rates", [0, 0.1, [0.1, 0]], [[], -1, [0.1, -1], "a"]),
        ("count", [1, math.inf], [0, 1.5, -math.inf]),
        ("amount", [False, 0, 2], [True, -1, 0.5]),
        ("block", [{}], [[], None]),
        ("dtype", ["fp16", "torch.bfloat16", "Float"], ["int8", 16]),
        ("any", [None, object()], []),
        ("one of auto|Full", ["FULL", "auto"], ["none", 1]),
        ("int?", [None, 1], ["a"]),
        ("one of a|b?", [None, "A"], ["c"]),
    ],
)
def test_values_of_a_kind(kind: str, fits: list[Any], fails: list[Any]) -> None:
    assert [fault_of(kind, value) for value in fits] == [""] * len(fits)
    assert all(fault_of(kind, value).startswith("expected ") for value in fails)


def test_a_fault_says_what_was_expected() -> None:
    assert fault_of("num > 0 < 1", 1) == "expected a number < 1"
    assert fault_of("int?", "a") == "expected an integer or null"
    assert fault_of("one of a|b", "c") == "expected one of a, b"


def test_spellings_of_a_word_become_that_of_the_table() -> None:
    assert in_words_of("dtype", "torch.Half") == "fp16" and in_words_of("dtype?", "float") == "fp32"
    assert in_words_of("dtype", "int8") == "int8" and in_words_of("dtype", None) is None
    assert in_words_of("one of auto|Full?", "FULL") == "Full"
    assert in_words_of("text", "Half") == "Half"


def test_a_number_is_finite_and_of_a_size_that_is_used() -> None:
    assert is_number(2**63) and is_number(-1.5) and not is_number(2**63 + 1)
    assert not is_number(True) and not is_number(math.nan) and not is_number("1")


def test_a_message_shows_a_value_shortened_and_no_key_of_a_service() -> None:
    assert shown([1, "a"]) == '[1, "a"]' and shown(object)[:8] == '"<class '
    assert shown("x" * 100) == '"' + "x" * 79 + "..."
    assert shown("secret", "comet.api_key") == '"..."'
    assert shown({"api_key": "secret", "project": "p"}) == '{"api_key": "...", "project": "p"}'
    assert shown(10**5000) == "a very large number"
