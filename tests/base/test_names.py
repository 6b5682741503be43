"""Patterns of names: a star stands for one part, all else for itself."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.names import chosen_by, matching

NAMES = ["embed", "blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp", "blocks.10"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.10"]),
        ("blocks.*.mlp", ["blocks.0.mlp", "blocks.1.mlp"]),
        ("blocks.1*", ["blocks.1", "blocks.10"]),
        ("*", ["embed"]),
        ("blocks.1", ["blocks.1"]),
        ("blocks.[01]", []),
        ("blocks?0", []),
    ],
)
def test_a_star_stands_for_one_part(pattern: str, expected: list[str]) -> None:
    assert matching(NAMES, pattern) == expected


def test_the_chosen_stand_once_in_the_order_of_the_names() -> None:
    assert chosen_by(["blocks.1", "blocks.*"], NAMES, "key", "module") == [
        "blocks.0",
        "blocks.1",
        "blocks.10",
    ]


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^zero.units: pattern 'layer.\*' matches no module; .* embed, blocks.0"
    ):
        chosen_by(["embed", "layer.*"], NAMES, "zero.units", "module")
