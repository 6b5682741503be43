"""The choice of experts: scores of logits, the experts of each token, their weights, and the counts of both.

    scores    s = softmax(l), or sigmoid(l)
    choice    the k experts of largest s + b; of equals the lower expert
    weights   w_j = scale · s_j                                        or scale · s_j / (Σ_j s_j + 1e-20), normalized
    gradient  dl = s (t - Σ_e s_e t_e), or s (1 - s) t                 t = ds + what dw adds at the chosen experts

On a device with Triton each function is one launch for all tokens, and counts take a second one for their sums; the
plain forms, in torch operations, are the reference. Counts are integers, and sums of entropies have a fixed order.

Cost:   reads [n, E] once; 2·k passes over a row of scores in registers.
Shapes: n tokens, E experts, k experts of a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels.choice import fused
from shardwise.kernels.expert_rows import owner_of, reaches
from shardwise.kernels.operation import device_operation

SMALLEST = 1e-20
"""Addend to the sum of scores, because sigmoids may all be 0; as in DeepSeek, it changes no other sum."""
MOST_EXPERTS = 4096
"""Number of scores that Triton's form holds at once."""


def is_fused(logits: Tensor) -> bool:
    """Return whether Triton's form serves logits [n, E]."""
    return fused(logits) and logits.dtype == torch.float32 and logits.shape[1] <= MOST_EXPERTS


def normalized(scores: Tensor) -> Tensor:
    """Return scores divided by the sum of their row: [n, m] -> [n, m]."""
    return scores / (scores.sum(-1, keepdim=True) + SMALLEST)


def scores_of(logits: Tensor, is_sigmoid: bool) -> Tensor:
    """Return softmax or sigmoid of the logits: [n, E] -> [n, E]."""
    return logits.sigmoid() if is_sigmoid else logits.softmax(-1)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest of the last dim: int64 [..., k].

    The largest comes first; of equals the lower index comes first.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


# The choice and its weights ----------------------------------------------------------------------------------------


def chosen_experts(logits: Tensor, bias: Tensor | None, top_k: int, is_sigmoid: bool) -> Tensor:
    """Return the experts of largest score plus ``bias`` [E], the best first: [n, E] -> int64 [n, k]."""
    index: Tensor = (_chosen_experts if is_fused(logits) else plain_chosen_experts)(
        logits, bias, top_k, is_sigmoid
    )
    return index


def plain_chosen_experts(logits: Tensor, bias: Tensor | None, top_k: int, is_sigmoid: bool) -> Tensor:
    """Return ``chosen_experts`` in plain torch operations: the reference."""
    scores = scores_of(logits, is_sigmoid)
    return largest(scores if bias is None else scores + bias.to(scores.dtype), top_k)


@device_operation(
    "chosen_experts(Tensor logits, Tensor? bias, SymInt top_k, bool is_sigmoid) -> Tensor",
    lambda logits, bias, top_k, is_sigmoid: logits.new_empty(len(logits), top_k, dtype=torch.int64),
)
def _chosen_experts(logits: Tensor, bias: Tensor | None, top_k: int, is_sigmoid: bool) -> Tensor:
    if not fused(logits):
        return plain_chosen_experts(logits, bias, top_k, is_sigmoid)
    from shardwise.kernels.fused import expert_choice as kernels

    return kernels.chosen_experts(logits.contiguous(), bias, top_k, is_sigmoid)


