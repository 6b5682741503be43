"""Which modules become Units, and where a parameter lives."""

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import ConfigError, PlanError
from shardwise.comm.world import join
from shardwise.compose.describe import describe
from shardwise.compose.plan import PlanPolicies, make_plan
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.zero.modules import (
    check_memory,
    check_renormalized,
    held,
    holdings,
    repeated_blocks,
    unit_names,
)
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.plan.unit import ParameterSlot, Unit
from shardwise.precision.policy import PrecisionPolicy
from tests.engine.nets import Language
from tests.parallel.zero.nets import Block, Nested, Net, Shared, TiedAcrossBlocks, TiedInsideABlock


def units_of(model: nn.Module, units: list[str] | str = "auto") -> tuple[Unit, ...]:
    zero = ZeroPolicy(units=units)  # type: ignore[arg-type]
    policies = PlanPolicies(zero, PipelinePolicy(), PrecisionPolicy(), lambda name: 0)
    return make_plan(describe(model, zero), Mesh(), policies).units


def slots_of(unit: Unit) -> list[ParameterSlot]:
    return [slot for bucket in unit.buckets for slot in bucket.slots]


def homes(model: nn.Module, units: list[str] | str = "auto") -> dict[str, list[str]]:
    return {unit.name: [slot.name for slot in slots_of(unit)] for unit in units_of(model, units)}


def test_repeated_blocks_become_units() -> None:
    found = homes(Net())
    assert list(found) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert found[""] == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert found["blocks.1"] == [
        f"blocks.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    ]


def test_a_row_of_plain_layers_is_one_network() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert repeated_blocks(nn.Sequential(Block(), Block(), nn.ReLU(), nn.Linear(5, 1))) == ["0", "1"]


def test_only_the_outermost_repetition_counts() -> None:
    rows = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert repeated_blocks(rows) == ["0", "1"]
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    # A ModuleList has no forward pass: what it holds can be Units, itself not.
    assert repeated_blocks(model) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_patterns() -> None:
    assert list(homes(Nested(), ["blocks.*", "blocks.*.inside"])) == [
        "",
        "blocks.0",
        "blocks.0.inside",
        "blocks.1",
        "blocks.1.inside",
        "blocks.2",
        "blocks.2.inside",
    ]
    assert list(homes(Net(), [])) == [""]
    assert homes(Net(), ["blocks.*.up"])["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(ConfigError, match=r"'layers\.\*' matches no module.*first"):
        unit_names(Net(), ["layers.*"])


def test_a_container_cannot_be_a_unit() -> None:
    model = nn.Module()
    model.rows = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with pytest.raises(PlanError, match=r"ModuleDict.*'rows\.\*'"):
        units_of(model, ["rows"])


def test_tied_parameters_move_up() -> None:
    """One slot with two names, in the innermost Unit around all its holders."""
    found = units_of(TiedAcrossBlocks())
    tied = [slot for slot in slots_of(found[0]) if slot.aliases]
    assert [(slot.name, slot.aliases) for slot in tied] == [
        ("blocks.0.down.weight", ("blocks.2.down.weight",))
    ]
    inside = units_of(TiedInsideABlock())
    assert [(slot.name, slot.aliases) for slot in slots_of(inside[1]) if slot.aliases] == [
        ("blocks.0.up.weight", ("blocks.0.extra.weight",))
    ]
    assert [h.aliases for h in holdings(Language()) if h.aliases] == [("head.weight",)]


def test_a_shared_block_is_one_unit() -> None:
    slots = [slot for unit in units_of(Shared()) for slot in slots_of(unit)]
    assert len(slots) == len({slot.name for slot in slots}) == 8
    assert sum(len(slot.aliases) for slot in slots) == 8


def test_units_without_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    assert list(homes(model, ["*"])) == ["", "1"]
    assert homes(model, ["*"])[""] == []


def test_a_module_that_is_not_what_the_plan_says() -> None:
    """Made of the description, the Plan would otherwise be run on other tensors."""
    model = Net()
    spec, units = describe(model), units_of(model)
    assert set(held(model, units, spec.canonical, "here")) == set(spec.parameters)
    model.first.bias.requires_grad_(False)
    with pytest.raises(
        PlanError, match=r"here: parameter 'first\.bias' is .*requires_grad False.*True in the Plan"
    ):
        held(model, units, spec.canonical, "here")
    model.first.bias = None
    with pytest.raises(PlanError, match=r"parameter 'first\.bias', which is not there"):
        held(model, units, spec.canonical, "here")


# Memory that parameters share ----------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, one: torch.Tensor, other: torch.Tensor, is_buffer: bool = False) -> None:
        super().__init__()
        self.one = nn.Parameter(one)
        if is_buffer:
            self.register_buffer("other", other)
        else:
            self.other = nn.Parameter(other)


def test_two_parameters_over_one_memory_are_refused() -> None:
    """head.weight.data = embedding.weight.data tied nothing: the two came apart by 65 % of an update."""
    flat = torch.randn(8, 6)
    for one, other in [
        (flat, flat),
        (flat, flat[2:4]),
        (flat[:, :3], flat[:, 2:]),
        (flat, flat.t()),
        (flat, flat.view(torch.int32).view(torch.float32)),
    ]:
        with pytest.raises(PlanError, match="one and other are two tensors over one memory"):
            check_memory(Two(one, other))
    with pytest.raises(PlanError, match="over one memory"):
        check_memory(Two(flat, flat[0], is_buffer=True))
    for one, other in [(flat[:4], flat[4:]), (flat[:, :3], flat[:, 3:]), (flat[:, 0], flat[:, 1])]:
        check_memory(Two(one, other))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    check_memory(model)
    model[1].weight.data = model[0].weight.data
    with pytest.raises(PlanError, match=r"0\.weight and 1\.weight"):
        check_memory(model)
    check_memory(nn.LSTM(3, 4, bidirectional=True))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    check_memory(tied)
    tied[1].weight = nn.Parameter(tied[0].weight.data)
    with pytest.raises(PlanError, match=r"hold one Parameter"):
        shardwise.initialize(tied, {}, world=join(quiet=True))


def test_renormalized_embeddings_are_refused_on_more_ranks() -> None:
    """Each rank renormalised the rows of its own batch: the copies came apart for good."""
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))
    check_renormalized(model, 1)
    with pytest.raises(PlanError, match=r"0 has max_norm 1\.0.*torch\.renorm"):
        check_renormalized(model, 2)
    check_renormalized(nn.Sequential(nn.Embedding(5, 3)), 2)
