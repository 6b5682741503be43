"""Attention of one rank with documents, a window or a sink, from the kernel for parts of the keys.

All keys are one part, so nothing is merged; ``attention_parts.py`` has the formulas.

Cost:   kept for the backward pass: queries, keys, values, outputs and B·H·T numbers.
Shapes: B batch, H heads, N key and value heads, T queries, S keys, K head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels.attention_parts import (
    RowGroup,
    attend,
    attend_backward,
    row_products,
    sink_gradient,
    with_sink,
)


def attend_to_seen(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, groups: Sequence[RowGroup]
) -> Tensor:
    """Return the attention of queries to the keys that they see.

    Args:
        q: Queries, [B, H, T, K].
        k: Keys, [B, N, S, K].
        v: Values, [B, N, S, K].
        sink: One number for each head, [H], or None.
        groups: What the queries of each row see.

    Returns:
        [B, H, T, K].
    """
    found: Tensor = _AttentionToSeen.apply(q, k, v, sink, groups)
    return found


class _AttentionToSeen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, groups: Sequence[RowGroup]
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = attend(q, k, v, groups)
        if sink is not None:
            lse = with_sink(out, lse, sink)
        result = out.to(q.dtype)
        ctx.groups = groups
        ctx.save_for_backward(q, k, v, result, lse, *(() if sink is None else (sink,)))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        grad = grad.contiguous()
        d_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        d_k, d_v = attend_backward(q, k, v, ctx.groups, grad, lse, out, d_q)
        d_sink = None
        if sinks:
            d_sink = sink_gradient(sinks[0], lse, row_products(out, grad)).to(sinks[0].dtype)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sink, None
