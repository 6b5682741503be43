"""A Plan as text and as bytes."""

from typing import Any

import pytest
import torch
from tests.engine.nets import Language, seeded
from torch import nn

from shardwise.compose.describe import describe
from shardwise.compose.plan import PlanPolicies, make_plan
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.registry import UpdateRule
from shardwise.precision.policy import PrecisionPolicy
from shardwise.tiers.offload import OffloadPolicy


def planned(model: nn.Module, stage: int = 3, mesh: Mesh | None = None, **more: Any) -> Plan:
    precision = PrecisionPolicy.model_validate(more.pop("precision", {}))
    group_of, microbatches = more.pop("group_of", lambda name: 0), more.pop("microbatches", 1)
    updates, offload = (UpdateRule(("exp_avg", "exp_avg_sq")),) * 3, OffloadPolicy(**more.pop("offload", {}))
    zero = ZeroPolicy(stage=stage, **more)  # type: ignore[arg-type]
    policies = PlanPolicies(
        zero, PipelinePolicy(), precision, group_of, updates, microbatches, offload=offload
    )
    return make_plan(describe(model, zero), mesh or Mesh(dp_shard=4), policies)


@pytest.mark.parametrize("stage", range(4))
def test_bytes_are_those_of_the_table(stage: int) -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    plan = planned(model, stage, precision="bf16")
    wanted = {0: 18, 1: 6 + 12 / 4, 2: 2 + 16 / 4, 3: 18 / 4}[stage]
    assert sum(plan.bytes_per_rank().values()) == wanted * 256 * 256


def test_a_plan_reads_as_a_table() -> None:
    plan = planned(seeded(Language), microbatches=2)
    text = str(plan)
    assert "Plan over dp=4: 387 parameters in 4 Units" in text
    assert "(root)" in text and "blocks.0 .. blocks.2" in text
    assert "weight=R/S grad=P/S" in text
    assert "tied: head.weight share another parameter's slot" in text
    assert len(plan.actions["all"]) == 2 * (2 + 4 * 3 + 4 * 5) + 1 + 4


@pytest.mark.parametrize(
    ("stage", "offload", "mesh", "is_told"),
    [
        (2, {"optimizer": "host"}, Mesh(dp_shard=2), True),
        (1, {"optimizer": "host"}, Mesh(dp_shard=2), True),
        (3, {"optimizer": "host"}, Mesh(dp_shard=2), False),
        (2, {"optimizer": "host"}, Mesh(), False),
        (2, {"optimizer": "host", "step": "delayed"}, Mesh(dp_shard=2), False),
        (2, {}, Mesh(dp_shard=2), False),
    ],
)
def test_a_plan_says_what_waits_for_updates(
    stage: int, offload: dict[str, str], mesh: Mesh, is_told: bool
) -> None:
    plan = planned(nn.Linear(4, 4), stage, mesh, offload=offload)
    assert any("which waits for it" in note for note in plan.notes) == is_told


def test_a_plan_for_many_ranks_is_as_small_as_for_few() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))) for _ in range(8))
        )
    plan = planned(model, mesh=Mesh(dp_replicate=64, dp_shard=1024))
    assert plan.mesh.world_size == 65_536
    assert len(plan.registry) == 32 * 5
    assert sum(plan.bytes_per_rank().values()) > 0
