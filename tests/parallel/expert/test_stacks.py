"""Stacks of experts: how each tensor lies, and that what is computed on a rank's part is the class's own result."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwise.base.errors import PlanError
from shardwise.parallel.expert.stacks import (
    ExpertStack,
    StackPlacement,
    find_stacks,
    gated_stack,
    refuse_own_balance,
    refuse_unknown,
)
from shardwise.plan.placement import AxisCut, Partial, Replicate, Shard, ShardBlock, local_shape, pieces
from tests.parallel.expert.theirs import OFTEN, D, E, F, theirs


def test_forms_and_placements() -> None:
    stacks = {
        name: find_stacks(nn.ModuleDict({"a": theirs(folder, name)})).stacks["a"] for folder, name in OFTEN
    }
    halves = (ShardBlock(F, F), ShardBlock(F, F))
    assert stacks["MixtralExperts"] == gated_stack(E, F, "gate_up_proj", "down_proj")
    assert stacks["MixtralExperts"].parameters["gate_up_proj"].placement == Shard(1, halves)
    assert stacks["AriaExperts"].parameters["gate_up_proj"].placement == Shard(2, halves)
    assert stacks["AriaExperts"].parameters["down_proj"].placement == Shard(1)
    oss = stacks["GptOssExperts"].parameters
    assert oss["gate_up_proj"].placement == Shard(2, (ShardBlock(2 * F, F),))
    assert oss["gate_up_proj_bias"].placement == Shard(1, (ShardBlock(2 * F, F),))
    assert oss["down_proj_bias"] == StackPlacement(Replicate(), Partial())
    assert stacks["NemotronHExperts"].parameters["up_proj"].placement == Shard(1)
    assert local_shape((E, 2 * F, D), [AxisCut(Shard(1, halves), 0, 3)]) == (E, 4, D)


def test_each_half_is_cut_by_itself() -> None:
    """Cut as one, the first rank would have all gates and the second all ups."""
    place = gated_stack(1, 4).parameters["gate_up"].placement
    assert isinstance(place, Shard)
    assert [(piece.start, piece.stop) for piece in pieces(place, 8, 1, 2)] == [(2, 4), (6, 8)]


class Own(nn.Module):
    """Says itself what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(E, 2 * F, D))
        self.down = nn.Parameter(torch.zeros(E, D, F))

    def expert_stack(self) -> ExpertStack:
        return gated_stack(E, F)


class Net(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.shared_experts = nn.Linear(D, D)


def test_a_model_without_experts_or_with_others_is_refused_by_name() -> None:
    listed = Net(nn.ModuleList(nn.Linear(D, D) for _ in range(E)))
    found = find_stacks(listed)
    assert set(found.refused) == {"experts"}
    refuse_unknown(listed, found, 1, 1)
    with pytest.raises(
        PlanError, match=r"mesh.ep is 2, but experts is a ModuleList with 4 modules Linear.*MixtureOf"
    ):
        refuse_unknown(listed, found, 2, 1)
    with pytest.raises(PlanError, match="mesh.ep is 2, but Linear has no experts"):
        refuse_unknown(nn.Linear(1, 1), find_stacks(nn.Linear(1, 1)), 2, 1)
    own = Net(Own())
    found = find_stacks(own)
    refuse_unknown(own, found, 2, 3)
    with pytest.raises(
        PlanError, match=r"experts: 4 experts do not divide over mesh.ep=3; the nearest .* is 2"
    ):
        refuse_unknown(own, found, 3, 1)
    with pytest.raises(
        PlanError, match=r"6 hidden features of an expert do not divide over mesh.etp=4; .* is 3"
    ):
        refuse_unknown(own, found, 1, 4)


def test_a_class_that_does_more_with_its_stacks_is_refused() -> None:
    found = find_stacks(nn.ModuleDict({"experts": theirs("muse_spark", "MuseSparkExperts")}))
    assert "post_expert_norm.weight beside stacks" in found.refused["experts"]
    found = find_stacks(nn.ModuleDict({"experts": theirs("longcat_flash", "LongcatFlashExperts")}))
    assert set(found.refused) == {"experts"}
    wrong = theirs("mixtral", "MixtralExperts")
    wrong.down_proj = nn.Parameter(torch.zeros(E, D, F + 1))
    assert (
        "gate_up_proj [4, 12, 5] where [4, 14, 5]"
        in find_stacks(SimpleNamespace(named_modules=lambda: [("experts", wrong)])).refused["experts"]
    )  # type: ignore[arg-type]


def test_a_balance_loss_of_the_model_s_own_is_refused_in_a_pipeline() -> None:
    """It is made of what all layers' routers said."""
    pytest.importorskip("transformers", minversion="5")
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        plain, asks = (
            MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=on)) for on in (False, True)
        )
    refuse_own_balance(plain, 2)
    refuse_own_balance(asks, 1)
    with pytest.raises(
        PlanError, match="MixtralForCausalLM that adds a balance loss .*output_router_logits = False"
    ):
        refuse_own_balance(asks, 2)
