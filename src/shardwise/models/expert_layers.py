"""Import and export of a single mixture-of-experts layer of transformers' models, by its configuration and weights.

    layer = expert_layer(config)                                    Mixtral, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3
    layer.load_state_dict(import_layer(tensors, "model.layers.3.mlp."))
    tensors = export_layer(layer.state_dict(), "deepseek", "model.layers.3.mlp.")

    MixtureOfExperts        files                                            models
    router.weight           gate.weight
    router.bias             gate.e_score_correction_bias                     DeepSeek-V3
    experts.gate_up[e]      experts.e.{w1, w3}.weight                        Mixtral
                            experts.e.{gate_proj, up_proj}.weight            the others
    experts.down[e]         experts.e.{w2, down_proj}.weight
    shared.gate_up.weight   shared_experts.{gate_proj, up_proj}.weight       DeepSeek
    shared.down.weight      shared_experts.down_proj.weight                  DeepSeek

Modules of transformers 5 have stacks, ``experts.gate_up_proj`` and ``experts.down_proj``, which are read too.

A configuration is accepted only if a MixtureOfExperts computes the same function. ``models.huggingface`` reads and
writes a whole Mixtral; a DeepSeek has an attention that a Gpt lacks, so only its single layers are supported.

Cost: a copy of the layer's weights.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from shardwise.base.errors import ConfigError, MismatchError
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.policy import RouterPolicy

Naming = Literal["mixtral", "deepseek"]
"""The names of an expert's matrices in files; Qwen's files use DeepSeek's names."""

_LEAVES: dict[Naming, tuple[str, str, str]] = {
    "mixtral": ("w1", "w3", "w2"),
    "deepseek": ("gate_proj", "up_proj", "down_proj"),
}
"""The names of the gate, up and down matrices."""


def expert_layer(config: Mapping[str, Any]) -> MixtureOfExperts:
    """Build the layer that a ``config.json`` describes, with initial weights.

    Args:
        config: The content of the file.

    Raises:
        ConfigError: for other models, and for keys whose function a MixtureOfExperts does not compute.
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
    """Return the weights of one layer under the names of a MixtureOfExperts.

    Args:
        stored: Tensors of a file, or of a module of transformers.
        prefix: The prefix of the layer's names; other tensors are ignored.

    Raises:
        MismatchError: if a weight is missing or unknown.
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
    """Return the weights of a MixtureOfExperts under the names of files.

    Args:
        state: The layer's state dict.
        naming: The family whose names the file uses.
        prefix: The prefix of the names.

    Raises:
        MismatchError: if files of the family have no name for a weight.
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
