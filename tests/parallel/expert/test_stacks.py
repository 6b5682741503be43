"""Stacks of experts: how each tensor lies, and that what is computed on a rank's part is the class's own result."""

import copy
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.parallel.expert.stacks import (
    Stack,
    Stacked,
    find_stacks,
    gated_stack,
    refuse_own_balance,
    refuse_unknown,
)
from shardwise.parallel.expert.transformers_experts import compute_of
from shardwise.plan.placement import Block, Cut, Partial, Replicate, Shard, local_shape, pieces
from tests.foreign.wide import wide

E, F, D, N, K = 4, 6, 5, 9, 2
OFTEN = [
    ("mixtral", "MixtralExperts"),
    ("gpt_oss", "GptOssExperts"),
    ("aria", "AriaExperts"),
    ("nemotron_h", "NemotronHExperts"),
    ("step3p7", "Step3p7Experts"),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
]
"""One class of transformers per form; the others in the soak."""
REFUSED = {
    "MuseSparkExperts",
    "LongcatFlashExperts",
    "Llama4TextExperts",
    "DbrxExperts",
    "SwitchTransformersExperts",
}
NOT_BUILT = {"JetMoeParallelExperts", "NllbMoeExperts", "InklingSharedExperts"}
"""Of another signature; and a dense net beside the experts."""


class Config:
    """Whatever size a class asks for."""

    hidden_act = hidden_activation = mlp_hidden_act = dense_act_fn = "silu"
    hidden_size = moe_hidden_size = D
    moe_latent_size = None
    swiglu_alpha, swiglu_limit = 1.5, 0.5
    mlp_gate_softcap = mlp_up_softcap = 2.0
    zero_expert_num = 1
    ffn_act_fn = {"name": "silu"}
    post_norm_eps = 1e-6
    dropout_rate = 0.0
    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return E if "expert" in name and "ffn" not in name else F


