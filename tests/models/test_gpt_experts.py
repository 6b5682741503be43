"""A GPT with mixtures of experts: which blocks have them, what it costs, what is refused."""

import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from shardwise.kernels.attention import plain_attention
from shardwise.models.gpt import Gpt, GptPolicy, flops_per_token, parameter_count
from shardwise.models.layers import ExpertMlp, SwiGlu
from tests.models.shapes import tokens

_SPARSE = GptPolicy.model_validate(
    {
        "layers": 4,
        "width": 16,
        "heads": 2,
        "context": 16,
        "vocab": 50,
        "hidden": 32,
        "experts": {"count": 4, "hidden": 8, "shared": 1, "first": 1, "every": 2, "router": {"top_k": 2}},
    }
)


def test_every_second_block_from_the_first_on_has_experts() -> None:
    kinds = [type(block.mlp) for block in Gpt(_SPARSE).blocks]
    assert kinds == [SwiGlu, ExpertMlp, SwiGlu, ExpertMlp]


def test_experts_are_as_wide_as_a_dense_block_unless_said() -> None:
    policy = GptPolicy(layers=1, width=16, heads=2, vocab=50, hidden=24, experts={"count": 2}).resolved()
    assert policy.experts is not None
    assert policy.experts.hidden == 24
    assert Gpt(policy).blocks[0].mlp.experts.down.shape == (2, 16, 24)


def test_one_start_on_meta_and_off_it() -> None:
    """Each stack of experts starts by the rule of the dense matrix in its place."""
    model = Gpt(_SPARSE, seed=3)
    rules = model.initial_rules()
    assert rules["blocks.1.mlp.experts.down"] == rules["blocks.0.mlp.down.weight"]
    assert rules["blocks.1.mlp.experts.gate_up"] == rules["blocks.0.mlp.gate_up.weight"]
    with torch.device("meta"):
        assert Gpt(_SPARSE).initial_rules() == rules
    assert model.blocks[1].mlp.experts.down.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.1)


def test_flops_count_the_experts_that_a_token_goes_through() -> None:
    x = tokens(length=16)
    model = Gpt(_SPARSE, attention=plain_attention)  # computes the whole square, as the counter expects
    with FlopCounterMode(display=False) as counter:
        model(x, x).backward()
    assert counter.get_total_flops() == x.numel() * flops_per_token(_SPARSE, causal=False)
    dense = _SPARSE.model_copy(update={"experts": None, "hidden": 24})  # 2 experts and a shared one of 8
    assert parameter_count(_SPARSE) > parameter_count(dense)


def test_experts_that_no_block_would_have_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"experts\.first is 4, but the blocks are 0 to 3"):
        GptPolicy.model_validate(_SPARSE.model_dump() | {"experts": {"count": 2, "first": 4}})
    with pytest.raises(ValidationError, match=r"router\.top_k is 3 but there are 2 experts"):
        GptPolicy.model_validate(_SPARSE.model_dump() | {"experts": {"count": 2, "router": {"top_k": 3}}})
    with pytest.raises(ValidationError, match="experts are for family: llama"):
        GptPolicy.model_validate({"family": "gpt2", "experts": {"count": 2}})


def test_the_table_of_a_model_without_dense_blocks_names_none() -> None:
    every = _SPARSE.model_copy(
        update={"experts": _SPARSE.experts.model_copy(update={"first": 0, "every": 1})}
    )
    assert "blocks.*.mlp.down" in Gpt(_SPARSE).tensor_table()
    assert "blocks.*.mlp.down" not in Gpt(every).tensor_table()
