"""Every language model of transformers, tiny: which classes there are, a small configuration for each, and a batch.

A configuration is made small by the names of its keys, sub-configurations too. What a class asks for beyond that stands
in ``SPECIAL``. Whether a class can be built so is found by trying: the sweep lists those that cannot.
"""

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine.nets import seeded

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
VOCABULARY, TOKENS, ROWS = 96, 8, 2
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD = 4, 32, 4, 2, 8

_SIZES: list[tuple[Any, str]] = [
    (VOCABULARY, "vocab_size vocab_size_or_config_json_file vocab_size_per_layer_input"),
    (WIDTH, "hidden_size d_model n_embd dim emb_dim embedding_size model_dim n_embed"),
    (
        LAYERS,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers",
    ),
    (LAYERS, "num_blocks speech_encoder_layers text_encoder_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (HEADS, "num_encoder_attention_heads num_decoder_attention_heads"),
    (HEADS, "linear_num_key_heads linear_num_value_heads"),
    (KV_HEADS, "num_key_value_heads kv_n_heads num_kv_heads multi_query_group_num"),
    (
        HEAD,
        "head_dim d_kv attention_head_size head_size kv_channels linear_key_head_dim linear_value_head_dim",
    ),
    (HEAD, "qk_nope_head_dim v_head_dim qk_rope_head_dim index_head_dim"),
    (
        48,
        "intermediate_size ffn_hidden_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim inner_dim dff",
    ),
    (48, "feed_forward_size dim_ff d_inner hidden_dim encoder_ffn_size intermediate_size_mlp moe_d_ff"),
    (48, "shared_intermediate_size num_decoder_ffn_dim"),
    (16, "moe_intermediate_size shared_expert_intermediate_size expert_dim q_lora_rank kv_lora_rank"),
    (16, "image_size mamba_chunk_size chunk_size num_mel_bins"),
    (WIDTH, "hidden_size_per_layer_input"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"),
    (4, "sliding_window local_window_size attention_window_size patch_size"),
    (2, "num_experts_per_tok num_selected_experts moe_topk moe_k top_k_experts"),
    (2, "mamba_d_state state_size ssm_state_size mamba_expand depth type_vocab_size"),
    (1, "n_group topk_group n_shared_experts num_expert_group"),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_sequence_length"),
    (64, "max_source_positions max_target_positions"),
    (0, "pad_token_id padding_idx"),
    (1, "bos_token_id decoder_start_token_id cls_token_id"),
    (2, "eos_token_id sep_token_id forced_eos_token_id"),
    (False, "use_cache gradient_checkpointing"),
]
_BY_KEY: dict[str, Any] = {key: value for value, keys in _SIZES for key in keys.split()}
"""A size per name of a key, wherever it stands."""

_RANDOM = ("dropout", "drop", "jitter", "layerdrop", "pdrop", "noise")

SPECIAL: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1},
    "BltConfig": {},
    "BailingHybridConfig": {},
    "CodeGenConfig": {"rotary_dim": 4, "n_head": 8},
    "DogeConfig": {"is_moe": False},
    "GPTJConfig": {"rotary_dim": 8},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "MoshiConfig": {"audio_vocab_size": 96},
    "ReformerConfig": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [2, 4],
        "local_attn_chunk_length": 4,
        "attn_layers": ["local", "local"],
    },
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"mamba_d_state": 2, "n_mamba_heads": 1},
    "Zamba2Config": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_ngroups": 1},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "EsmConfig": {"token_dropout": False},
    "MptConfig": {},
    "NeoMMEConfig": {"head_dim": 16},
    "EsmcConfig": {"num_key_value_heads": HEADS},
    "FalconConfig": {},
    "CTRLConfig": {"dff": 48},
    "RoCBertConfig": {
        "pronunciation_vocab_size": 10,
        "shape_vocab_size": 10,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "LukeConfig": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Gemma4TextConfig": {"num_kv_shared_layers": 0},
    "NllbMoeConfig": {"normalize_router_prob_before_dropping": False},
    "Gemma4UnifiedTextConfig": {"num_kv_shared_layers": 0},
}
"""Further keys, by configuration class."""


LARGE = {"Dots3NoteForCausalLM", "VibeVoiceAsrForConditionalGeneration"}
"""Classes with parts whose size no key of their configuration sets."""


def classes() -> Iterator[tuple[str, str, str]]:
    """(kind, name of the class, model type), each class once."""
    seen = set()
    for kind, mapping in KINDS.items():
        for model_type, name in getattr(modeling_auto, mapping).items():
            if name not in seen:
                seen.add(name)
                yield kind, name, model_type


def tiny_config(config_class: Any, **more: Any) -> Any:
    """A configuration of ``config_class`` made small."""
    given: dict[str, Any] = {}
    names = _keys_of(config_class)
    subs = getattr(config_class, "sub_configs", {})
    for key in names:
        if key in subs:
            continue
        if key in _BY_KEY:
            given[key] = _BY_KEY[key]
        elif any(word in key for word in _RANDOM) and not key.startswith("use"):
            given[key] = 0 if key == "attn_pdrop" else 0.0
    if "kv_lora_rank" in given:  # latent attention: as many heads of keys as of queries
        given |= {key: HEADS for key in ("num_key_value_heads",) if key in given}
        given.pop("head_dim", None)
    default = config_class() if any(sub.__name__ == "AutoConfig" for sub in subs.values()) else None
    for key, sub in subs.items():
        if default is not None and getattr(default, key, None) is not None:
            sub = type(getattr(default, key))
        if sub.__name__ != "AutoConfig":
            given[key] = tiny_config(sub).to_dict()
    return config_class(**given | SPECIAL.get(config_class.__name__, {}) | more)


def _keys_of(config_class: Any) -> list[str]:
    if is_dataclass(config_class):
        return [field.name for field in fields(config_class)]
    return list(inspect.signature(config_class.__init__).parameters)


def build(name: str, model_type: str, **more: Any) -> nn.Module:
    """The class with random weights in fp64, norms and biases moved away from 1 and 0."""
    if name in LARGE:
        raise ValueError(f"ValueError: {name} has parts of fixed size with more than 50 M parameters")
    of_class = getattr(transformers, name)
    config_class = getattr(of_class, "config_class", None) or CONFIG_MAPPING[model_type]
    if "ForMaskedLM" in name and config_class.__name__ == "ReformerConfig":
        more |= {"is_decoder": False}
    config = tiny_config(config_class, **more)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 1
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model: nn.Module = seeded(of_class, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.train()


def batch(kind: str, seed: int) -> dict[str, Tensor]:
    """Tokens and labels; a causal model's labels are its tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    if kind == "causal":
        return {"input_ids": tokens, "labels": tokens.clone()}
    labels = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": labels}


def variants(name: str, model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what, further keys) of classes that compute another loss, or other layers, by a key of their configuration."""
    config_class = getattr(getattr(transformers, name), "config_class", None) or CONFIG_MAPPING[model_type]
    keys = _keys_of(config_class)
    if "output_router_logits" in keys:
        yield "router loss", {"output_router_logits": True}
    for switch in ("is_moe", "enable_moe_block"):
        if switch in keys:
            yield "experts", {switch: True, "num_experts": 4}
    if "qk_layernorm" in keys:
        yield "qk_layernorm", {"qk_layernorm": True}
    if name == "GPTBigCodeForCausalLM":
        yield "heads of their own keys", {"multi_query": False}
    if name == "FalconForCausalLM":
        yield "old decoder", {"new_decoder_architecture": False, "multi_query": True}
        yield "new decoder", {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS}
