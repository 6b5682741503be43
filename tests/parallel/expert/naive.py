"""A mixture of experts as loops over tokens and experts: what the layer is held to."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.parallel.expert.policy import RouterPolicy


def chosen(scores: Tensor, k: int) -> list[int]:
    """The k largest of one token's scores, of equals the lower expert."""
    return sorted(range(len(scores)), key=lambda e: (-float(scores[e]), e))[:k]


def expert(parameters: Mapping[str, Tensor], e: int, x: Tensor) -> Tensor:
    gate, up = (parameters["experts.gate_up"][e] @ x).chunk(2)
    return parameters["experts.down"][e] @ (F.silu(gate) * up)


def layer(parameters: Mapping[str, Tensor], policy: RouterPolicy, x: Tensor) -> Tensor:
    """[B, T, D] -> [B, T, D]."""
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            scores = (parameters["router.weight"] @ x[b, t]).softmax(0)
            index = chosen(scores.detach(), policy.top_k)
            total = sum(scores[e] for e in index) if policy.normalizes else 1.0
            for e in index:
                out[b, t] = out[b, t] + policy.scale * scores[e] / total * expert(parameters, e, x[b, t])
    return out
