"""Keys under ``tensor:``."""

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.parallel.tensor.policy import TensorPolicy


def test_sequences_are_cut_and_logits_are_not_gathered_unless_said() -> None:
    policy = TensorPolicy(table={"blocks.*.up": "column"})
    assert policy.sequence_parallel and not policy.gather_logits and policy.table == {"blocks.*.up": "column"}
    assert TensorPolicy().table == {}


@pytest.mark.parametrize(("given", "wanted"), [(False, "off"), (3, 3), ("symmetric_memory",) * 2])
def test_overlap(given: Any, wanted: Any) -> None:
    """YAML reads "off" as false."""
    assert TensorPolicy(overlap=given).overlap == wanted


@pytest.mark.parametrize(
    "given",
    [
        {"table": ["a"]},
        {"table": {"a": 1}},
        {"tp": 2},
        {"gather_logits": "no idea"},
        {"overlap": True},
        {"overlap": 0},
        {"overlap": "pieces"},
    ],
)
def test_what_is_refused(given: dict) -> None:
    with pytest.raises(ValidationError):
        TensorPolicy(**given)
