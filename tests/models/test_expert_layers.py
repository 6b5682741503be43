"""Layers of experts of transformers beside ours: the same results, the same weights there and back."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from shardwise.base.errors import ConfigError, MismatchError
from shardwise.models.expert_layers import expert_layer, export_layer, import_layer

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_experts_per_tok": 3}
DEEPSEEK = SIZES | {
    "moe_intermediate_size": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}
LAYERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (
        MixtralConfig,
        MixtralSparseMoeBlock,
        SIZES | {"intermediate_size": 4, "num_local_experts": 6},
    ),
    "qwen3": (Qwen3MoeConfig, Qwen3MoeSparseMoeBlock, SIZES | {"moe_intermediate_size": 4, "num_experts": 6}),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2Moe, DEEPSEEK),
    "deepseek_v2 in groups": (
        DeepseekV2Config,
        DeepseekV2Moe,
        DEEPSEEK | GROUPS | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3MoE, DEEPSEEK | GROUPS),
}


def theirs(name: str) -> tuple[nn.Module, dict[str, Any]]:
    kind, block, keys = LAYERS[name]
    config = kind(**keys)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = block(config).eval()
    for each in (*module.parameters(), *module.buffers()):
        nn.init.normal_(each, std=0.4)
    return module, config.to_dict()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_transformers_is_one_of_ours(name: str) -> None:
    module, config = theirs(name)
    layer = expert_layer(config).eval()
    layer.load_state_dict(import_layer(module.state_dict()))
    x = torch.randn(2, 20, 8)
    with torch.no_grad():
        found, expected = layer(x), module(x)
    assert float((found - expected).norm() / expected.norm()) <= 1e-6


@pytest.mark.parametrize("naming", ["mixtral", "deepseek"])
def test_weights_go_out_and_come_back(naming: Any) -> None:
    _, config = theirs("mixtral" if naming == "mixtral" else "deepseek_v3")
    state = expert_layer(config).state_dict()
    stored = export_layer(state, naming, "model.layers.3.mlp.")
    first, second, third = (
        ("w1", "w3", "w2") if naming == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    each = [f"model.layers.3.mlp.experts.5.{leaf}.weight" for leaf in (first, second, third)]
    assert [tuple(stored[name].shape) for name in each] == [(4, 8), (4, 8), (8, 4)]
    back = import_layer(stored | {"model.norm.weight": torch.ones(8)}, "model.layers.3.mlp.")
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


def test_what_has_no_place_is_refused() -> None:
    module, config = theirs("deepseek_v3")
    stored = dict(module.state_dict())
    with pytest.raises(MismatchError, match=r"mlp.gate.weight is missing"):
        import_layer(stored, "mlp.")
    with pytest.raises(MismatchError, match=r"shared_expert_gate.weight has no place"):
        import_layer(stored | {"shared_expert_gate.weight": torch.ones(1)})
    with pytest.raises(MismatchError, match=r"router.bias has no name in a file of the family mixtral"):
        export_layer({"router.bias": torch.ones(8), **expert_layer(config).state_dict()}, "mixtral")
    for wrong, said in (
        ({"model_type": "olmoe"}, "expected one of mixtral"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_experts_per_tok": 9}, "top_k is 9"),
        ({"num_experts_per_tok": 1}, "deepseek_v3: .*the router gets no gradient"),
    ):
        with pytest.raises(ConfigError, match=said):
            expert_layer(config | wrong)
