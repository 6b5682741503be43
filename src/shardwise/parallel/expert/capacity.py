"""Capacity: selects the pairs of (token, expert) that there is room for, in each sequence by itself.

    room  C_b = max(min_capacity, ceil(capacity · k · n_b / E))          n_b tokens of sequence b that count
    kept  the C_b pairs of expert e of largest weight                    ties: the earlier token; or the earlier tokens

If ranks share sequences, every rank gets the pairs of all of them and computes the same result.

Papers: Lepikhin et al. 2020 (GShard), arXiv:2006.16668; by weight: Riquelme et al. 2021, arXiv:2106.05974.
Cost:   two sorts of the B·T·k pairs; if sequences are shared, a gather of (2k + 1) numbers of 8 bytes a token.
Shapes: B sequences of T tokens, n tokens of this rank, N = B·T, E experts, k experts of a token.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from shardwise.parallel.expert.balance import pair_counts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.expert.surroundings import ExpertContext, RoutedTokens

_DIGITS = 10**6
"""Largest denominator of a capacity: 1.1 becomes 11/10, whose products are rounded up exactly."""


def room(policy: RouterPolicy, tokens: Tensor, experts: int) -> Tensor:
    """Return the number of tokens that an expert takes of each sequence: int64 [B] -> [B].

    Args:
        policy: the rule of the router.
        tokens: number of tokens of each sequence that count.
        experts: number of experts.
    """
    share = _share(policy, experts)
    full = (tokens * share.numerator + share.denominator - 1).div(share.denominator, rounding_mode="floor")
    return full.clamp_min(policy.min_capacity)


def most_pairs(policy: RouterPolicy, tokens: RoutedTokens, experts: int) -> int | None:
    """Return an upper bound of the pairs that an expert gets of this rank's tokens; None if there is no capacity.

    The bound depends on the number of tokens only.
    """
    if policy.capacity is None:
        return None
    of_each = max(math.ceil(_share(policy, experts) * tokens.length), policy.min_capacity)
    return min(len(tokens.place), tokens.sequences * of_each)


def _share(policy: RouterPolicy, experts: int) -> Fraction:
    """Return the room of an expert for each token of a sequence."""
    assert policy.capacity is not None, "without a capacity there is room for all"
    return Fraction(policy.capacity).limit_denominator(_DIGITS) * policy.top_k / experts


def kept_pairs(
    index: Tensor, weights: Tensor, sequence: Tensor, room: Tensor, experts: int, drop: str
) -> Tensor:
    """Return the mask of the pairs that have room: [N, k], [N, k], [N], [B] -> bool [N, k].

    Args:
        index: experts of the tokens, in the order of their positions.
        weights: weights of the pairs.
        sequence: sequence of each token.
        room: tokens that an expert takes of each sequence.
        experts: number of experts.
        drop: ``score`` keeps the pairs of largest weight, ``position`` the earlier tokens.
    """
    nobody = len(room) * experts
    pairs = torch.where(index < 0, nobody, sequence[:, None] * experts + index).view(-1)
    first = torch.arange(len(pairs), device=pairs.device)
    if drop == "score":
        first = weights.reshape(-1).argsort(descending=True, stable=True)
    order = first[pairs[first].argsort(stable=True)]
    expert = pairs[order]  # rising
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(expert, expert)
    limit = torch.cat([room, room.new_zeros(1)])[expert.div(experts, rounding_mode="floor")]
    kept = torch.empty_like(pairs, dtype=torch.bool)
    kept[order] = rank < limit
    return kept.view(index.shape)


def choose_kept(
    policy: RouterPolicy,
    index: Tensor,
    weights: Tensor,
    tokens: RoutedTokens,
    experts: int,
    surroundings: ExpertContext,
) -> tuple[Tensor, Tensor]:
    """Return the mask of this rank's pairs that have room, and the pairs of each expert in whole sequences.

    Args:
        policy: the rule of the router.
        index: experts of this rank's tokens, [n, k].
        weights: weights of the pairs, [n, k].
        tokens: the tokens of this rank.
        experts: number of experts.
        surroundings: ranks that share the sequences.

    Returns:
        bool [n, k], and counts [B, E].
    """
    group = surroundings.group
    if tokens.part is not None or (group is not None and group.size > 1):
        index, weights = _of_all(index, weights, tokens, surroundings)
    total = tokens.sequences * tokens.length
    sequence = torch.arange(total, device=index.device).div(max(tokens.length, 1), rounding_mode="floor")
    counts = pair_counts(index, sequence, tokens.sequences, experts)
    counted = counts.sum(-1).div(policy.top_k, rounding_mode="floor")
    kept = kept_pairs(index, weights, sequence, room(policy, counted, experts), experts, policy.drop)
    return kept[tokens.place], counts


def _of_all(
    index: Tensor, weights: Tensor, tokens: RoutedTokens, surroundings: ExpertContext
) -> tuple[Tensor, Tensor]:
    """Return the pairs of all ranks by position, [N, k] each.

    One message carries the weights as the bits of doubles.
    """
    bits = weights.double().view(torch.int64)
    rows = torch.cat([tokens.place[:, None], index, bits], 1)
    full = surroundings.joined(rows, tokens, "choices")
    by_place = torch.empty_like(full)
    by_place[full[:, 0]] = full
    k = index.shape[1]
    return by_place[:, 1 : k + 1], by_place[:, k + 1 :].contiguous().view(torch.float64)
