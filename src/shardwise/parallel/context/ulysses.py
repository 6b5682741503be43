"""Ulysses: ranks that share a sequence exchange heads for tokens, so that each has all their tokens for some heads.

    before the attention    rank u has t tokens of all heads      →  all tokens, of its share of the heads
    after the attention     rank u has all tokens of its heads    →  its t tokens, of all heads

Query heads are dealt in order, as evenly as they divide: 6 heads over 4 ranks are 2, 2, 1, 1. A key head goes to each
rank whose query heads use it, so with one key head every rank gets it. Nothing is padded. Between the two exchanges the
attention is that of fewer ranks with more tokens each (attention.py), or of one rank with the whole sequence.

Paper: DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509; there the ranks may not exceed the key heads.

Cost:   forward and backward alike (U - 1)/U · B·U·t · 2(H + N)·K / U elements a rank, if U divides H and N.
Shapes: B sequences, t tokens of a rank, H query heads, N key and value heads, K head size, U ranks; rank u has
        H_u query heads and N_u key heads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm import exchange
from shardwise.comm.collectives import Group
from shardwise.parallel.context.heads import HeadShares, share_heads, users_of


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: Group, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads.

    Args:
        q: Queries of this rank's tokens, [B, H, t, K].
        k: Their keys, [B, N, t, K].
        v: Their values, [B, N, t, K].
        group: The ranks that exchange heads.
        name: Name of the layer in errors.

    Returns:
        Queries [B, H_u, U·t, K], keys and values [B, n, U·t, K] of this rank's heads, the tokens in rank order. n is
        N_u, or H_u if the query heads of the rank use its key heads in unlike numbers.
    """
    shares = share_heads(q.shape[1], k.shape[1], group.size)
    found: tuple[Tensor, Tensor, Tensor] = _ToHeads.apply(q, k, v, shares, group, name)
    users = users_of(shares, group.index, q.shape[1] // k.shape[1])
    if users is None:
        return found
    # One key head for each query head, because the attention takes groups of one size.
    index = torch.tensor(users, device=k.device)
    return found[0], found[1].index_select(1, index), found[2].index_select(1, index)


def to_tokens(out: Tensor, heads: int, kv_heads: int, group: Group, name: str) -> Tensor:
    """Exchange heads for tokens: return [B, H, t, K] from the output [B, H_u, U·t, K] of this rank's heads.

    Args:
        out: Output of the attention.
        heads: Query heads of all ranks.
        kv_heads: Key heads of all ranks.
        group: The ranks that exchange heads.
        name: Name of the layer in errors.
    """
    found: Tensor = _ToTokens.apply(out, share_heads(heads, kv_heads, group.size), group, name)
    return found


def own_heads(per_head: Tensor, kv_heads: int, group: Group) -> Tensor:
    """Return the numbers of this rank's heads from one number for each query head [H]."""
    first, last = share_heads(len(per_head), kv_heads, group.size).queries[group.index]
    return per_head[first:last]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, shares: HeadShares, group: Group, name: str
    ) -> tuple[Tensor, ...]:
        ctx.given = shares, group, name, q.shape[1], k.shape[1]
        parts = [
            each[:, first:last]
            for (a, e), (start, stop) in zip(shares.queries, shares.keys, strict=True)
            for each, first, last in ((q, a, e), (k, start, stop), (v, start, stop))
        ]
        rows = torch.cat(parts, 1).transpose(0, 1)
        counts = [list(map(shares.rows, range(group.size)))] * group.size
        came = exchange.send(rows, counts, group, f"heads of {name}")
        return _joined(came, group.size).split(_sizes(shares, group.index), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        shares, group, name, heads, kv_heads = ctx.given
        rows = _apart(torch.cat(gradients, 1), group.size)
        counts = [[shares.rows(rank)] * group.size for rank in range(group.size)]
        came = exchange.send(rows, counts, group, f"gradients of heads of {name}").transpose(0, 1)
        d_q, d_k, d_v = (
            came.new_zeros(came.shape[0], n, *came.shape[2:]) for n in (heads, kv_heads, kv_heads)
        )
        sizes = [size for rank in range(group.size) for size in _sizes(shares, rank)]
        pieces = iter(came.split(sizes, 1))
        for (a, e), (start, stop) in zip(shares.queries, shares.keys, strict=True):
            d_q[:, a:e] = next(pieces)
            d_k[:, start:stop] += next(pieces)  # several ranks may use one key head
            d_v[:, start:stop] += next(pieces)
        return d_q, d_k, d_v, None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, shares: HeadShares, group: Group, name: str) -> Tensor:
        ctx.given = shares, group, name
        counts = [[shares.queries_of(rank)] * group.size for rank in range(group.size)]
        came = exchange.send(_apart(out, group.size), counts, group, f"output of {name}")
        return came.transpose(0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        shares, group, name = ctx.given
        counts = [list(map(shares.queries_of, range(group.size)))] * group.size
        came = exchange.send(grad.transpose(0, 1), counts, group, f"gradients of the output of {name}")
        return _joined(came, group.size), None, None, None


def _sizes(shares: HeadShares, rank: int) -> list[int]:
    return [shares.queries_of(rank), shares.keys_of(rank), shares.keys_of(rank)]


def _joined(rows: Tensor, ranks: int) -> Tensor:
    """Return rows [U · n, B, t, K], rank by rank, as [B, n, U · t, K]."""
    number, batch, tokens, size = rows.shape[0] // ranks, *rows.shape[1:]
    parts = rows.view(ranks, number, batch, tokens, size)
    return parts.permute(2, 1, 0, 3, 4).reshape(batch, number, ranks * tokens, size)


def _apart(x: Tensor, ranks: int) -> Tensor:
    """Return [B, n, U · t, K] as rows [U · n, B, t, K], rank by rank."""
    batch, number, tokens, size = x.shape
    parts = x.reshape(batch, number, ranks, tokens // ranks, size)
    return parts.permute(2, 1, 0, 3, 4).reshape(ranks * number, batch, tokens // ranks, size)
