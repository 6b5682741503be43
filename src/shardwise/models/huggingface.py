"""Hugging Face's names for the parts of a Gpt: one table, read in one direction to import and in the other to export.

A Gpt's tensor is the stored parts joined along dim 0, each transposed first if GPT-2 stores [inputs, outputs]:

    blocks.3.attention.qkv.weight   =  rows of  layers.3.self_attn.{q,k,v}_proj.weight          (llama, mistral)
    blocks.3.attention.qkv.weight   =  transpose of  h.3.attn.c_attn.weight                     (gpt2)
    blocks.3.mlp.experts.gate_up    =  rows of  block_sparse_moe.experts.{0.w1, 0.w3, 1.w1 ...}.weight         (mixtral)

A configuration is accepted only if a Gpt computes the same function; any other configuration is refused with the key.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from shardwise.base.errors import ConfigError
from shardwise.models.gpt import GptExperts, GptPolicy, RopeScaling
from shardwise.parallel.expert.policy import RouterPolicy

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")


class StoredPart(NamedTuple):
    """A stored tensor that is a Gpt's tensor, or a piece of one."""

    name: str
    shape: tuple[int, ...]
    """The shape in the file."""
    transposed: bool = False
    experts: int = 0
    """The number of experts of which a Gpt's tensor is a stack; 0 for other tensors."""

    @property
    def our_shape(self) -> tuple[int, ...]:
        """The shape of the piece in a Gpt's tensor."""
        return self.shape[::-1] if self.transposed else self.shape


def joined_shape(parts: list[StoredPart]) -> tuple[int, ...]:
    """Return the shape of the Gpt's tensor that ``parts`` form."""
    first = parts[0].our_shape
    return stacked((sum(part.our_shape[0] for part in parts), *first[1:]), parts[0].experts)


