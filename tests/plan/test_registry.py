"""Every tensor once."""

import pytest
import torch

from shardwise.base.errors import PlanError
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard
from shardwise.plan.registry import Registry, TensorInfo


def info(kind: str, label: str = "", **more: object) -> TensorInfo:
    return TensorInfo("w", (8, 4), torch.float32, kind, label=label, **more)  # type: ignore[arg-type]


def test_a_tensor_is_registered_once() -> None:
    registry = Registry(Mesh())
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


@pytest.mark.parametrize(
    ("mesh", "said", "unsaid"),
    [
        (Mesh(dp_shard=2), {}, "dp_shard"),
        (Mesh(dp_shard=2), {"tp": Replicate()}, "dp_shard"),
        (Mesh(dp_replicate=2, dp_shard=2), {"dp_shard": Partial()}, "dp_replicate"),
        (Mesh(dp_shard=2, tp=2), {"dp_shard": Partial()}, "tp"),
        (Mesh(dp_shard=2, cp=2), {"dp_replicate": Partial()}, "dp_shard"),
        (Mesh(dp_shard=2), {"dp_shard": Partial()}, None),
        (Mesh(pp=2), {}, None),
        (Mesh(), {}, None),
    ],
    ids=str,
)
def test_a_trained_tensor_says_how_its_gradient_lies(mesh: Mesh, said: object, unsaid: str | None) -> None:
    gradient = info("gradient", grad_placement=said)
    if unsaid is None:
        Registry(mesh).add(gradient)
    else:
        with pytest.raises(PlanError, match=f"'w' is trained, .* on the axis '{unsaid}'"):
            Registry(mesh).add(gradient)


def test_bytes_and_cut_axes_follow_from_placements() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=4)
    cut = info("master", placement={"dp_replicate": Replicate(), "dp_shard": Shard()})
    assert cut.elements == 32
    assert cut.bytes_on(mesh, 0) == 32 * 4 / 4
    assert info("master").bytes_on(mesh, 0) == 32 * 4
    assert Registry(mesh).cut_axes(cut) == ("dp_shard",)
