"""A model becomes a Plan: Units, buckets, placements, bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.nets import Language
from tests.parallel.zero.nets import Adapters, Net
from tests.plan.described import model as described
from tests.plan.described import plan as described_plan
from torch import nn

from shardwise.base.errors import PlanError
from shardwise.base.words import bytes_text
from shardwise.compose.describe import describe
from shardwise.compose.lists import StageOrder, registered
from shardwise.compose.plan import PlannedModel, PlanPolicies, make_plan
from shardwise.optim.policy import OptimizerPolicy
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.zero.cost import unit_bytes
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.action import Action, Kind
from shardwise.plan.exchange import GradientExchange
from shardwise.plan.lists import UnitBoundary
from shardwise.plan.mesh import DENSE, EXPERT, Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.registry import UpdateRule
from shardwise.plan.slices import TensorSlices
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


def test_every_parameter_is_in_one_bucket() -> None:
    for model in (Net(), Language(), Adapters()):
        slots = [slot for u in planned(model).units for b in u.buckets for slot in b.slots]
        names = [name for slot in slots for name in (slot.name, *slot.aliases)]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def test_buckets_part_what_differs() -> None:
    """Dtype, trained or frozen, and optimizer group."""
    policy = OptimizerPolicy.model_validate({"groups": [{"match": "*bias"}]})
    found = planned(
        Adapters(), precision={"compute": "bf16", "keep_fp32": ["first.*"]}, group_of=policy.group_of
    )
    root, block = found.units[:2]
    assert [(b.key[:4], [slot.name for slot in b.slots]) for b in root.buckets] == [
        ((torch.float32, True, 0, ""), ["first.weight"]),
        ((torch.float32, True, 1, ""), ["first.bias"]),
        ((torch.bfloat16, True, 0, ""), ["last.weight"]),
        ((torch.bfloat16, True, 1, ""), ["last.bias"]),
    ]
    assert [(b.key[:4], [slot.name for slot in b.slots]) for b in block.buckets] == [
        ((torch.bfloat16, True, 0, ""), ["blocks.0.a", "blocks.0.b"]),
        ((torch.bfloat16, False, 0, ""), ["blocks.0.base.weight", "blocks.0.base.bias"]),
    ]


def test_registry_knows_every_tensor() -> None:
    model = Adapters()
    model.register_buffer("shift", torch.zeros(3))
    registry = planned(model).registry
    parameters = dict(model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert {info.name for info in registry.of_kind("parameter")} == set(parameters)
    for kind in ("gradient", "master"):
        assert {info.name for info in registry.of_kind(kind)} == trained  # type: ignore[arg-type]
    assert len(registry.of_kind("moment")) == 2 * len(trained)
    assert [info.name for info in registry.of_kind("buffer")] == ["shift"]
    for info in registry.of_kind("parameter"):
        assert info.shape == tuple(parameters[info.name].shape)


def test_a_model_without_parameters() -> None:
    with pytest.raises(PlanError, match="Tanh has no parameters"):
        planned(nn.Tanh())


def test_a_complex_parameter_cannot_be_planned() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(PlanError, match="'weight' has dtype torch.complex64"):
        planned(model)


def test_models_may_name_their_units() -> None:
    class Named(Net):
        def unit_patterns(self) -> list[str]:
            return ["first", "last"]

    assert [unit.name for unit in planned(Named()).units] == ["", "first", "last"]
    assert [unit.name for unit in planned(Named(), units=["blocks.0"]).units] == ["", "blocks.0"]


def test_nobody_said_how_the_model_lies_on_tp() -> None:
    """Without the check each rank would train on its own addends."""
    with pytest.raises(
        PlanError, match=r"mesh\.tp is 2, but the model's description does not say how to cut it"
    ):
        planned(Net(), 2, Mesh(dp_shard=2, tp=2))


def test_a_whole_step() -> None:
    plan = planned(Net(), 2, Mesh(dp_shard=2), microbatches=2, units=["blocks.0"])
    assert " ".join(map(str, plan.actions["all"])) == (
        "F(0,0) F(u0,0) F(u1,0) B(0,0) B(u0,0) B(u1,0) REDUCE(u1,0) ARRIVE(u1,0) REDUCE(u0,0) ARRIVE(u0,0) "
        "F(0,1) F(u0,1) F(u1,1) B(0,1) B(u0,1) B(u1,1) REDUCE(u1,1) ARRIVE(u1,1) REDUCE(u0,1) ARRIVE(u0,1) "
        "NORM STEP(u0) UNSHARD(u0) STEP(u1) UNSHARD(u1)"
    )


# Embedding tables ----------------------------------------------------------------------------------------------------

TABLES = {"users": ("users",), "blocks.2.items": ("blocks.2.items",)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp_shard=4, ep=2),
        Mesh(dp_shard=4, ep=4),
        Mesh(tp=4),
        Mesh(dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=2),
        Mesh(pp=2, dp_shard=2, tp=2, ep=2),
    ],
    ids=str,
)
def test_experts_lie_on_other_ranks_than_the_rest(mesh: Mesh, stage: int) -> None:
    """Where one rank holds them alone they are at stage 0, while the rest is cut; or the other way round."""
    made = described_plan(mesh, stage, spec=described(stack=4))  # and validated
    shards = {"dp_shard": mesh.dp_shard, "edp": mesh.edp}
    for each in made.classes.values():
        for (unit, place), rows in each.buffers.items():
            found, bucket = each.units[unit], each.units[unit].buckets[place]
            inner = "edp" if found.name.endswith(".experts") else "dp_shard"
            assert found.axes == bucket.key.axes == ("dp_replicate", inner)
            assert bucket.shards == shards[inner]
            assert {axis for row in rows for axis in row.placement} == set(found.axes)
            cuts_weight = stage == 3 and shards[inner] > 1
            assert str(rows[0].placement[inner]) == ("S" if cuts_weight else "R")
            cuts_grad = [
                Action(Kind.REDUCE, unit, 0, -1, -1) in each.actions,
                stage >= 2 and shards[inner] > 1,
            ]
            assert cuts_grad[0] == cuts_grad[1], "with each microbatch where it stays cut"
            gathers = [a for a in each.actions if a[:2] == (Kind.UNSHARD, unit) and a.microbatch >= 0]
            assert bool(gathers) == cuts_weight
    info = made.registry.get("parameter", "blocks.0.experts.gate_up")
    assert TensorSlices(made.registry, mesh, 0).local_shape(info) == (4 // mesh.ep, 16 // mesh.etp, 16)
    assert info.bytes_on(mesh, 0) * mesh.ep * mesh.etp * (mesh.edp if stage == 3 else 1) == 4 * 4 * 16 * 16
    by_view = [made.bytes_per_rank(0, axes) for axes in (EXPERT, DENSE)]
    together = {row: sum(each.get(row, 0) for each in by_view) for row in by_view[1]}
    assert all(by_view) and together == made.bytes_per_rank(0)
    for what, axes in (("of experts", EXPERT), ("of the rest", DENSE)):
        assert f"    {what}, over {made.mesh.view(axes)}: weights " in str(made)


def test_a_unit_of_experts_and_of_others() -> None:
    spec = replace(described(1, stack=2), units=("blocks.0",))
    with pytest.raises(
        PlanError, match="'blocks.0' holds 'blocks.0.out.bias' and 'blocks.0.experts.bias', but"
    ):
        described_plan(Mesh(dp_shard=2, ep=2), spec=spec)


def test_a_bias_of_each_expert_is_no_matrix() -> None:
    with pytest.raises(
        PlanError, match=r"experts.bias' has the shape \[2, 16\], one row an expert, but its rule"
    ):
        described_plan(
            Mesh(dp_shard=2, ep=2),
            spec=described(1, stack=2),
            updates=(UpdateRule(("exp_avg",)), UpdateRule((), "matrix")),
            group_of=lambda name: int(name.endswith("experts.bias")),
        )


def test_tables_are_units_of_the_class_whose_stage_uses_them() -> None:
    plan = described_plan(Mesh(pp=2, dp_shard=2), 2, spec=described(tables=TABLES))
    first, second = plan.classes.values()
    assert [(unit.index, unit.name) for unit in first.units if unit.has_rows] == [(3, "users")]
    assert [(unit.index, unit.name) for unit in second.tables_of(1)] == [(3, "blocks.2.items")]
    assert {unit.name for unit in first.units_of(0)} == {"", "blocks.0", "blocks.1"}
    rows = {name: " ".join(map(str, row)) for name, row in plan.actions.items()}
    assert "F(u0,0) FETCH(u3,0) F(u1,0)" in rows["pp 0"] and "F(u1,0) FETCH(u3,0) F(u2,0)" in rows["pp 1"]
    for row in rows.values():
        assert row.endswith(
            "DELIVER(u3) NORM STEP(u0) UNSHARD(u0) STEP(u1) UNSHARD(u1) STEP(u2) UNSHARD(u2) STEP(u3)"
        )
    assert str(plan).count("2 FETCH") == str(plan).count("1 DELIVER") == 2


def test_tables_are_fetched_where_a_step_has_shown() -> None:
    """Behind a gather ahead as without one, in the order in which the model asks."""
    spec = described(2, tables={"a": ("a",), "b": ("b",)})
    zero = ZeroPolicy(stage=3, prefetch_bytes=1)
    policies = PlanPolicies(zero, PipelinePolicy(), PrecisionPolicy(), lambda name: 0)
    made = make_plan(spec, Mesh(dp_shard=2), policies)
    ahead = "UNSHARD(u0,0) UNSHARD(u1,0) F(u0,0) FETCH(u3,0) FETCH(u4,0)"
    assert ahead in " ".join(map(str, made.own.actions))
    boundaries = registered(made.own, 0).boundaries
    asked = PlannedModel(spec, policies, made).in_order({0: StageOrder(boundaries, {4: 1, 3: 1})})
    assert "F(u1,0) FETCH(u4,0) FETCH(u3,0)" in " ".join(map(str, asked.own.actions))
    with pytest.raises(PlanError, match="0 FETCH of Unit 3 in microbatch 0"):
        PlannedModel(spec, policies, made).in_order({0: StageOrder(boundaries, {4: 1})})


def test_a_block_that_runs_twice_in_a_row_is_recalled_for_both_calls() -> None:
    """One Unit ahead of the first, in one list: the Plan of a step that had shown this order was refused."""
    made = described_plan(Mesh(), saves=True)
    spec, boundaries = described(), list(registered(made.own, 0).boundaries)
    place = boundaries.index(UnitBoundary(False, 2)) + 1
    boundaries[place:place] = [UnitBoundary(True, 2), UnitBoundary(False, 2)]
    policies = PlanPolicies(
        ZeroPolicy(stage=0, prefetch_bytes=0),
        PipelinePolicy(),
        PrecisionPolicy(),
        lambda name: 0,
        (UpdateRule(("exp_avg",)),),
        2,
        offload=OffloadPolicy(activations="host"),
        blocks=spec.units,
    )
    asked = PlannedModel(spec, policies, made).in_order({0: StageOrder(tuple(boundaries), {})})
    row = " ".join(map(str, asked.own.actions))
    assert "RELOAD(u2,1) B(u3,1)" in row and "RELOAD(u2,1) B(u2,1)" in row and "RELOAD(u1,1) B(u2,1)" in row


def test_a_collection_that_two_stages_use() -> None:
    spec = described(tables={"blocks.0.items": ("blocks.0.items", "blocks.3.items")})
    with pytest.raises(PlanError, match=r"'blocks\.0\.items' is used by blocks of several pipeline stages"):
        described_plan(Mesh(pp=2), spec=spec)


def test_what_leaves_a_host_is_printed_with_the_plan() -> None:
    spec = described(2)
    exchanges = {"dp_shard": GradientExchange("auto", 4, 2)}
    policies = PlanPolicies(
        ZeroPolicy(stage=2), PipelinePolicy(), PrecisionPolicy(), lambda name: 0, exchanges=exchanges
    )
    plan = make_plan(spec, Mesh(dp_shard=4), policies)
    units = plan.own.units
    sent = sum(unit_bytes(unit, plan.own.strategies[unit.index], plan.mesh).crossing for unit in units)
    assert sent == sum(bucket.elements for unit in units for bucket in unit.buckets) // 2 * 4
    (note,) = plan.notes[1:]
    assert note == (
        f"zero.exchange: two_level sums gradients along 'dp_shard' over 2 hosts; {bytes_text(sent)} leave a host for "
        "each sum of all Units"
    )
    one = make_plan(spec, Mesh(dp_shard=4), policies._replace(exchanges={}))
    assert len(one.notes) == 1


def test_what_leaves_a_host_at_stage_0_is_printed_with_the_plan() -> None:
    """Half of an all-reduce over two hosts is a gather and half a sum, of each of which a host sends half."""
    exchanges = {"dp_shard": GradientExchange("auto", 4, 2)}
    policies = PlanPolicies(
        ZeroPolicy(stage=0), PipelinePolicy(), PrecisionPolicy(), lambda name: 0, exchanges=exchanges
    )
    plan = make_plan(described(2), Mesh(dp_shard=4), policies)
    sent = sum(bucket.elements for unit in plan.own.units for bucket in unit.buckets) * 4
    assert plan.notes[1:] == (
        f"zero.stage 0: all-reduces sum gradients along 'dp_shard' over 2 hosts; {bytes_text(sent)} leave a host for "
        "each sum of all Units",
    )
