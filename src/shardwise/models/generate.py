"""Continues token sequences: a prefill of the prompt, then one token at a time through a key-value cache.

    p(token) = softmax(logits / temperature) among the top_k largest, and of these among the likeliest whose p together
               reach top_p (arXiv:1904.09751)
    token    = the first whose cumulated p exceeds u,  u = uniform(key_of(seed, "generate"), step·B + row)

Tokens are chosen where the logits lie, and never read; u comes from the counter-based generator on the CPU, B numbers a
token. The same seed gives the same text on every rank, so ranks that hold the model together choose the same token and
need not tell one another. Temperature 0 takes the largest.

[Note: sliding] When the context is full, the window restarts with the latest half of it and is prefilled again.
Cached keys cannot be shifted instead: they hold positions, and what they were computed from has left the window. One
prefill of half a context in every half context costs less than a forward pass of the whole window for every token,
and the text is a function of the tokens alone: the loop without a cache gives the same.

Cost: one forward pass of one token each, beside the prefills.
Shapes: B batch, T tokens so far, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels import philox
from shardwise.memory.streams import to_device
from shardwise.models.cache import Cache
from shardwise.plan.errors import UsageError


@torch.no_grad()
def generate(
    model: Callable[..., Tensor],
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    *,
    top_p: float | None = None,
    context: int | None = None,
    cached: bool = True,
) -> Tensor:
    """``tokens`` [B, T] and ``max_new_tokens`` more: [B, T + max_new_tokens].

    ``model`` is called as ``model(tokens, cache=cache)``, and never otherwise touched but to switch dropout off;
    ``context`` is its ``policy.context`` unless given. ``cached=False`` computes the window anew for every token.
    """
    _check(tokens, max_new_tokens, temperature, top_k, top_p)
    context = _context_of(model) if context is None else context
    cache = Cache(context)
    start = 0
    with _evaluating(model):
        for step in range(max_new_tokens):
            stop = tokens.shape[1]
            if stop - start > context:  # [Note: sliding]
                start = stop - max(1, context // 2)
                cache.clear()
            if cached:
                logits = model(tokens[:, start + cache.length :], cache=cache)[:, -1]
                cache.length = (
                    stop - start
                )  # of a pipeline, the last stage alone comes to where the model counts
            else:
                logits = model(tokens[:, start:])[:, -1]
            chosen = choose(logits, temperature, top_k, seed, step, top_p)
            tokens = torch.cat([tokens, chosen[:, None].to(tokens.device)], 1)
    return tokens


def choose(
    logits: Tensor, temperature: float, top_k: int | None, seed: int, step: int, top_p: float | None = None
) -> Tensor:
    """One token for each row of ``logits`` [B, V], where they lie: [B]."""
    wide = logits.detach().to(torch.float64)
    if temperature == 0:
        return wide.argmax(-1)
    if top_k is not None and top_k < wide.shape[-1]:
        least = wide.topk(top_k).values[:, -1:]
        wide = wide.masked_fill(wide < least, float("-inf"))
    p = (wide / temperature).softmax(-1)  # [B, V]
    if top_p is not None:
        falling, order = p.sort(dim=-1, descending=True, stable=True)
        before = _cumulated(falling) - falling  # what the likelier ones reach without it
        p = p.scatter(-1, order, falling.where(before < top_p, 0.0))
    cumulated = _cumulated(p)
    rows = len(wide)
    u = philox.uniform(philox.key_of(seed, "generate"), step * rows, (step + 1) * rows)[:, None]
    u = to_device(u, wide.device)
    # Scaled by the last sum, which rounding may leave below 1: else u could lie beyond every token.
    return torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True)[:, 0].clamp_(
        max=wide.shape[1] - 1
    )


def _cumulated(p: Tensor) -> Tensor:
    """Sums of ``p`` [B, V] up to each token. A device adds floats in whatever order its blocks finish; there they are
    whole steps of 2^-52 first, whose sum has the same bits in any order, so that ranks choose alike."""
    if p.device.type == "cpu":
        return p.cumsum(-1)
    return (p * 2.0**52).round().long().cumsum(-1).double() * 2.0**-52


def _check(
    tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise UsageError(
            f"generate: tokens have shape {list(tokens.shape)}; expected [batch, at least one token]"
        )
    if max_new_tokens < 0:
        raise UsageError(f"generate: max_new_tokens is {max_new_tokens}; expected 0 or more")
    if temperature < 0:
        raise UsageError(f"generate: temperature is {temperature}; expected 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise UsageError(f"generate: top_k is {top_k}; expected at least 1, or none")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"generate: top_p is {top_p}; expected above 0 and at most 1, or none")


def _context_of(model: Any) -> int:
    policy = getattr(model, "policy", None)
    if policy is None:
        raise UsageError(
            f"generate: a {type(model).__name__} has no policy to read the context from; give context="
        )
    return int(policy.context)


@contextmanager
def _evaluating(model: object) -> Iterator[None]:
    """Without dropout, where the model is a module that has a mode to restore."""
    if not isinstance(model, nn.Module) or not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