def theirs(folder: str, name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:1])) < (5,):
        pytest.skip("stacked experts came with transformers 5")
    of_class = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    with wide():
        module = of_class(Config())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def chosen(experts: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts of each, one of them nobody's, and weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, dtype=torch.float64, generator=generator)
    index = torch.rand(N, experts - 1, generator=generator).argsort(1)[:, :K]  # the last expert gets no row
    return hidden, index, torch.rand(N, K, dtype=torch.float64, generator=generator)


def local(parameter: Tensor, place: Stacked, index: int, ranks: int) -> Tensor:
    """Rank ``index``'s features of one tensor."""
    if not isinstance(place.placement, Shard):
        return parameter.detach().clone()
    where = place.placement
    parts = [
        parameter.detach().narrow(where.dim, piece.start, piece.stop - piece.start)
        for piece in pieces(where, parameter.shape[where.dim], index, ranks)
    ]
    return torch.cat(parts, where.dim)


def cut(module: Any, stack: Stack, ep: int, etp: int) -> Any:
    """By (ep, etp) index, copies of ``module`` that hold their part alone."""
    found = {}
    for i in range(ep):
        for j in range(etp):
            part = copy.deepcopy(module)
            for name, place in stack.parameters.items():
                here = local(getattr(module, name), place, j, etp).chunk(ep, 0)[i].clone()
                getattr(part, name).data = here
            found[i, j] = part
    return found


def by_ranks(module: Any, stack: Stack, ep: int, etp: int, given: tuple[Tensor, Tensor, Tensor]) -> Any:
    """Σ over ranks of what they compute on the rows of their experts, and the parts that computed it."""
    hidden, index, weights = given
    parts = cut(module, stack, ep, etp)
    out = torch.zeros_like(hidden)
    held = stack.experts // ep
    for (i, j), part in parts.items():
        compute = compute_of(part, adds_bias=j == 0)
        pairs = [
            (token, slot, e)
            for e in range(i * held, (i + 1) * held)
            for token, slot in (index == e).nonzero().tolist()
        ]
        counts = [sum(e == i * held + k for _, _, e in pairs) for k in range(held)]
        tokens = torch.tensor([token for token, _, _ in pairs], dtype=torch.long)
        slots = torch.tensor([slot for _, slot, _ in pairs], dtype=torch.long)
        out = out.index_add(0, tokens, compute(hidden[tokens], counts) * weights[tokens, slots, None])
    return out, parts


def check(module: Any, ep: int, etp: int) -> None:
    """Result, and gradients of tokens, weights and every tensor, against the class's own forward."""
    stack = find_stacks(nn.ModuleDict({"experts": module})).stacks["experts"]
    given = chosen()
    for tensor in (given[0], given[2]):
        tensor.requires_grad_()
    wanted = module(*given)
    wanted.sin().sum().backward()
    grads = [given[0].grad, given[2].grad]
    given[0].grad = given[2].grad = None
    out, parts = by_ranks(module, stack, ep, etp, given)
    out.sin().sum().backward()
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([given[0].grad, given[2].grad], grads, rtol=1e-12, atol=1e-12)
    held = stack.experts // ep
    for name, place in stack.parameters.items():
        whole = getattr(module, name).grad
        for i in range(ep):
            rows = [getattr(parts[i, j], name).grad for j in range(etp)]
            if isinstance(place.gradient, Partial):
                assert etp == 1 or all(int(row.count_nonzero()) == 0 for row in rows[1:])
                torch.testing.assert_close(
                    sum(rows), whole[i * held : (i + 1) * held], rtol=1e-12, atol=1e-12
                )
                continue
            for j, row in enumerate(rows):
                torch.testing.assert_close(
                    row, local(whole, place, j, etp)[i * held : (i + 1) * held], rtol=1e-12, atol=1e-12
                )


@pytest.mark.parametrize(("folder", "name"), OFTEN, ids=[name for _, name in OFTEN])
def test_parts_of_a_stack_compute_what_the_class_does(folder: str, name: str) -> None:
    module = theirs(folder, name)
    with wide():
        check(module, ep=2, etp=2)


def test_a_rank_without_rows_has_a_gradient_for_each_tensor() -> None:
    """In one process an expert without tokens has a gradient of 0, and the optimizer moves it."""
    module = theirs("gpt_oss", "GptOssExperts")
    out = compute_of(module, adds_bias=False)(torch.zeros(0, D, dtype=torch.float64), [0] * E)
    out.sum().backward()
    assert out.shape == (0, D)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_forms_and_placements() -> None:
    stacks = {
        name: find_stacks(nn.ModuleDict({"a": theirs(folder, name)})).stacks["a"] for folder, name in OFTEN
    }
    halves = (Block(F, F), Block(F, F))
    assert stacks["MixtralExperts"] == gated_stack(E, F, "gate_up_proj", "down_proj")
    assert stacks["MixtralExperts"].parameters["gate_up_proj"].placement == Shard(1, halves)
    assert stacks["AriaExperts"].parameters["gate_up_proj"].placement == Shard(2, halves)
    assert stacks["AriaExperts"].parameters["down_proj"].placement == Shard(1)
    oss = stacks["GptOssExperts"].parameters
    assert oss["gate_up_proj"].placement == Shard(2, (Block(2 * F, F),))
    assert oss["gate_up_proj_bias"].placement == Shard(1, (Block(2 * F, F),))
    assert oss["down_proj_bias"] == Stacked(Replicate(), Partial())
    assert stacks["NemotronHExperts"].parameters["up_proj"].placement == Shard(1)
    assert local_shape((E, 2 * F, D), [Cut(Shard(1, halves), 0, 3)]) == (E, 4, D)


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

    def expert_stack(self) -> Stack:
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


@pytest.mark.soak
def test_every_class_of_transformers() -> None:
    """Whichever there are: a stack that computes the same in parts, or refused."""
    pytest.importorskip("transformers", minversion="5")
    models = importlib.import_module("transformers.models")
    refused, exact = set(), set()
    for folder in sorted(each.name for each in pkgutil.iter_modules(models.__path__)):
        path = f"transformers.models.{folder}.modeling_{folder}"
        if importlib.util.find_spec(path) is None:
            continue
        text = Path(importlib.util.find_spec(path).origin).read_text()
        for name in re.findall(r"^class (\w+Experts)\(nn", text, re.MULTILINE):
            if name in NOT_BUILT:
                continue
            module = theirs(folder, name)
            if "experts" in find_stacks(nn.ModuleDict({"experts": module})).refused:
                refused.add(name)
                continue
            with wide():
                check(module, ep=2, etp=2)
            exact.add(name)
    assert refused == REFUSED
    assert len(exact) >= 60
