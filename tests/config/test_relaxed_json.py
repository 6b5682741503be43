"""JSON as people write it: what Hjson and JSON5 allow is read, the rest is an error with its place."""

import json
import math
import random
from typing import Any

import pytest

from shardwise.config.relaxed_json import read_json


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1, "b": [true, false, null, "x"]}', {"a": 1, "b": [True, False, None, "x"]}),
        ("{a: 1, 'b': \"c\",}", {"a": 1, "b": "c"}),
        ("a: 1\nb: 2.5e-3\n", {"a": 1, "b": 2.5e-3}),
        ("# one\n// two\n/* three\n */ {a: 1 # four\n b: 2}", {"a": 1, "b": 2}),
        (
            "{a: on, to the end # of its line\n b: 5 times\n}",
            {"a": "on, to the end # of its line", "b": "5 times"},
        ),
        ("{a: [1\n2\n3], b: {}}", {"a": [1, 2, 3], "b": {}}),
        ("[0x1F, +1, .5, 5., -0, 1E3,]", [31, 1, 0.5, 5.0, 0, 1000.0]),
        ("{a: Infinity, b: -Infinity}", {"a": math.inf, "b": -math.inf}),
        ('{"a": "\\u00e9\\n\\x41\\\\ \\ud83d\\ude00"}', {"a": "é\nA\\ 😀"}),
        ("{a:\n   '''\n   one\n     two\n   '''\n}", {"a": "one\n  two"}),
        ("{a: 007, b: -, c: 1.2.3\n}", {"a": "007, b: -, c: 1.2.3"}),
        ("\ufeff{é: 1}", {"é": 1}),
        ("", {}),
        ("3", 3),
        ("// nothing", {}),
    ],
    ids=repr,
)
def test_what_is_read(text: str, found: Any) -> None:
    assert read_json(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "key 'a' is given twice, line 1, column 10"),
        ("a: 1\na: 2", "key 'a' is given twice, line 2, column 1"),
        ("{a: 1", "expected a key, found 'the end', line 1, column 6"),
        ("{a 1}", "expected ':' after the key 'a', found '1', line 1, column 4"),
        ("{a: 'x\n}", "text without its closing quote, line 1, column 5"),
        ("{a: '''x}", "text without its closing ''', line 1, column 5"),
        ("/* a", "a comment without its end"),
        ("{a: ,}", "expected a value, found ','"),
        ("[1,,2]", "expected a value, found ','"),
        ("{} {}", "expected the end, found '{', line 1, column 4"),
        ("{a: [x, y]}", "expected a value, found the end"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_json(text)
    assert message in str(caught.value)


def test_it_reads_json_as_json_does() -> None:
    draws = random.Random(0)

    def value(depth: int) -> Any:
        if depth and draws.random() < 0.5:
            return [value(depth - 1) for _ in range(draws.randrange(4))]
        if depth and draws.random() < 0.7:
            return {text(): value(depth - 1) for _ in range(draws.randrange(4))}
        return draws.choice([None, True, False, draws.randrange(-99, 99), draws.gauss(0, 1e9), text()])

    def text() -> str:
        return "".join(draws.choice("ab \n\t\"'\\/{}[],:#é😀0") for _ in range(draws.randrange(8)))

    for _ in range(300):
        wanted = value(4)
        for indent in (None, 2):
            for is_ascii in (True, False):
                assert read_json(json.dumps(wanted, indent=indent, ensure_ascii=is_ascii)) == wanted
