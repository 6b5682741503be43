"""Attention that a model computes by ``F.scaled_dot_product_attention``, over the ranks of context parallelism.

A model that is neither one of ours nor one of transformers has no attention function that could be replaced. But nearly
all of them call one function of torch. While a cut pass runs, a mode of torch sees that call and computes the attention
of this rank's queries to the keys of all ranks in its place:

    call                                                  in a cut pass
    scaled_dot_product_attention(q, k, v, is_causal=True) served, with scale and enable_gqa
    the same with a mask, dropout or without is_causal    refused by name
    multi_head_attention_forward, convolutions            refused by name
    none of them                                          refused: tokens would not see those of other ranks

What mixes tokens in another way (a product of matrices, a cumulative sum) is not seen here; the check of the first step
compares the gradients with those of the uncut model.

Cost:   a call of Python for every function of torch in the model's passes.
Shapes: B sequences, H heads, N key and value heads, t tokens of this rank, K head size.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.base.errors import UsageError
from shardwise.comm.duals import uncompiled
from shardwise.parallel.context.attention import context_attention
from shardwise.parallel.context.region import TOKENS, ContextRegion, FunctionCalls
from shardwise.passes.replay import DrawReplay

_POSITIONS = ("positions", "position_ids")
_MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
"""Modules that mix tokens in another way than causal attention."""
_REFUSED: dict[Any, str] = {
    F.multi_head_attention_forward: "nn.MultiheadAttention",
    F.conv1d: "a convolution",
    F.conv2d: "a convolution",
    F.conv3d: "a convolution",
}


def check_model(model: nn.Module) -> str:
    """Return why no cut of sequences fits a model, in words; "" if one may."""
    name, taken = type(model).__name__, inspect.signature(model.forward).parameters
    if not any(each in taken for each in TOKENS):
        return f"the forward of {name} has no argument {' or '.join(TOKENS)}, so there is no sequence of tokens to cut"
    for path, module in model.named_modules():
        if isinstance(module, _MIXING):
            return (
                f"{path} ({type(module).__name__}) mixes tokens in another way than "
                "F.scaled_dot_product_attention(is_causal=True)"
            )
    if not any(each in taken for each in _POSITIONS):
        return (
            f"the forward of {name} has no argument 'positions' [T] or 'position_ids' [B, T], so it would take the "
            "tokens of a part for the first ones"
        )
    return ""


def cut_functions(model: nn.Module, region: ContextRegion, replay: DrawReplay) -> None:
    """Let a model's calls of ``F.scaled_dot_product_attention`` exchange keys in every cut pass.

    Args:
        model: The whole model, for which ``check_model`` returned no reason.
        region: The state of its passes.
        replay: The contexts around passes and the pieces of them that run again.
    """
    taken = inspect.signature(model.forward).parameters
    region.functions = FunctionCalls(tuple(each for each in _POSITIONS if each in taken))
    inside = replay.inside

    def both() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(inside())
        stack.enter_context(_AttentionCalls(region))
        return stack

    replay.inside = both


class _AttentionCalls(TorchFunctionMode):
    """A mode of torch that computes attention over all ranks in a cut pass."""

    def __init__(self, region: ContextRegion) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return _attend(self._region, function, *args, **kwargs)
        if function in _REFUSED and self._region.cut is not None:
            raise UsageError(
                f"mesh.cp: the model calls {_REFUSED[function]}, which mixes tokens in another way than "
                "F.scaled_dot_product_attention(is_causal=True), so those of other ranks would be missing; set "
                "mesh.cp: 1"
            )
        return function(*args, **kwargs)


@uncompiled
def _attend(
    region: ContextRegion,
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """Return the attention of queries [B, H, t, K] to keys and values [B, N, t, K] of all ranks: [B, H, t, K]."""
    scale, has_groups = more.pop("scale", None), more.pop("enable_gqa", False)
    site = region.site("scaled_dot_product_attention")
    if site is None:
        return function(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=has_groups, **more
        )
    if region.functions is not None:
        region.functions.count += 1
    tokens = sum(stop - start for start, stop in region.tokens() or ())
    asked = {
        "attn_mask": attn_mask is not None,
        f"dropout_p={dropout_p:g}": dropout_p > 0,
        "is_causal=False": not is_causal,
        f"keys of the shape {list(key.shape)}": key.dim() != 4
        or {query.shape[-2], key.shape[-2]} != {tokens},
        ", ".join(more): bool(more),
    }
    if any(asked.values()):
        raise UsageError(
            f"mesh.cp: F.scaled_dot_product_attention was called with "
            f"{' and '.join(name for name, is_asked in asked.items() if is_asked)} for {tokens} tokens of this rank; "
            "expected queries and keys [B, H, T, K] of the same tokens with is_causal=True alone, because no other "
            "attention exchanges keys along cp; set mesh.cp: 1"
        )
    size = query.shape[-1]
    factor = 1.0 if scale is None else scale * size**0.5
    return context_attention(query * factor, key, value, None, site)
