"""Attention of one rank's queries to the keys of all ranks of context parallelism.

    forward     the rows of keys and values that other ranks need leave; attention to this rank's own keys runs
                meanwhile; attention to the rows that arrived is merged with it
    backward    the gradients of the rows that arrived go home, while the gradients of this rank's own keys are computed

What is kept for the backward pass is this rank's queries, keys, values and outputs, and one number for each query and
head. The rows of other ranks are sent again, because keeping them would keep the whole sequence on every rank.

Paper: Ring Attention, Liu et al. 2023, arXiv:2310.01889; here only rows that some query of a rank sees travel, straight
from their owner (``keys.py``).

Cost:   2·B·N·K elements for each row that another rank sees, forward; twice that and once more backward.
Shapes: B sequences, H heads, N key and value heads, t tokens of this rank, K head size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm import exchange
from shardwise.comm.collectives import Group
from shardwise.kernels.attention_parts import (
    attend,
    attend_backward,
    row_products,
    sink_gradient,
    with_sink,
)
from shardwise.kernels.operation import operation
from shardwise.parallel.context.keys import KeyExchange


class AttentionSite(NamedTuple):
    """The exchange of one layer's keys in one pass."""

    group: Group
    """The ranks that share the sequence."""
    keys: KeyExchange
    name: str
    """Name of the layer in errors."""


@operation("product")
def context_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, site: AttentionSite) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks.

    Args:
        q: Queries of this rank's tokens, [B, H, t, K].
        k: Their keys, [B, N, t, K].
        v: Their values, [B, N, t, K].
        sink: One number for each head, [H], or None.
        site: The exchange of the layer.

    Returns:
        [B, H, t, K].
    """
    found: Tensor = _ContextAttention.apply(q, k, v, sink, site)
    return found


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, site: AttentionSite
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        arriving = _leave(k, v, site, "keys")
        out, lse = attend(q, k, v, site.keys.own)
        others = arriving()
        if others is not None:
            attend(q, *others, site.keys.arrived, (out, lse))
        if sink is not None:
            lse = with_sink(out, lse, sink)
        result = out.to(q.dtype)
        ctx.site = site
        ctx.save_for_backward(q, k, v, result, lse, *(() if sink is None else (sink,)))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        site: AttentionSite = ctx.site
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        grad = grad.contiguous()
        arriving = _leave(k, v, site, "keys again")
        # A query that sees nothing has no weights: exp(-inf - 0) is 0, and exp(-inf + inf) would not be a number.
        lse = lse.masked_fill(lse == float("-inf"), 0)
        d_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        others = arriving()
        going: Callable[[], tuple[Tensor, Tensor]] | None = None
        if others is not None:
            d_others = attend_backward(q, others[0], others[1], site.keys.arrived, grad, lse, out, d_q)
            going = _return(torch.stack(d_others), site)
        d_k, d_v = attend_backward(q, k, v, site.keys.own, grad, lse, out, d_q)
        if going is not None:
            home = going()  # [2, rows, ...]: rows that several ranks saw come once from each of them
            for total, rows in zip((d_k, d_v), home, strict=True):
                place = 0
                for start, stop in site.keys.sent:
                    total[:, :, start:stop] += rows[:, :, place : place + stop - start]
                    place += stop - start
        d_sink = None
        if sinks:
            d_sink = sink_gradient(sinks[0], lse, row_products(out, grad)).to(sinks[0].dtype)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sink, None


def _leave(
    k: Tensor, v: Tensor, site: AttentionSite, what: str
) -> Callable[[], tuple[Tensor, Tensor] | None]:
    """Send the rows that others need, and return a function that waits for those that arrive: keys and values."""
    if site.group.size == 1 or not any(map(any, site.keys.counts)):
        return lambda: None
    both = torch.stack([k, v])  # [2, B, N, t, K]
    parts = [both[:, :, :, start:stop] for start, stop in site.keys.sent]
    rows = torch.cat(parts or [both[:, :, :, :0]], 3)
    counts = [list(row) for row in site.keys.counts]
    came, pending = exchange.start_send(
        rows.permute(3, 0, 1, 2, 4).contiguous(), counts, site.group, f"{what} of {site.name}"
    )

    def arrive() -> tuple[Tensor, Tensor]:
        pending.wait()
        both = came.permute(1, 2, 3, 0, 4)
        return both[0].contiguous(), both[1].contiguous()

    return arrive


def _return(gradients: Tensor, site: AttentionSite) -> Callable[[], tuple[Tensor, Tensor]]:
    """Send gradients [2, B, N, rows, K] of rows that arrived to their owners; return a function that waits for ours."""
    counts = exchange.transposed(site.keys.counts)
    came, pending = exchange.start_send(
        gradients.permute(3, 0, 1, 2, 4).contiguous(), counts, site.group, f"gradients of keys of {site.name}"
    )

    def arrive() -> tuple[Tensor, Tensor]:
        pending.wait()
        both = came.permute(1, 2, 3, 0, 4)
        return both[0], both[1]

    return arrive
