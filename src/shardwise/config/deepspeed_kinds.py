"""The kinds of values in a DeepSpeed configuration, as ``deepspeed_keys.py`` describes them, and their checks."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_SHOWN = 80
"""Characters of a value that an error repeats, at most."""
_LARGEST = 2**63
"""The largest integer of a configuration."""
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
"""Shardwise's names of dtypes, for DeepSpeed's; DeepSpeed's may begin with ``torch.``."""


def in_words_of(kind: str, value: Any) -> Any:
    """Return a word that has several spellings in the spelling of the table."""
    if not isinstance(value, str):
        return value
    if kind.startswith("dtype"):
        word = value.lower().removeprefix("torch.")
        return _DTYPES.get(word, word)
    if kind.startswith("one of "):
        return next(
            w for w in kind.removesuffix("?").removeprefix("one of ").split("|") if w.lower() == value.lower()
        )
    return value


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda v: isinstance(v, bool) or v in (0, 1)),
    "int": ("an integer", lambda v: is_number(v) and float(v).is_integer()),
    "num": ("a number", lambda v: is_number(v)),
    "text": ("text", lambda v: isinstance(v, str)),
    "list": ("a list", lambda v: isinstance(v, list)),
    "texts": ("a list of text", lambda v: isinstance(v, list) and all(isinstance(each, str) for each in v)),
    "numbers": ("a list of numbers", lambda v: isinstance(v, list | tuple) and all(map(is_number, v))),
    "decays": ("two numbers >= 0 < 1", lambda v: _is_pair(v) and all(0 <= n < 1 for n in v)),
    "pair": ("two numbers > 0", lambda v: _is_pair(v) and all(n > 0 for n in v)),
    "rates": (
        "a number >= 0 or a list of them",
        lambda v: v != [] and all(is_number(n) and n >= 0 for n in _many(v)),
    ),
    "count": (
        "an integer > 0, or inf",
        lambda v: v == math.inf or (is_number(v) and v > 0 and float(v).is_integer()),
    ),
    "amount": (
        "an integer >= 0, or false",
        lambda v: v is False or (is_number(v) and v >= 0 and float(v).is_integer()),
    ),
    "block": ("keys and values", lambda v: isinstance(v, Mapping)),
    "dtype": (
        "fp32, fp16 or bf16",
        lambda v: isinstance(v, str) and in_words_of("dtype", v) in _DTYPES.values(),
    ),
    "any": ("", lambda v: True),
}


def fault_of(kind: str, value: Any) -> str:
    """Return the fault of a value of the given kind; empty if there is none."""
    may_be_null, kind = kind.endswith("?"), kind.removesuffix("?")
    if value is None and may_be_null:
        return ""
    if kind.startswith("one of "):
        words = kind.removeprefix("one of ").split("|")
        is_known = isinstance(value, str) and value.lower() in [word.lower() for word in words]
        return "" if is_known else f"expected one of {', '.join(words)}"
    word, *bounds = kind.split()
    said, holds = _TYPES[word]
    if not holds(value):
        return f"expected {said}" + (" or null" if may_be_null else "")
    for sign, limit in zip(bounds[::2], map(float, bounds[1::2]), strict=True):
        holds_bound = {">": value > limit, ">=": value >= limit, "<": value < limit, "<=": value <= limit}
        if not holds_bound[sign]:
            return f"expected {said} {sign} {limit:g}"
    return ""


def is_number(value: Any) -> bool:
    """Return True if ``value`` is a finite number that is not too large, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST if isinstance(value, int) else math.isfinite(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))


def _many(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def shown(value: Any, place: str = "") -> str:
    """Return a value as text for messages, shortened and without the content of API keys."""
    if place.endswith("api_key"):
        return '"..."'
    if isinstance(value, Mapping) and "api_key" in value:
        value = {**value, "api_key": "..."}
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # an integer with more digits than Python converts to text
        return "a very large number"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
