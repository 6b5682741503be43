"""Faults of a registry: each is refused by the name of its tensor."""

from dataclasses import replace
from typing import Any

import pytest
import torch
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
        ("zero1", "master", QKV, {"shape": (16, 16)}, r"master is registered as .*\[16, 16\]"),
        ("zero1", "master", QKV, {"dtype": torch.bfloat16}, "master is registered as torch.bfloat16"),
        ("zero2", "gradient", QKV, {"shape": (16, 16)}, r"grad is registered as \[16, 16\]"),
        ("zero2", "gradient", QKV, {"dtype": torch.float64}, "grad is registered as torch.float64"),
        ("zero3", "moment", QKV, {"shape": (16, 16)}, r"exp_avg is registered as \[16, 16\]"),
        ("zero3", "moment", QKV, {"dtype": torch.float64}, "exp_avg is registered as torch.float64"),
        ("zero3", "moment", QKV, {"label": "other"}, "exp_avg|other"),
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
