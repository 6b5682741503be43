"""Attention of transformers' models over the ranks of context parallelism, through transformers' own interface.

A model of transformers calls the attention function that its configuration names, with everything that its layer knows:
scale, window, sinks. So one function, registered under one name, serves all models that use the interface. What it does
not know is refused by name, because an argument that is ignored gives wrong numbers.

    causal language models shift their labels inside the loss; a cut needs labels that are shifted before it, which the
    loss takes as ``shift_labels``

    a loss of routers (``output_router_logits``) is a product of sums over all tokens of a microbatch; so the base model
    gives it the logits of all ranks, joined, and every rank computes the same loss. The ranks' weights add up to 1, and
    with them the loss and, in the backward pass of the join, its gradients

A pass that is not cut (predictions, generation) uses torch's fused attention with transformers' own masks.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.comm.duals import uncompiled
from shardwise.parallel.context.attention import context_attention
from shardwise.parallel.context.choice import AttentionLayer
from shardwise.parallel.context.region import ContextRegion

NAME = "shardwise_context"
"""Name of the attention function in a model's configuration."""
_HOLDER = "context_attention"
"""Attribute of an attention module that has its exchange."""
_KNOWN = {
    "position_ids",
    "use_cache",
    "is_causal",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "shift_labels",
}
"""Arguments that change nothing here: positions are in the queries and keys, and labels belong to the loss."""


_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Types of layers of transformers in which a token sees all earlier ones, or the last of them."""


class ForeignLayer:
    """One attention layer of a model of transformers.

    Args:
        region: The state of the running pass.
        name: Name of the layer.
    """

    def __init__(self, region: ContextRegion, name: str) -> None:
        self.region = region
        self.name = name


def takes_interface(model: nn.Module) -> bool:
    """Return whether a model calls its attention through transformers' interface, and computes a causal loss."""
    config = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return False
    named = getattr(getattr(model, "loss_function", None), "__name__", "")
    return named == "ForCausalLMLoss" and bool(getattr(type(model), "_supports_attention_backend", False))


def other_mixing(model: nn.Module) -> str:
    """Return what mixes tokens in a model of transformers beside causal attention, in words; "" if nothing is known."""
    config: Any = model.config
    others = sorted({*(getattr(config, "layer_types", None) or ())} - _LAYER_TYPES)
    if others:
        return f"layers of the type {', '.join(others)}"
    if not getattr(config, "is_causal", True):
        return "attention to later tokens"
    mixing = (nn.Conv1d, nn.Conv2d, nn.RNNBase)
    return next(
        (
            f"{name} ({type(each).__name__})"
            for name, each in model.named_modules()
            if isinstance(each, mixing)
        ),
        "",
    )


def layer_of(module: nn.Module) -> AttentionLayer | None:
    """Return the sizes of an attention layer of a model of transformers, or None if its configuration lacks them."""
    config: Any = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = (
        getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    )
    shared = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    return AttentionLayer(heads, kv_heads, size, getattr(module, "sliding_window", shared))


def cut_foreign_attention(model: nn.Module, region: ContextRegion) -> None:
    """Let the attention layers of a model of transformers exchange keys.

    Every module gets a copy of its configuration that names the attention function, because a configuration may be
    shared with other models.
    """
    _register()
    for name, module in model.named_modules():
        if hasattr(module, "is_causal"):
            setattr(module, _HOLDER, ForeignLayer(region, name))
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                copies[id(config)]._attn_implementation = NAME
            module.config = copies[id(config)]
    region.shifts = True
    _join_router_logits(model, region)


def _join_router_logits(model: Any, region: ContextRegion) -> None:
    """Let a loss of routers count the tokens of all ranks."""
    base = getattr(model, "base_model", model)
    if base is model:
        return

    def joined(module: nn.Module, args: Any, output: Any) -> Any:
        logits = getattr(output, "router_logits", None)
        if region.is_running and isinstance(logits, tuple | list) and logits:
            output["router_logits"] = region.join_rows(logits)
        return output

    base.register_forward_hook(joined)
    region.has_router_loss = bool(getattr(model.config, "output_router_logits", False))


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    if NAME in ALL_ATTENTION_FUNCTIONS:
        return
    whole: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    mask_of: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        found: tuple[Tensor, None] = _attend(module, whole, *args, **kwargs)
        return found

    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if ContextRegion.is_cutting else mask_of(*args, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@uncompiled
def _attend(
    module: nn.Module,
    whole: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> Any:
    """Return the attention of one layer [B, t, H, K], and None in place of its weights."""
    layer: ForeignLayer | None = getattr(module, _HOLDER, None)
    if layer is None and ContextRegion.is_cutting:
        raise UsageError(
            f"mesh.cp: {type(module).__name__} does not say whether it is causal (is_causal), so its exchange of keys "
            "is not known; set mesh.cp: 1"
        )
    site = None if layer is None else layer.region.site(layer.name, sliding_window)
    if site is None:
        return whole(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, s_aux=s_aux, **more
        )
    asked = {name for name, given in more.items() if given is not None and given is not False}
    unknown = sorted(asked - _KNOWN)
    if dropout:
        unknown.append("dropout")
    if unknown or more.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UsageError(
            f"mesh.cp: attention {site.name!r} of {type(module).__name__} is asked for "
            f"{', '.join(unknown) or 'attention to later tokens'}, which no exchange of keys along cp has; set "
            "mesh.cp: 1"
        )
    size = query.shape[-1]
    scale = size**-0.5 if scaling is None else scaling
    out = context_attention(query * (scale * size**0.5), key, value, s_aux, site)
    return out.transpose(1, 2).contiguous(), None
