"""Attention of some queries to some keys, with what merges it with their attention to other keys.

With context parallelism a rank has the queries of its own tokens and sees the keys of all tokens a part at a time. The
attention to all keys follows from that to each part j, its outputs O_j and its log-sum-exp L_j (Milakov and Gimelshein
2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135):

    S_j = Q K_jᵀ / √K            L_j = log Σ exp(S_j)           O_j = exp(S_j - L_j) V_j
    L   = log(Σ_j exp(L_j) + exp(sink))                         O   = Σ_j exp(L_j - L) O_j

A sink is one number per head that takes part in the sum and has no value, so the weights of a query add up to less than
one. The gradients of a part need nothing of the other parts but L and the row sums D = Σ dO ∘ O:

    P_j = exp(S_j - L)      dV_j = P_jᵀ dO      dS_j = P_j ∘ (dO V_jᵀ - D)      dQ += dS_j K_j / √K
    dK_j = dS_jᵀ Q / √K     dsink = -Σ exp(sink - L) D

Who sees whom is told by runs: tokens of one document that follow one another in the sequence and in memory. A query at
position p sees the keys of its own document from p - w + 1 to p, with w the window. Blocks of queries and pieces of
keys of which nothing is visible are never computed, and only pieces of which a part is visible are masked.

Cost:   B·H·(visible pairs)·4·K operations forward, 2.5 times as many backward; the scores of one block of queries.
Shapes: B rows, H heads, N key and value heads, G = H/N, T queries, S keys of a part, K head size.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 128
"""Queries taken at once: short enough to skip most of what is not visible, long enough for a fast product."""


class TokenRun(NamedTuple):
    """Tokens of one document that follow one another in the sequence and in a rank's tensor."""

    document: int
    """Any number that the documents of one sequence do not share."""
    position: int
    """Position in the sequence of the first token."""
    start: int
    """Index in the tensor of the first token."""
    tokens: int


Runs = tuple[TokenRun, ...]


class KeyPiece(NamedTuple):
    """Keys [start, stop) of a part that a block of queries sees, at least one of them."""

    start: int
    stop: int
    distance: int
    """Position of the block's first query minus that of the first key."""
    is_whole: bool
    """True if each query of the block sees each key of the piece."""


class QueryBlock(NamedTuple):
    """Queries [start, stop) of one run, with the pieces of keys that they see."""

    start: int
    stop: int
    pieces: tuple[KeyPiece, ...]


@lru_cache(maxsize=256)
def visible_blocks(queries: Runs, keys: Runs, window: int | None = None) -> tuple[QueryBlock, ...]:
    """Return the blocks of queries that see at least one key, with these keys.

    Args:
        queries: Runs of the queries.
        keys: Runs of the keys.
        window: Number of keys that a query sees at most, or None.
    """
    found = []
    by_document: dict[int, list[TokenRun]] = {}
    for run in keys:
        by_document.setdefault(run.document, []).append(run)
    for run in queries:
        for first in range(0, run.tokens, _BLOCK):
            count = min(_BLOCK, run.tokens - first)
            position = run.position + first
            pieces = tuple(_pieces(position, count, by_document.get(run.document, ()), window))
            if pieces:
                found.append(QueryBlock(run.start + first, run.start + first + count, pieces))
    return tuple(found)


def _pieces(position: int, count: int, keys: Sequence[TokenRun], window: int | None) -> Iterator[KeyPiece]:
    last = position + count - 1
    for run in keys:
        begin = run.position if window is None else max(run.position, position - window + 1)
        end = min(run.position + run.tokens, last + 1)
        if begin >= end:
            continue
        is_whole = end - 1 <= position and (window is None or begin > last - window)
        start = run.start + begin - run.position
        yield KeyPiece(start, start + end - begin, position - begin, is_whole)


class RowGroup(NamedTuple):
    """Rows of a microbatch whose documents begin at the same places, with what their queries see."""

    rows: tuple[int, int]
    blocks: tuple[QueryBlock, ...]
    window: int | None


