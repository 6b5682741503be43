"""Faults of a registry: each is refused by the name of its tensor."""

from dataclasses import replace
from typing import Any

import pytest
from tests.plan.planted import MICROBATCHES, QKV, WHOLE, WRONG_PLACEMENTS, good, registered

from shardwise.base.errors import PlanError
from shardwise.plan.placement import Partial, Replicate, Shard
from shardwise.plan.validate import validate_plan


@pytest.mark.parametrize(
    "name, kind, tensor, changes, says",
    WRONG_PLACEMENTS,
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


@pytest.mark.parametrize("name", ["zero1", "zero3", "disk"])
def test_a_moment_without_a_buffer(name: str) -> None:
    whole = good(name)
    classes = {
        key: replace(
            each,
            buffers={
                place: tuple(row for row in rows if row.kind != "exp_avg")
                for place, rows in each.buffers.items()
            },
        )
        for key, each in whole.classes.items()
    }
    with pytest.raises(PlanError, match="its moment exp_avg is registered, but has no buffer"):
        validate_plan(replace(whole, classes=classes), MICROBATCHES)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("zero1", {"weight": (Replicate(), Shard())}, "its weight lies R/R .* strategy says R/S"),
        ("zero3", {"master": (Replicate(), Replicate())}, "lies R/S in device memory, but .* says R/R"),
        ("zero2", {"grad": (Partial(), Partial())}, "its grad lies .* but the Unit's strategy says P/P"),
        ("disk", {"tier": "device"}, "in disk memory, but the Unit's strategy says .* in device memory"),
    ],
)
def test_a_strategy_that_differs_from_the_buffers(name: str, changes: dict[str, Any], says: str) -> None:
    """The strategy decides which Actions a Unit has, so it must be that of the registered tensors."""
    whole = good(name)
    own = whole.own
    strategies = [replace(each, **changes) if i == 4 else each for i, each in enumerate(own.strategies)]
    with pytest.raises(PlanError, match=says):
        validate_plan(
            replace(whole, classes={"all": replace(own, strategies=tuple(strategies))}), MICROBATCHES
        )


def test_a_tensor_that_no_bucket_holds() -> None:
    whole = good("zero0")
    own = whole.own
    units = tuple(replace(each, buckets=()) if each.name == "blocks.2" else each for each in own.units)
    classes = {"all": replace(own, units=units)}
    with pytest.raises(PlanError, match=r"REDUCE\(u3,1\) of a Unit in which nothing trains|in 0 buckets"):
        validate_plan(replace(whole, classes=classes), MICROBATCHES)
