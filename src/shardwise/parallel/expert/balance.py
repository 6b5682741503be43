"""Balance: terms and biases that spread tokens over the experts, without a change of the model's loss.

For a sequence of n tokens, with p_te the scores of token t divided by their sum, before any drop:

    f_e    = (pairs that chose e) / (k·n)                        P_e = mean over its tokens of p_te
    loss   : balance_weight · E · Σ_e f_e P_e                    1 · balance_weight if all loads are even
             ... over the batch: f_e of all pairs of the step before, P_e over all tokens of this one
    z      : z_weight · mean over its tokens of logsumexp(l_t)²  keeps logits small
    bias   : b_e += bias_rate · sign(mean load - load_e)         once a step; b_e is added to scores in the choice only

Sequences have the weights that they have in the loss: their labels if these are given, otherwise their tokens. A
microbatch is weighted by its labels too, so the terms of a batch do not depend on how it is cut. f is a count and has
no gradient: the loss is linear in the scores of each token, and ranks that share a sequence each add their tokens'
part. No term is added to the loss that a model returns. The gradient of the term is injected at the router, with the
factor that multiplies the loss of the microbatch, in any stage of a pipeline.

Papers: Lepikhin et al. 2020 (GShard), arXiv:2006.16668, and Fedus et al. 2021 (Switch), arXiv:2101.03961: the loss over
        a batch; DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437: over each sequence; Zoph et al. 2022 (ST-MoE),
        arXiv:2202.08906: z; Wang et al. 2024, arXiv:2408.15664: the bias.
Cost:   a few operations on [n, E]; [B, E] counts summed over the ranks that share sequences.
Shapes: B sequences, n tokens of this rank, E experts, k experts of a token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.parallel.expert.policy import RouterPolicy


def pair_counts(index: Tensor, sequence: Tensor, sequences: int, experts: int) -> Tensor:
    """Return how many tokens of each sequence chose each expert: [n, k], [n] -> [B, E].

    An index of -1 counts nowhere.
    """
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
    """Return the addend of this rank's tokens to balance and z: [].

    Args:
        policy: the rule of the router.
        shares: scores of the tokens divided by their sums, [n, E].
        logits: logits of the tokens, [n, E].
        counts: pairs of each expert in whole sequences, [B, E].
        sequence: sequence of each token, [n].
        counted: tokens that count, [n]; None counts all.
        loads: shares of the experts in the pairs of the step before, [E], for a balance over the batch; else None.
        labels: weight of each sequence, [B]; None weighs sequences by their tokens.
    """
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
    """Return the weight of a token in the mean over a microbatch, by sequence: [B] -> [B].

    The weight is the sequence's share, divided by its number of ``tokens``.
    """
    if labels is None:
        return (1 / tokens.sum().clamp_min(1)).expand_as(tokens)
    wanted = labels.to(tokens)
    return wanted / wanted.sum().clamp_min(1) / tokens.clamp_min(1)


def _sum(each: Tensor, counted: Tensor | None) -> Tensor:
    return (each if counted is None else each.masked_fill(~counted, 0)).sum()


def inject(x: Tensor, value: Tensor, scale: Callable[[], float | Tensor]) -> Tensor:
    """Return ``x``; in the backward pass, ``value`` gets the gradient ``scale()``, which is called at that time."""
    return _InjectGradient.apply(x, value, scale)


class _InjectGradient(torch.autograd.Function):
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
    """Set ``loads`` [E] to the shares of a step's ``routed`` [E] pairs, in place; without pairs they stay."""
    if int(routed.sum()):
        loads.copy_(routed / routed.sum())


@torch.no_grad()
def move_bias(bias: Tensor, routed: Tensor, rate: float) -> None:
    """Move ``bias`` [E] by one step, in place, after a step in which ``routed`` [E] pairs chose each expert."""
    short = routed.sum() - len(routed) * routed  # integers: an even load gives exactly 0, so no move
    bias.add_(short.sign().to(bias.dtype), alpha=rate)