def expert_weights(
    logits: Tensor, index: Tensor, is_sigmoid: bool, normalizes: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the weights of the chosen experts, [n, k], and the scores of all, [n, E], with gradients.

    Args:
        logits: logits of the experts, fp32 [n, E].
        index: experts of each token, [n, k].
        is_sigmoid: True for sigmoid, False for softmax.
        normalizes: True divides weights by their sum.
        scale: factor of the weights.
    """
    weights, scores = _ExpertWeights.apply(logits, index, is_sigmoid, normalizes, scale)
    return weights, scores


def plain_expert_weights(
    logits: Tensor, index: Tensor, is_sigmoid: bool, normalizes: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``expert_weights`` in plain torch operations: the reference."""
    scores = scores_of(logits, is_sigmoid)
    chosen = scores.gather(-1, index)
    return (normalized(chosen) if normalizes else chosen) * scale, scores


class _ExpertWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, is_sigmoid: bool, normalizes: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        weights, scores = _expert_weights(logits, index, is_sigmoid, normalizes, scale)
        ctx.save_for_backward(scores, index)
        ctx.rule = is_sigmoid, normalizes, scale
        ctx.set_materialize_grads(False)
        return weights, scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weights: Tensor | None, d_scores: Tensor | None) -> tuple[Any, ...]:
        scores, index = ctx.saved_tensors
        if d_weights is None:
            d_weights = scores.new_zeros(index.shape)
        d_logits = _expert_weight_gradient(d_weights, d_scores, scores, index, *ctx.rule)
        return d_logits, None, None, None, None


