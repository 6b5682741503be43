"""Values of a DeepSpeed configuration by path: misspelt keys are errors that suggest the right one."""

import random
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config.deepspeed import translate
from shardwise.config.deepspeed_keys import KEYS, ONE_BIT_TYPES


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` of ``a.b``, with the type beside parameters that belong to one."""
    for name in reversed(path.split(".")):
        value = [value] if name == "[]" else {("metric" if name == "NAME" else name): value}
    return value


def misspelt(draws: random.Random, name: str) -> str:
    """One letter lost, doubled, replaced, or two in each other's place."""
    at = draws.randrange(len(name))
    kind = draws.choice(["lost", "doubled", "replaced", "swapped"])
    if kind == "swapped" and at + 1 < len(name):
        return name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    middle = {"lost": "", "doubled": name[at] * 2}.get(kind, draws.choice("aeioutrnsl_"))
    return name[:at] + middle + name[at + 1 :]


def test_200_misspelt_keys_at_every_depth_are_errors_with_the_right_suggestion() -> None:
    draws = random.Random(0)
    rows = [row for row in KEYS if not row.of or {*row.of} - {*ONE_BIT_TYPES}]
    paths = [row.path for row in rows if row.path.rpartition(".")[2] != "NAME" and "[]" not in row.path]
    right = 0
    for _ in range(200):
        path = draws.choice(paths)
        block, _, name = path.rpartition(".")
        wrong = name
        while f"{block}.{wrong}".lstrip(".") in {row.path for row in KEYS} or wrong.startswith("_"):
            wrong = misspelt(draws, name)
        given = nested(f"{block}.{wrong}".lstrip("."), 1)
        if block.endswith(".params"):
            kind = next(row.of for row in KEYS if row.path == path) or (
                "AdamW" if block[0] == "o" else "OneCycle",
            )
            given[block.partition(".")[0]]["type"] = kind[0]
        with pytest.raises(ConfigError, match="unknown key") as caught:
            translate(given)
        if f"unknown key {wrong!r}; did you mean {name!r}?" not in str(caught.value):
            print(path, wrong, caught.value)
        right += f"unknown key {wrong!r}; did you mean {name!r}?" in str(caught.value)
    print(right)
    assert right >= 190