def stacked(shape: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """Return the shape of a stack whose matrices, one below the other, have ``shape``.

    Args:
        shape: The shape of the matrices joined along dim 0.
        experts: The number of matrices; 0: ``shape`` is not a stack and is returned as it is.
    """
    return (experts, shape[0] // experts, *shape[1:]) if experts else shape


def parts_of(policy: GptPolicy) -> dict[str, list[StoredPart]]:
    """Return, for each parameter name of a Gpt, the stored tensors that form the parameter."""
    p = policy.resolved()
    return _llama_parts(p) if p.family == "llama" else _gpt2_parts(p)


def _llama_parts(p: GptPolicy) -> dict[str, list[StoredPart]]:
    assert p.vocab and p.kv_heads and p.head_size and p.hidden, "resolved() fills these"
    d, q, kv = p.width, p.heads * p.head_size, p.kv_heads * p.head_size
    parts = {"embed.weight": [StoredPart("model.embed_tokens.weight", (p.vocab, d))]}
    for i in range(p.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        parts |= {
            f"{ours}.attention_norm.weight": [StoredPart(f"{theirs}.input_layernorm.weight", (d,))],
            f"{ours}.attention.qkv.weight": [
                StoredPart(f"{attn}.q_proj.weight", (q, d)),
                StoredPart(f"{attn}.k_proj.weight", (kv, d)),
                StoredPart(f"{attn}.v_proj.weight", (kv, d)),
            ],
            f"{ours}.attention.out.weight": [StoredPart(f"{attn}.o_proj.weight", (d, q))],
            f"{ours}.mlp_norm.weight": [StoredPart(f"{theirs}.post_attention_layernorm.weight", (d,))],
        }
        if p.has_experts(i):
            parts |= _expert_parts(p, f"{ours}.mlp", f"{theirs}.block_sparse_moe")
            continue
        parts |= {
            f"{ours}.mlp.gate_up.weight": [
                StoredPart(f"{mlp}.gate_proj.weight", (p.hidden, d)),
                StoredPart(f"{mlp}.up_proj.weight", (p.hidden, d)),
            ],
            f"{ours}.mlp.down.weight": [StoredPart(f"{mlp}.down_proj.weight", (d, p.hidden))],
        }
    parts["norm.weight"] = [StoredPart("model.norm.weight", (d,))]
    if not p.tied_head:
        parts["head.weight"] = [StoredPart("lm_head.weight", (p.vocab, d))]
    return parts


def _expert_parts(p: GptPolicy, ours: str, theirs: str) -> dict[str, list[StoredPart]]:
    """Return the stored tensors of one mixture of experts.

    Parts that a Mixtral does not have (shared experts, the bias of a router) keep the Gpt's names.
    """
    assert p.experts is not None and p.experts.hidden is not None, "resolved() fills these"
    d, count, hidden = p.width, p.experts.count, p.experts.hidden
    each = [f"{theirs}.experts.{e}" for e in range(count)]
    parts = {
        f"{ours}.router.weight": [StoredPart(f"{theirs}.gate.weight", (count, d))],
        f"{ours}.experts.gate_up": [
            StoredPart(f"{expert}.{leaf}.weight", (hidden, d), experts=count)
            for expert in each
            for leaf in ("w1", "w3")
        ],
        f"{ours}.experts.down": [
            StoredPart(f"{expert}.w2.weight", (d, hidden), experts=count) for expert in each
        ],
    }
    if p.experts.shared:
        inside = p.experts.shared * hidden
        for leaf, shape in (("gate_up", (2 * inside, d)), ("down", (d, inside))):
            parts[f"{ours}.shared.{leaf}.weight"] = [StoredPart(f"{theirs}.shared.{leaf}.weight", shape)]
    return parts


def _gpt2_parts(p: GptPolicy) -> dict[str, list[StoredPart]]:
    assert p.vocab and p.hidden, "resolved() fills these"
    d = p.width
    parts = {
        "embed.weight": [StoredPart("transformer.wte.weight", (p.vocab, d))],
        "positions.weight": [StoredPart("transformer.wpe.weight", (p.context, d))],
    }

    def norm(ours: str, theirs: str) -> None:
        for leaf in ("weight", "bias"):
            parts[f"{ours}.{leaf}"] = [StoredPart(f"transformer.{theirs}.{leaf}", (d,))]

    def linear(ours: str, theirs: str, inputs: int, outputs: int) -> None:
        parts[f"{ours}.weight"] = [StoredPart(f"transformer.{theirs}.weight", (inputs, outputs), True)]
        parts[f"{ours}.bias"] = [StoredPart(f"transformer.{theirs}.bias", (outputs,))]

    for i in range(p.layers):
        norm(f"blocks.{i}.attention_norm", f"h.{i}.ln_1")
        linear(f"blocks.{i}.attention.qkv", f"h.{i}.attn.c_attn", d, 3 * d)
        linear(f"blocks.{i}.attention.out", f"h.{i}.attn.c_proj", d, d)
        norm(f"blocks.{i}.mlp_norm", f"h.{i}.ln_2")
        linear(f"blocks.{i}.mlp.up", f"h.{i}.mlp.c_fc", d, p.hidden)
        linear(f"blocks.{i}.mlp.down", f"h.{i}.mlp.c_proj", p.hidden, d)
    norm("norm", "ln_f")
    if not p.tied_head:
        parts["head.weight"] = [StoredPart("lm_head.weight", (p.vocab, d))]
    return parts


def policy_of(config: Mapping[str, Any], where: str) -> GptPolicy:
    """Return the policy of the model that a ``config.json`` describes.

    Args:
        config: The content of the file.
        where: The name of the file, for errors.

    Raises:
        ConfigError: if a Gpt does not compute the same function, or the file is invalid.
    """
    family = config.get("model_type")
    readers: dict[Any, Callable[[Mapping[str, Any], str], GptPolicy]]
    readers = {
        "llama": _llama_policy,
        "mistral": _llama_policy,
        "mixtral": _mixtral_policy,
        "gpt2": _gpt2_policy,
    }
    if not isinstance(family, str) or family not in readers:
        raise ConfigError(f"{where}: model_type is {family!r:.200}; a Gpt can be a {', a '.join(readers)}")
    if config.get("quantization_config"):
        raise ConfigError(f"{where}: the weights are quantised; use the model's 16-bit or 32-bit weights")
    try:
        return readers[family](config, where)
    except KeyError as error:
        raise ConfigError(f"{where}: the key {error} of a {family} model is missing") from None
    except ConfigError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {place or family}: {first['msg'][:400]}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{where}: not the configuration of a {family} model ({str(error)[:400]})"
        ) from None


def _refuse(config: Mapping[str, Any], where: str, supported: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in supported.items():
        given = config.get(key, values[0])
        if given not in values:
            raise ConfigError(
                f"{where}: {key} is {given!r}, which a Gpt does not compute; expected {values[0]!r}"
            )


def _llama_policy(config: Mapping[str, Any], where: str) -> GptPolicy:
    _refuse(
        config, where, {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None)}
    )
    rope = _rope(config, where)
    # Up to the window's length, sliding-window attention equals plain causal attention, so cut the context to it.
    window = config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)
    context = config.get("max_position_embeddings", 2048)
    return GptPolicy(
        family="llama",
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"),
        head_size=config.get("head_dim"),
        context=min(context, window or context),
        vocab=config["vocab_size"],
        hidden=config["intermediate_size"],
        tied_head=config.get("tie_word_embeddings", False),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        **rope,
    )


def _mixtral_policy(config: Mapping[str, Any], where: str) -> GptPolicy:
    plain = _llama_policy(config, where)
    router = RouterPolicy(top_k=config.get("num_experts_per_tok", 2))
    if router.top_k == 1:
        raise ConfigError(
            f"{where}: num_experts_per_tok is 1, whose weight a Mixtral divides by itself; expected 2 or more"
        )
    return plain.model_copy(
        update={"experts": GptExperts(count=config["num_local_experts"], hidden=plain.hidden, router=router)}
    )


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = given.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"{where}: rotary positions of type {kind!r}; a Gpt has 'default' and 'llama3'")
    if kind == "default":
        return {"rope_theta": theta}
    scaling = RopeScaling(
        factor=given["factor"],
        low_freq_factor=given["low_freq_factor"],
        high_freq_factor=given["high_freq_factor"],
        original_context=given["original_max_position_embeddings"],
    )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _gpt2_policy(config: Mapping[str, Any], where: str) -> GptPolicy:
    _refuse(
        config,
        where,
        {
            "activation_function": _GELU_TANH,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    )
    return GptPolicy(
        family="gpt2",
        layers=config["n_layer"],
        width=config["n_embd"],
        heads=config["n_head"],
        context=config["n_positions"],
        vocab=config["vocab_size"],
        hidden=config.get("n_inner"),
        tied_head=config.get("tie_word_embeddings", True),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def config_of(policy: GptPolicy, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` that describes ``policy``; ``dtype`` is torch's name of the weights' dtype.

    Raises:
        ConfigError: if transformers has no model that computes the same function.
    """
    p = policy.resolved()
    if p.sliding_window is not None or p.sinks:
        given = "sinks" if p.sinks else f"sliding_window {p.sliding_window}"
        raise ConfigError(
            f"export: the model has {given}, which a llama, mixtral or gpt2 of transformers does not have; its "
            "weights can be written as a checkpoint of this package alone"
        )
    common = {
        "vocab_size": p.vocab,
        "tie_word_embeddings": p.tied_head,
        "dtype": dtype,
        # The tokens that begin and end a text depend on the tokenizer, not on the model.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if p.family == "gpt2":
        return common | _gpt2_config(p)
    if p.width % p.heads:
        raise ConfigError(
            f"export: width {p.width} does not divide by heads {p.heads}, which transformers refuses in a llama"
        )
    config: dict[str, Any] = common | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": p.layers,
        "hidden_size": p.width,
        "num_attention_heads": p.heads,
        "num_key_value_heads": p.kv_heads,
        "head_dim": p.head_size,
        "max_position_embeddings": p.context,
        "intermediate_size": p.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": p.norm_eps,
        "rope_theta": p.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
    }
    if p.experts is not None:
        config |= _mixtral_config(p.experts, p.layers)
    if p.rope_scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": p.rope_scaling.factor,
            "low_freq_factor": p.rope_scaling.low_freq_factor,
            "high_freq_factor": p.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": p.rope_scaling.original_context,
        }
    return config


def _gpt2_config(policy: GptPolicy) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": policy.layers,
        "n_embd": policy.width,
        "n_head": policy.heads,
        "n_positions": policy.context,
        "n_inner": policy.hidden,
        "activation_function": _GELU_TANH[0],
        "layer_norm_epsilon": policy.norm_eps,
        "resid_pdrop": policy.dropout,
        "embd_pdrop": policy.dropout,
        "attn_pdrop": 0.0,
    }


def _mixtral_config(experts: GptExperts, layers: int) -> dict[str, Any]:
    """Return the keys that a Mixtral's configuration adds or changes.

    Raises:
        ConfigError: if a Mixtral would compute another function.
    """
    router = experts.router
    differs = {
        "experts.shared": experts.shared == 0,
        "experts.first, experts.every": all(experts.in_block(i) for i in range(layers)),
        "experts.router.score": router.score == "softmax",
        "experts.router.normalize": router.normalizes,
        "experts.router.scale": router.scale == 1,
        "experts.router.top_groups": router.top_groups in (None, router.groups),
        "experts.router.capacity": router.capacity is None,
        "experts.router.balance: bias": router.balance != "bias",
    }
    wrong = [key for key, is_alike in differs.items() if not is_alike]
    if wrong:
        raise ConfigError(
            "export: a Mixtral has experts in every block, none shared, two or more for a token by softmax with "
            f"weights that add up to 1, and no limit or bias; here {', '.join(wrong)} say otherwise"
        )
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": experts.hidden,
        "num_local_experts": experts.count,
        "num_experts_per_tok": router.top_k,
        "router_aux_loss_coef": router.balance_weight if router.balance == "loss" else 0.0,
        "sliding_window": None,
    }
