"""Balance: what spreads tokens over the experts, without a word to the loss.

Of a sequence of n tokens, with p_te the scores of token t made shares of 1, before any drop:

    f_e    = (pairs that chose e) / (k·n)                        P_e = mean over its tokens of p_te
    loss   : balance_weight · E · Σ_e f_e P_e                    1 · balance_weight where all is even
    ... over the batch: f_e of all pairs of the step before, P_e over all tokens of this one
    z      : z_weight · mean over its tokens of logsumexp(l_t)²  keeps logits small
    bias   : b_e += bias_rate · sign(mean load - load_e)         once a step; b_e is added to scores in the choice alone

Sequences weigh as in the loss: by their labels where these are given, otherwise by their tokens. A microbatch weighs by
its labels too, so the terms of a batch do not depend on how it is cut. f is a count and has no gradient: the loss is
linear in the scores of each token, and ranks that share a sequence each add their tokens' part.
No term is added to the loss that a model returns: its gradient is injected where the router is, with the factor that
the loss of the microbatch is multiplied by, in any stage of a pipeline.

Papers: Lepikhin et al. 2020 (GShard), arXiv:2006.16668, and Fedus et al. 2021 (Switch), arXiv:2101.03961: the loss over
        a batch; DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437: over each sequence; Zoph et al. 2022 (ST-MoE),
        arXiv:2202.08906: z; Wang et al. 2024, arXiv:2408.15664: the bias.
Cost:   a few operations on [n, E]; [B, E] counts summed over the ranks that share sequences.
Shapes: B sequences, n tokens here, E experts, k experts of a token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.parallel.expert.policy import RouterPolicy


def pair_counts(index: Tensor, sequence: Tensor, sequences: int, experts: int) -> Tensor:
    """How many tokens of each sequence chose each expert; an index of -1 counts nowhere: [n, k], [n] -> [B, E]."""
    pairs = torch.where(index < 0, sequences * experts, sequence[:, None] * experts + index)
    counts = torch.zeros(sequences * experts + 1, dtype=torch.int64, device=index.device)
    ones = torch.ones((), dtype=torch.int64, device=index.device).expand(pairs.numel())
    return counts.scatter_add_(0, pairs.view(-1), ones)[:-1].view(sequences, experts)


def term(
    policy: RouterPolicy,
    shares: Tensor,
    logits: Tensor,
    counts: Tensor,
    sequence: Tensor,
    counted: Tensor | None,
    loads: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    """What the tokens here add to balance and z: ``shares``, ``logits`` [n, E], whole ``counts`` [B, E], ``loads`` [E]
    of the step before where it is over the batch, ``labels`` [B] that sequences weigh by -> []."""
    pairs = counts.sum(-1)  # [B], k · n_b
    each_token = _of_each_token(pairs.double() / policy.top_k, labels)[:, None]  # [B, 1]
    value = logits.new_zeros(())
    if policy.balance == "loss":
        f = (
            counts.double() / pairs.clamp_min(1)[:, None]
            if loads is None
            else loads.double().expand_as(counts)
        )
        factors = f * (counts.shape[1] * each_token)  # [B, E]
        each = (factors.to(shares.dtype)[sequence] * shares).sum(-1)
        value = value + policy.balance_weight * _sum(each, counted)
    if policy.z_weight:
        squares = logits.logsumexp(-1).square()
        value = value + policy.z_weight * _sum(squares * each_token[sequence, 0].to(squares.dtype), counted)
    return value


def _of_each_token(tokens: Tensor, labels: Tensor | None) -> Tensor:
    """What a token counts in the sum over a microbatch: its sequence's share, of which it is one of n_b. ``tokens`` [B]
    of each sequence -> [B]."""
    if labels is None:
        return (1 / tokens.sum().clamp_min(1)).expand_as(tokens)
    wanted = labels.to(tokens)
    return wanted / wanted.sum().clamp_min(1) / tokens.clamp_min(1)


def _sum(each: Tensor, counted: Tensor | None) -> Tensor:
    return (each if counted is None else each.masked_fill(~counted, 0)).sum()


def inject(x: Tensor, value: Tensor, scale: Callable[[], float | Tensor]) -> Tensor:
    """``x``; where a gradient comes back through it, ``value`` gets the gradient ``scale()``, asked for then."""
    return _Inject.apply(x, value, scale)


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, scale: Callable[[], float | Tensor]) -> Tensor:
        ctx.scale, ctx.like = scale, (value.dtype, value.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (dtype, device), scale = ctx.like, ctx.scale()
        known = isinstance(scale, float)
        return (
            grad,
            torch.full((), scale, dtype=dtype, device=device) if known else scale.to(device, dtype),
            None,
        )


@torch.no_grad()
def note_loads(loads: Tensor, routed: Tensor) -> None:
    """``loads`` [E] become the shares of a step's ``routed`` [E] pairs, in place; where there are none they stay."""
    if int(routed.sum()):
        loads.copy_(routed / routed.sum())


@torch.no_grad()
def move_bias(bias: Tensor, routed: Tensor, rate: float) -> None:
    """One step of ``bias`` [E], in place, after a step in which ``routed`` [E] pairs chose each expert."""
    short = routed.sum() - len(routed) * routed  # in integers: what is even stays where it is
    bias.add_(short.sign().to(bias.dtype), alpha=rate)