def attend(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[RowGroup]) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to a part of the keys, and its log-sum-exp.

    Args:
        q: Queries, [B, H, T, K].
        k: Keys of the part, [B, N, S, K].
        v: Values of the part, [B, N, S, K].
        groups: What the queries of each row see.

    Returns:
        [B, H, T, K] and [B, H, T], in fp32 at least; 0 and -inf where a query sees no key of the part.
    """
    b, h, t, size = q.shape
    n, exact = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(b, n, h // n, t, size, dtype=exact)
    lse = q.new_full((b, n, h // n, t), float("-inf"), dtype=exact)
    for (first, last), blocks, window in groups:
        q_r, k_r, v_r = _rows(q[first:last], n), k[first:last].flatten(0, 1), v[first:last].flatten(0, 1)
        for block in blocks:
            a, e = block.start, block.stop
            scores = [_scores(q_r[:, :, a:e], k_r, piece, window, exact) for piece in block.pieces]
            total = torch.stack([each.logsumexp(-1) for each in scores]).logsumexp(0)
            # A query of the block that sees no key of the part has -inf in place of every score.
            safe = total.masked_fill(total == float("-inf"), 0)
            sums = out[first:last].flatten(0, 1)[:, :, a:e]
            for each, piece in zip(scores, block.pieces, strict=True):
                weights = each.sub_(safe.unsqueeze(-1)).exp_().to(q.dtype).flatten(1, 2)
                sums += torch.bmm(weights, v_r[:, piece.start : piece.stop]).view(sums.shape)
            lse[first:last].flatten(0, 1)[:, :, a:e] = total
    return out.view(b, h, t, size), lse.view(b, h, t)


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[RowGroup],
    grad: Tensor,
    lse: Tensor,
    products: Tensor,
    d_q: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of the queries from one part of the keys to ``d_q``, and return those of its keys and values.

    Args:
        q: Queries, [B, H, T, K].
        k: Keys of the part, [B, N, S, K].
        v: Values of the part, [B, N, S, K].
        groups: What the queries of each row see.
        grad: Gradient of the merged output, [B, H, T, K].
        lse: Log-sum-exp over all keys, sinks included, [B, H, T].
        products: Row sums of the gradient times the merged output, [B, H, T].
        d_q: Gradient of the queries, [B, H, T, K], in fp32 at least.

    Returns:
        Twice [B, N, S, K], in fp32 at least.
    """
    n, size, exact = k.shape[1], k.shape[3], d_q.dtype
    d_k = torch.zeros(k.shape, dtype=exact, device=k.device)
    d_v = torch.zeros_like(d_k)
    for (first, last), blocks, window in groups:
        at = slice(first, last)
        q_r, g_r = _rows(q[at], n), _rows(grad[at], n)
        k_r, v_r = k[at].flatten(0, 1), v[at].flatten(0, 1)
        l_r, p_r = _rows(lse[at], n), _rows(products[at], n)
        dq_r, dk_r, dv_r = _rows(d_q[at], n), d_k[at].flatten(0, 1), d_v[at].flatten(0, 1)
        for block in blocks:
            a, e = block.start, block.stop
            q_b, g_b = q_r[:, :, a:e].flatten(1, 2), g_r[:, :, a:e].flatten(1, 2)
            row_lse, row_sum = l_r[:, :, a:e].unsqueeze(-1), p_r[:, :, a:e].unsqueeze(-1)
            for piece in block.pieces:
                keys = slice(piece.start, piece.stop)
                weights = _scores(q_r[:, :, a:e], k_r, piece, window, exact).sub_(row_lse).exp_()
                d_weights = torch.bmm(g_b, v_r[:, keys].mT).view(weights.shape).to(exact)
                d_scores = d_weights.sub_(row_sum).mul_(weights).mul_(size**-0.5)
                d_scores, rounded = d_scores.to(q.dtype).flatten(1, 2), weights.to(q.dtype).flatten(1, 2)
                dq_r[:, :, a:e] += torch.bmm(d_scores, k_r[:, keys]).view(dq_r[:, :, a:e].shape)
                dk_r[:, keys] += torch.bmm(d_scores.mT, q_b)
                dv_r[:, keys] += torch.bmm(rounded.mT, g_b)
    return d_k, d_v


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Merge the attention to one part of the keys into ``out``, in place, and return the log-sum-exp of both.

    Args:
        out: [B, H, T, K], in fp32 at least.
        lse: [B, H, T].
        other: Output of the other part, [B, H, T, K].
        other_lse: [B, H, T].
    """
    total = torch.logaddexp(lse, other_lse)
    safe = total.masked_fill(total == float("-inf"), 0)
    out.mul_((lse - safe).exp().unsqueeze(-1)).add_(other * (other_lse - safe).exp().unsqueeze(-1))
    return total


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Scale ``out`` by the share that a sink leaves, in place, and return the log-sum-exp with the sink.

    Args:
        out: [B, H, T, K].
        lse: [B, H, T].
        sink: [H].
    """
    total = torch.logaddexp(lse, sink.to(lse.dtype).view(-1, 1))
    out.mul_((lse - total).exp().unsqueeze(-1))
    return total


def sink_gradient(sink: Tensor, lse: Tensor, products: Tensor) -> Tensor:
    """Return the gradient of a sink [H] from the log-sum-exp with the sink and the row sums, both [B, H, T]."""
    weights = (sink.to(lse.dtype).view(-1, 1) - lse).exp()
    return -(weights * products).sum((0, 2))


def _rows(x: Tensor, n: int) -> Tensor:
    """Return [B, H, ...] as [B·N, G, ...], a view."""
    return x.view(x.shape[0] * n, x.shape[1] // n, *x.shape[2:])


def _scores(q: Tensor, k: Tensor, piece: KeyPiece, window: int | None, exact: torch.dtype) -> Tensor:
    """Return the masked scores of a block of queries [R, G, Q, K] with a piece of keys: [R, G, Q, S]."""
    rows, group, queries, size = q.shape
    scores = torch.bmm(q.flatten(1, 2), k[:, piece.start : piece.stop].mT).to(exact).mul_(size**-0.5)
    scores = scores.view(rows, group, queries, piece.stop - piece.start)
    if piece.is_whole:
        return scores
    distance = (
        piece.distance
        + torch.arange(queries, device=q.device)[:, None]
        - torch.arange(piece.stop - piece.start, device=q.device)
    )
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return scores.masked_fill_(hidden, float("-inf"))
