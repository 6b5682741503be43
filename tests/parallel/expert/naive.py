"""A mixture of experts as loops over tokens and experts: what the layer is held to."""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.parallel.expert.policy import RouterPolicy

Parameters = Mapping[str, Tensor]


def best(values: list[float], k: int) -> list[int]:
    """Where the k largest are, of equals the lower first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def chosen(scores: list[float], policy: RouterPolicy) -> list[int]:
    """The experts of one token."""
    size = len(scores) // policy.groups
    groups = [scores[g * size : (g + 1) * size] for g in range(policy.groups)]
    worth = [sum(sorted(group)[-1 if policy.score == "softmax" else -2 :]) for group in groups]
    allowed = best(worth, policy.top_groups or policy.groups)
    return best([s if e // size in allowed else -math.inf for e, s in enumerate(scores)], policy.top_k)


def gated(gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (F.silu(gate) * up)


def expert(parameters: Parameters, e: int, x: Tensor) -> Tensor:
    return gated(parameters["experts.gate_up"][e], parameters["experts.down"][e], x)


def layer(
    parameters: Parameters,
    policy: RouterPolicy,
    x: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    loads: Tensor | None = None,
    jitter: Tensor | None = None,
    gumbel: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """[B, T, D] -> [B, T, D], the balance term, and what was counted."""
    experts = len(parameters["router.weight"])
    value = x.new_zeros(())
    out = {(b, t): torch.zeros_like(x[b, t]) for b in range(x.shape[0]) for t in range(x.shape[1])}
    seen = {"routed": [0] * experts, "kept": [0] * experts}
    all_tokens = max(int(x.shape[0] * x.shape[1] if mask is None else mask.sum()), 1)
    for b in range(x.shape[0]):
        places = [t for t in range(x.shape[1]) if mask is None or mask[b, t]]
        pairs: dict[int, list[tuple[int, Tensor]]] = {e: [] for e in range(experts)}
        shares, squares = [], []
        for t in places:
            read = x[b, t] if jitter is None else x[b, t] * jitter[b, t]
            logits = parameters["router.weight"] @ read
            moved = logits if gumbel is None else logits + gumbel[b, t]
            of = partial(torch.softmax, dim=0) if policy.score == "softmax" else torch.sigmoid
            scores, choosing = of(logits), of(moved).detach()
            if bias is not None:
                choosing = choosing + bias
            into = chosen(choosing.tolist(), policy)
            total = sum(scores[e] for e in into) if policy.normalizes else 1.0
            for e in into:
                pairs[e].append((t, policy.scale * scores[e] / total))
            shares.append(scores / scores.sum())
            squares.append(logits.logsumexp(0).square())
        for e, mine in pairs.items():
            room = len(mine)
            if policy.capacity is not None:
                share = Fraction(str(policy.capacity)) * policy.top_k * len(places) / experts
                room = max(policy.min_capacity, math.ceil(share))
            if policy.drop == "score":
                kept = sorted(mine, key=lambda pair: (-float(pair[1].detach()), pair[0]))[:room]
            else:
                kept = mine[:room]
            for t, weight in kept:
                out[b, t] = out[b, t] + weight * expert(parameters, e, x[b, t])
            seen["routed"][e] += len(mine)
            seen["kept"][e] += len(kept)
        if not places:
            continue
        weight = len(places) / all_tokens
        if policy.balance == "loss":
            of_sequence = x.new_tensor([len(pairs[e]) / (policy.top_k * len(places)) for e in range(experts)])
            f = of_sequence if loads is None else loads.to(x)
            term = experts * (f * torch.stack(shares).mean(0)).sum()
            value = value + weight * policy.balance_weight * term
        value = value + weight * policy.z_weight * torch.stack(squares).mean()
    for b, t in out:
        one = x[b, t]
        if "shared.down.weight" in parameters:
            out[b, t] = out[b, t] + gated(
                parameters["shared.gate_up.weight"], parameters["shared.down.weight"], one
            )
        if "mix.weight" in parameters:
            c = (parameters["mix.weight"] @ one + parameters["mix.bias"]).softmax(0)
            dense = gated(parameters["residual.gate_up.weight"], parameters["residual.down.weight"], one)
            out[b, t] = c[0] * out[b, t] + c[1] * dense
    return torch.stack(list(out.values())).view(x.shape), value, seen
