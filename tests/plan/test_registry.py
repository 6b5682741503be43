"""Every tensor once."""

import pytest
import torch

from shardwise.plan.errors import PlanError
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard
from shardwise.plan.registry import Registry, TensorInfo


def info(kind: str, label: str = "", **more: object) -> TensorInfo:
    return TensorInfo("w", (8, 4), torch.float32, kind, label=label, **more)  # type: ignore[arg-type]


def test_a_tensor_is_registered_once() -> None:
    registry = Registry()
    registry.add(info("parameter"))
    registry.add(info("moment", "exp_avg"))
    registry.add(info("moment", "exp_avg_sq"))
    with pytest.raises(PlanError, match="parameter 'w' is registered twice"):
        registry.add(info("parameter"))
    assert len(registry) == 3
    assert [entry.label for entry in registry.of_kind("moment")] == ["exp_avg", "exp_avg_sq"]
    assert registry.get("moment", "w", "exp_avg").label == "exp_avg"
    with pytest.raises(PlanError, match="no master"):
        registry.get("master", "w")


def test_a_gradient_must_say_how_it_is_reduced() -> None:
    with pytest.raises(PlanError, match="nobody would know how to reduce it"):
        Registry().add(info("gradient"))
    Registry().add(info("gradient", grad_placement={"dp_shard": Partial()}))


def test_bytes_and_cut_axes_follow_from_placements() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=4)
    cut = info("master", placement={"dp_replicate": Replicate(), "dp_shard": Shard()})
    assert cut.elements == 32
    assert cut.bytes_on_rank(mesh) == 32 * 4 / 4
    assert info("master").bytes_on_rank(mesh) == 32 * 4
    assert Registry().cut_axes(cut) == ("dp_shard",)