@device_operation(
    "expert_weights(Tensor logits, Tensor index, bool is_sigmoid, bool normalizes, float scale) -> (Tensor, Tensor)",
    lambda logits, index, *rule: (logits.new_empty(index.shape), logits.new_empty(logits.shape)),
)
def _expert_weights(
    logits: Tensor, index: Tensor, is_sigmoid: bool, normalizes: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if not fused(logits):
        return plain_expert_weights(logits, index, is_sigmoid, normalizes, scale)
    from shardwise.kernels.fused import expert_choice as kernels

    return kernels.expert_weights(logits.contiguous(), index.contiguous(), is_sigmoid, normalizes, scale)


@device_operation(
    "expert_weight_gradient(Tensor d_weights, Tensor? d_scores, Tensor scores, Tensor index, bool is_sigmoid, "
    "bool normalizes, float scale) -> Tensor",
    lambda d_weights, d_scores, scores, *rest: scores.new_empty(scores.shape),
)
def _expert_weight_gradient(
    d_weights: Tensor,
    d_scores: Tensor | None,
    scores: Tensor,
    index: Tensor,
    is_sigmoid: bool,
    normalizes: bool,
    scale: float,
) -> Tensor:
    if not fused(d_weights, scores):
        return plain_expert_weight_gradient(d_weights, d_scores, scores, index, is_sigmoid, normalizes, scale)
    from shardwise.kernels.fused import expert_choice as kernels

    held = None if d_scores is None else d_scores.contiguous()
    return kernels.expert_weight_gradient(
        d_weights.contiguous(), held, scores, index.contiguous(), is_sigmoid, normalizes, scale
    )


def plain_expert_weight_gradient(
    d_weights: Tensor,
    d_scores: Tensor | None,
    scores: Tensor,
    index: Tensor,
    is_sigmoid: bool,
    normalizes: bool,
    scale: float,
) -> Tensor:
    """Return the gradient of the logits in plain torch operations."""
    d_chosen = d_weights * scale
    if normalizes:
        chosen = scores.gather(-1, index)
        total = chosen.sum(-1, keepdim=True) + SMALLEST
        d_chosen = (d_chosen - (d_chosen * chosen).sum(-1, keepdim=True) / total) / total
    pull = torch.zeros_like(scores) if d_scores is None else d_scores.clone()
    pull.scatter_add_(-1, index, d_chosen)
    if is_sigmoid:
        return pull * scores * (1 - scores)
    return scores * (pull - (pull * scores).sum(-1, keepdim=True))


# Counts ------------------------------------------------------------------------------------------------------------


def route_counts(index: Tensor, experts: int, places: Sequence[int], first: int) -> Tensor:
    """Return ``first``, the pairs of each expert, and the rows that reach each place: int64 [1 + E + Σ places].

    Args:
        index: experts of each row, [N, k]; -1 for none.
        experts: number of experts.
        places: numbers of places over which the experts are spread, in order, each by itself.
        first: number that stands in front.
    """
    counts: Tensor = (_route_counts if fused(index) else plain_route_counts)(
        index, experts, list(places), first
    )
    return counts


def plain_route_counts(index: Tensor, experts: int, places: Sequence[int], first: int) -> Tensor:
    """Return ``route_counts`` in plain torch operations: the reference."""
    chosen = torch.where(index < 0, experts, index).view(-1)
    pairs = chosen.new_zeros(experts + 1).scatter_add_(0, chosen, torch.ones_like(chosen))
    reached = [reaches(owner_of(index, experts // each, each), each).sum(0) for each in places]
    return torch.cat([pairs.new_full((1,), first), pairs[:experts], *reached])


@device_operation(
    "route_counts(Tensor index, SymInt experts, SymInt[] places, SymInt first) -> Tensor",
    lambda index, experts, places, first: index.new_empty(1 + experts + sum(places)),
)
def _route_counts(index: Tensor, experts: int, places: Sequence[int], first: int) -> Tensor:
    if not fused(index):
        return plain_route_counts(index, experts, places, first)
    from shardwise.kernels.fused import expert_choice as kernels

    return kernels.route_counts(index.contiguous(), experts, places, first)


def load_counts(chosen: Tensor, kept: Tensor, scores: Tensor, is_sigmoid: bool, beside: int) -> Tensor:
    """Return the loads of a layer: fp64 [2·E + ``beside``].

    They are the pairs that chose each expert, the pairs that it kept, the number of tokens, zeros, and the sum of the
    entropies of the scores, divided by their sums, of tokens that chose an expert.

    Args:
        chosen: experts of each token, [n, k]; -1 for a token that does not count.
        kept: the same, -1 for a pair without room too.
        scores: scores of all experts, [n, E].
        is_sigmoid: True if the scores of a token do not sum to 1.
        beside: number of numbers behind the pairs.
    """
    form = _load_counts if fused(scores) and scores.shape[1] <= MOST_EXPERTS else plain_load_counts
    loads: Tensor = form(chosen, kept, scores, is_sigmoid, beside)
    return loads


def plain_load_counts(chosen: Tensor, kept: Tensor, scores: Tensor, is_sigmoid: bool, beside: int) -> Tensor:
    """Return ``load_counts`` in plain torch operations: the reference."""
    experts = scores.shape[1]
    loads = torch.zeros(2 * experts + beside, dtype=torch.float64, device=scores.device)
    for start, index in ((0, chosen), (experts, kept)):
        places = torch.where(index < 0, experts, index).view(-1)
        counts = places.new_zeros(experts + 1).scatter_add_(0, places, torch.ones_like(places))
        loads[start : start + experts] = counts[:-1]
    counted = chosen[:, 0] >= 0
    entropy = torch.special.entr(normalized(scores) if is_sigmoid else scores).sum(-1)
    loads[2 * experts] = counted.sum()
    loads[-1] = entropy.masked_fill(~counted, 0).sum()
    return loads


@device_operation(
    "load_counts(Tensor chosen, Tensor kept, Tensor scores, bool is_sigmoid, SymInt beside) -> Tensor",
    lambda chosen, kept, scores, is_sigmoid, beside: scores.new_empty(
        2 * scores.shape[1] + beside, dtype=torch.float64
    ),
)
def _load_counts(chosen: Tensor, kept: Tensor, scores: Tensor, is_sigmoid: bool, beside: int) -> Tensor:
    if not fused(scores):
        return plain_load_counts(chosen, kept, scores, is_sigmoid, beside)
    from shardwise.kernels.fused import expert_choice as kernels

    return kernels.load_counts(
        chosen.contiguous(), kept.contiguous(), scores.contiguous(), is_sigmoid, beside
    )
