"""Generation of tokens: a prefill of the prompt, then one token at a time with a key-value cache.

    p(token) = softmax(logits / temperature) among the top_k largest, and among the likeliest of these whose sum of p
               reaches top_p (arXiv:1904.09751)
    token    = the first whose cumulated p exceeds u,  u = uniform(key_of(seed, "generate"), step·B + row)

Tokens are chosen on the device of the logits and are not copied to the host; u comes from the counter-based generator
on the CPU, B numbers per token. The same seed gives the same text on every rank, so ranks that share a model choose
the same token without communication. Temperature 0 takes the largest logit.

[Note: sliding] If the context is full, the window restarts with the latest half of it and is prefilled again. Cached
keys cannot be shifted instead: they contain positions, and the tokens from which they were computed have left the
window. One prefill of half a context in every half context costs less than a forward pass of the whole window for
every token, and the text is a function of the tokens only: the loop without a cache generates the same text.

Cost: one forward pass of one token each, beside the prefills.
Shapes: B batch, T tokens so far, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.kernels import philox
from shardwise.memory.streams import to_device
from shardwise.models.cache import KeyValueCache


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
    """Generate ``max_new_tokens`` tokens after ``tokens``.

    Args:
        model: The model, called as ``model(tokens, cache=cache)``. A module in training mode is in evaluation mode
            during the generation, which switches dropout off.
        tokens: The prompt, [B, T].
        max_new_tokens: The number of tokens to generate.
        temperature: The divisor of the logits; 0 takes the likeliest token.
        top_k: The number of likeliest tokens to draw from; None: all.
        seed: The seed of the random numbers.
        top_p: The sum of probabilities of the likeliest tokens to draw from; None: all.
        context: The largest number of tokens of a forward pass; None: the model's ``policy.context``.
        cached: False to compute the whole window for every token.

    Returns:
        The prompt and the generated tokens, [B, T + max_new_tokens].

    Raises:
        UsageError: if an argument is invalid, or the context is unknown.
    """
    _check(tokens, max_new_tokens, temperature, top_k, top_p)
    context = _context_of(model) if context is None else context
    cache = KeyValueCache(context)
    start = 0
    with _evaluating(model):
        for step in range(max_new_tokens):
            stop = tokens.shape[1]
            if stop - start > context:  # [Note: sliding]
                start = stop - max(1, context // 2)
                cache.clear()
            if cached:
                logits = model(tokens[:, start + cache.length :], cache=cache)[:, -1]
                # A pipeline's model sets the length only on the last stage, so set it on every rank.
                cache.length = stop - start
            else:
                logits = model(tokens[:, start:])[:, -1]
            chosen = choose(logits, temperature, top_k, seed, step, top_p)
            tokens = torch.cat([tokens, chosen[:, None].to(tokens.device)], 1)
    return tokens


def choose(
    logits: Tensor, temperature: float, top_k: int | None, seed: int, step: int, top_p: float | None = None
) -> Tensor:
    """Choose one token for each row of ``logits`` [B, V], on the device of the logits, and return the tokens: [B].

    Args:
        logits: [B, V].
        temperature: The divisor of the logits; 0 takes the likeliest token.
        top_k: The number of likeliest tokens to draw from; None: all.
        seed: The seed of the random numbers.
        step: The number of tokens generated before.
        top_p: The sum of probabilities of the likeliest tokens to draw from; None: all.
    """
    wide = logits.detach().to(torch.float64)
    if temperature == 0:
        return wide.argmax(-1)
    if top_k is not None and top_k < wide.shape[-1]:
        least = wide.topk(top_k).values[:, -1:]
        wide = wide.masked_fill(wide < least, float("-inf"))
    p = (wide / temperature).softmax(-1)  # [B, V]
    if top_p is not None:
        falling, order = p.sort(dim=-1, descending=True, stable=True)
        before = _cumulated(falling) - falling  # the sum of the likelier tokens, without the token itself
        p = p.scatter(-1, order, falling.where(before < top_p, 0.0))
    cumulated = _cumulated(p)
    rows = len(wide)
    u = philox.uniform(philox.key_of(seed, "generate"), step * rows, (step + 1) * rows)[:, None]
    u = to_device(u, wide.device)
    # Scale u by the last sum, which rounding may leave below 1: else u could exceed the sum of all tokens.
    return torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True)[:, 0].clamp_(
        max=wide.shape[1] - 1
    )


def _cumulated(p: Tensor) -> Tensor:
    """Return the sums of ``p`` [B, V] up to each token, with the same bits on every rank.

    An accelerator adds floats in the order in which its blocks finish. The probabilities are therefore rounded to
    integer multiples of 2^-52 first, whose sum has the same bits in any order, so that ranks choose the same token.
    """
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
    """Run the model in evaluation mode, and restore the training mode afterwards if the model is a module."""
    if not isinstance(model, nn.Module) or not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
