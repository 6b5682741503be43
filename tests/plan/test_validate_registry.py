"""Faults of a registry: each is refused by the name of its tensor."""

from dataclasses import replace
from typing import Any

import pytest
from tests.plan.planted import MICROBATCHES, QKV, good, registered

from shardwise.base.errors import PlanError
from shardwise.plan.placement import Partial, Placement, Replicate, Shard
from shardwise.plan.validate import validate_plan

CUT, WHOLE, ADDEND = Shard(), Replicate(), Partial()


DP: dict[str, Placement] = {"dp_replicate": WHOLE, "dp_shard": WHOLE}


@pytest.mark.parametrize(
    "name, kind, tensor, changes, says",
    [
        (
            "zero3",
            "parameter",
            QKV,
            {"placement": DP},
            "weight is registered R on dp_shard, but its buffer is S",
        ),
        (
            "zero0",
            "parameter",
            QKV,
            {"placement": {"dp_shard": CUT}},
            "registered S on dp_shard, but its buffer is R",
        ),
        (
            "zero2",
            "gradient",
            QKV,
            {"placement": {"dp_shard": ADDEND}},
            "its grad is registered R on dp_replicate",
        ),
        (
            "zero1",
            "moment",
            QKV,
            {"placement": DP},
            "exp_avg is registered R on dp_shard, but its buffer is S",
        ),
        ("tp", "parameter", QKV, {"grad_placement": {"dp_shard": WHOLE}}, "different gradient placements"),
        (
            "tp",
            "parameter",
            QKV,
            {"placement": DP},
            r"its slot is \[12, 16\], but by the registry .* \[32, 16\]",
        ),
        (
            "tp",
            "parameter",
            "blocks.0.out.weight",
            {"placement": {"tp": Shard(0)}},
            r"holds \[4, 16\] of \[16, 16\]",
        ),
        ("pp", "parameter", QKV, {"stages": (1,)}, "the registry has it on stages"),
        ("tied", "parameter", QKV, {"stages": (0, 1)}, "tied to nothing"),
        ("zero0", "parameter", QKV, {"shape": (32, 15)}, "its slot is"),
    ],
)
def test_wrong_placements(name: str, kind: str, tensor: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        validate_plan(registered(good(name), kind, tensor, **changes), MICROBATCHES)


def test_a_gradient_that_nobody_sums() -> None:
    """Both entries say that each rank has the whole gradient of its own samples: data-parallel ranks would part."""
    alone = {"grad_placement": {"dp_shard": WHOLE}}
    whole = registered(registered(good("zero0"), "parameter", QKV, **alone), "gradient", QKV, **alone)
    with pytest.raises(PlanError, match=r"its gradient is registered R on dp_shard.*expected P"):
        validate_plan(whole, MICROBATCHES)


def test_a_tensor_that_no_bucket_holds() -> None:
    whole = good("zero0")
    own = whole.own
    units = tuple(replace(each, buckets=()) if each.name == "blocks.2" else each for each in own.units)
    classes = {"all": replace(own, units=units)}
    with pytest.raises(PlanError, match=r"REDUCE\(u3,1\) of a Unit in which nothing trains|in 0 buckets"):
        validate_plan(replace(whole, classes=classes), MICROBATCHES)
