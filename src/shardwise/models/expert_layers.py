"""Mixtures of experts of transformers' models as ours, and back: one layer, by its configuration and its weights.

    layer = expert_layer(config)                                    Mixtral, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3
    layer.load_state_dict(import_layer(tensors, "model.layers.3.mlp."))
    tensors = export_layer(layer.state_dict(), "deepseek", "model.layers.3.mlp.")

    ours                    files                                            which
    router.weight           gate.weight
    router.bias             gate.e_score_correction_bias                     DeepSeek-V3
    experts.gate_up[e]      experts.e.{w1, w3}.weight                        Mixtral
                            experts.e.{gate_proj, up_proj}.weight            the others
    experts.down[e]         experts.e.{w2, down_proj}.weight
    shared.gate_up.weight   shared_experts.{gate_proj, up_proj}.weight       DeepSeek
    shared.down.weight      shared_experts.down_proj.weight                  DeepSeek

Modules of transformers 5 have stacks, ``experts.gate_up_proj`` and ``experts.down_proj``, which are read too.

A configuration is accepted only where our layer computes the same function. A whole Mixtral is read and written by
``models.huggingface``; a DeepSeek has an attention that a Gpt has not, so its layers come one by one.

Cost: a copy of the layer's weights.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.plan.errors import ConfigError, MismatchError

Naming = Literal["mixtral", "deepseek"]
"""How files name the matrices of an expert; Qwen's do as DeepSeek's."""

_LEAVES: dict[Naming, tuple[str, str, str]] = {
    "mixtral": ("w1", "w3", "w2"),
    "deepseek": ("gate_proj", "up_proj", "down_proj"),
}
"""Gate, up, down."""


def expert_layer(config: Mapping[str, Any]) -> MixtureOfExperts:
    """The layer that a ``config.json`` describes, with start weights.

    Errors: ConfigError for other models, and for keys that ours does not compute.
    """
    readers: dict[Any, Callable[[Mapping[str, Any]], MixtureOfExperts]] = {
        "mixtral": _mixtral,
        "qwen3_moe": _qwen3,
        "deepseek_v2": _deepseek_v2,
        "deepseek_v3": _deepseek_v3,
    }
    family = config.get("model_type")
    if family not in readers:
        raise ConfigError(f"model_type is {family!r:.200}; expected one of {', '.join(readers)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"{family}: hidden_act is {config['hidden_act']!r:.200}; experts here are gated by silu"
        )
    try:
        return readers[family](config)
    except KeyError as error:
        raise ConfigError(f"{family}: the key {error} is missing") from None
    except ValidationError as error:
        raise ConfigError(f"{family}: {error.errors()[0]['msg']}") from None


def _mixtral(config: Mapping[str, Any]) -> MixtureOfExperts:
    if config.get("router_jitter_noise"):
        raise ConfigError(
            f"mixtral: router_jitter_noise is {config['router_jitter_noise']}, which moves what experts read too; "
            "expected 0"
        )
    router = RouterPolicy(top_k=config["num_experts_per_tok"], normalize=True)
    return _made(config, "intermediate_size", "num_local_experts", router)


def _qwen3(config: Mapping[str, Any]) -> MixtureOfExperts:
    router = RouterPolicy(top_k=config["num_experts_per_tok"], normalize=config.get("norm_topk_prob", False))
    count = "num_experts" if "num_experts" in config else "num_local_experts"
    return _made(config, "moe_intermediate_size", count, router)


def _deepseek_v2(config: Mapping[str, Any]) -> MixtureOfExperts:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy") or config.get("norm_topk_prob"):
        raise ConfigError(
            f"deepseek_v2: topk_method is {method!r:.200}, norm_topk_prob {config.get('norm_topk_prob')!r:.200}; "
            "expected 'greedy' or 'group_limited_greedy', and false"
        )
    groups = {"groups": config["n_group"], "top_groups": config["topk_group"]} if method != "greedy" else {}
    router = RouterPolicy(
        top_k=config["num_experts_per_tok"],
        normalize=False,
        scale=config.get("routed_scaling_factor", 1.0),
        **groups,
    )
    return _made(config, "moe_intermediate_size", "n_routed_experts", router, config.get("n_shared_experts"))


def _deepseek_v3(config: Mapping[str, Any]) -> MixtureOfExperts:
    router = RouterPolicy(
        top_k=config["num_experts_per_tok"],
        score="sigmoid",
        normalize=config.get("norm_topk_prob", True),
        scale=config.get("routed_scaling_factor", 1.0),
        groups=config["n_group"],
        top_groups=config["topk_group"],
        balance="bias",
    )
    return _made(config, "moe_intermediate_size", "n_routed_experts", router, config.get("n_shared_experts"))


def _made(
    config: Mapping[str, Any], hidden: str, experts: str, router: RouterPolicy, shared: int | None = None
) -> MixtureOfExperts:
    return MixtureOfExperts(
        config["hidden_size"], config[hidden], config[experts], router, shared=shared or 0
    )


def import_layer(stored: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Our names for the weights of one layer, of a file or of a module of transformers: those under ``prefix``.

    Errors: MismatchError where one is missing or unknown.
    """
    left = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}

    def take(*names: str) -> Tensor:
        if missing := [name for name in names if name not in left]:
            raise MismatchError(f"experts: {prefix}{missing[0]} is missing among the weights of the layer")
        parts = [left.pop(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    ours = {"router.weight": take("gate.weight")}
    if "gate.e_score_correction_bias" in left:
        ours["router.bias"] = take("gate.e_score_correction_bias")
    if "experts.gate_up_proj" in left:
        ours |= {"experts.gate_up": take("experts.gate_up_proj"), "experts.down": take("experts.down_proj")}
    else:
        gate, up, down = _LEAVES["mixtral" if "experts.0.w1.weight" in left else "deepseek"]
        each = [f"experts.{e}" for e in range(len(ours["router.weight"]))]
        ours |= {
            "experts.gate_up": torch.stack([take(f"{e}.{gate}.weight", f"{e}.{up}.weight") for e in each]),
            "experts.down": torch.stack([take(f"{e}.{down}.weight") for e in each]),
        }
    if any(name.startswith("shared_experts.") for name in left):
        gate, up, down = (f"shared_experts.{leaf}.weight" for leaf in _LEAVES["deepseek"])
        ours |= {"shared.gate_up.weight": take(gate, up), "shared.down.weight": take(down)}
    if left:
        raise MismatchError(f"experts: {prefix}{min(left)} has no place in a MixtureOfExperts")
    return ours


def export_layer(state: Mapping[str, Tensor], naming: Naming, prefix: str = "") -> dict[str, Tensor]:
    """The names of files for the weights of one of our layers, each under ``prefix``.

    Errors: MismatchError for weights that no such file has.
    """
    gate, up, down = _LEAVES[naming]
    left = dict(state)
    theirs = {"gate.weight": left.pop("router.weight")}
    for e, (gate_up, back) in enumerate(
        zip(left.pop("experts.gate_up"), left.pop("experts.down"), strict=True)
    ):
        halves = zip((gate, up), gate_up.chunk(2), strict=True)
        theirs |= {f"experts.{e}.{leaf}.weight": half for leaf, half in halves}
        theirs[f"experts.{e}.{down}.weight"] = back
    if naming == "deepseek":
        if "router.bias" in left:
            theirs["gate.e_score_correction_bias"] = left.pop("router.bias")
        if "shared.down.weight" in left:
            halves = zip((gate, up), left.pop("shared.gate_up.weight").chunk(2), strict=True)
            theirs |= {f"shared_experts.{leaf}.weight": half for leaf, half in halves}
            theirs[f"shared_experts.{down}.weight"] = left.pop("shared.down.weight")
    if left:
        raise MismatchError(f"experts: {min(left)} has no name in a file of the family {naming}")
    return {f"{prefix}{name}": tensor.contiguous() for name, tensor in theirs.items()}
