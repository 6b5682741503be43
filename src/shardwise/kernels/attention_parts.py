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

Two forms compute the same. Without a window, what a run of queries sees of a run of keys is at most two rectangles and
one triangle whose corner lies on the diagonal, and torch's fused kernel computes each of these tiles: it returns L_j,
and its backward pass takes L and O of all parts in place of those of the tile. In fp32 on the CPU it takes half the
time of the plain form. The plain form computes blocks of 128 queries in matrix products and takes everything else: a
window, a device, and 16 bits, in which matrix products on the CPU are faster and whose sums it keeps in fp32.

Cost:   B·H·(visible pairs)·4·K operations forward, 2.5 times as many backward; the scores of one block of queries.
Shapes: B rows, H heads, N key and value heads, G = H/N, T queries, S keys of a part, K head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels.choice import kernel_device

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


class KeyTile(NamedTuple):
    """Queries [start, stop) that all see keys [first, last), or, if it is a triangle, those up to their own place."""

    start: int
    stop: int
    first: int
    last: int
    is_triangle: bool
    """True if query start + i sees keys first to first + i; there are as many queries as keys."""
    is_first: bool
    """True if no earlier tile has any of the queries."""


@lru_cache(maxsize=256)
def visible_tiles(queries: Runs, keys: Runs) -> tuple[KeyTile, ...]:
    """Return what the queries see of the keys, without a window, as rectangles and triangles that do not overlap.

    Args:
        queries: Runs of the queries.
        keys: Runs of the keys.
    """
    found: list[KeyTile] = []
    by_document: dict[int, list[TokenRun]] = {}
    for run in keys:
        by_document.setdefault(run.document, []).append(run)
    for run in queries:
        tiles: list[KeyTile] = []
        for each in by_document.get(run.document, ()):
            for tile in _tiles(run, each):
                is_first = all(tile.stop <= other.start or other.stop <= tile.start for other in tiles)
                tiles.append(tile._replace(is_first=is_first))
        found += tiles
    return tuple(found)


def _tiles(queries: TokenRun, keys: TokenRun) -> Iterator[KeyTile]:
    """Yield the tiles of one run of queries with one run of keys of the same document.

    In positions the queries are [a, e) and the keys [c, d); the diagonal runs from max(a, c) to n = min(e, d):

        keys      c .. a      a or c .. n
        a .. n    whole       triangle
        n .. e    whole       whole
    """
    a, e = queries.position, queries.position + queries.tokens
    c, d = keys.position, keys.position + keys.tokens
    to_query, to_key = queries.start - a, keys.start - c
    m, n = max(a, c), min(e, d)
    if c < a:
        yield KeyTile(a + to_query, e + to_query, c + to_key, min(a, d) + to_key, False, True)
    if m < n:
        yield KeyTile(m + to_query, n + to_query, m + to_key, n + to_key, True, True)
        if n < e:
            yield KeyTile(n + to_query, e + to_query, m + to_key, n + to_key, False, True)


@dataclass(frozen=True)
class RowGroup:
    """Rows of a microbatch whose documents begin at the same places, with what their queries see."""

    rows: tuple[int, int]
    queries: Runs
    keys: Runs
    window: int | None = None

    @cached_property
    def blocks(self) -> tuple[QueryBlock, ...]:
        """Return what the queries see, in blocks of queries."""
        return visible_blocks(self.queries, self.keys, self.window)

    @cached_property
    def tiles(self) -> tuple[KeyTile, ...]:
        """Return what the queries see if there is no window, in rectangles and triangles."""
        return visible_tiles(self.queries, self.keys)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[RowGroup],
    others: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to a part of the keys, and its log-sum-exp.

    Args:
        q: Queries, [B, H, T, K].
        k: Keys of the part, [B, N, S, K].
        v: Values of the part, [B, N, S, K].
        groups: What the queries of each row see.
        others: The two results for other parts, with which those of this part are merged, in place. None: there are no
            other parts yet.

    Returns:
        [B, H, T, K], whose transpose [B, T, H, K] is contiguous, and [B, H, T], in fp32 at least; 0 and -inf where a
        query sees no key.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    if others is None:
        b, h, t, size = q.shape
        out = torch.zeros(b, t, h, size, dtype=exact, device=q.device).transpose(1, 2)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=exact, device=q.device)
    else:
        out, lse = others
    for group in groups:
        (_attend_tiles if _is_fused(q, group) else _attend_blocks)(q, k, v, group, out, lse, others is None)
    return out, lse


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[RowGroup],
    grad: Tensor,
    lse: Tensor,
    out: Tensor,
    d_q: Tensor,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of the queries from one part of the keys to ``d_q``, and return those of its keys and values.

    Args:
        q: Queries, [B, H, T, K].
        k: Keys of the part, [B, N, S, K].
        v: Values of the part, [B, N, S, K].
        groups: What the queries of each row see.
        grad: Gradient of the merged output, [B, H, T, K].
        lse: Log-sum-exp over all keys, sinks included, [B, H, T]; a finite number where a query sees no key.
        out: Merged output, [B, H, T, K].
        d_q: Gradient of the queries, [B, H, T, K], in fp32 at least.
        into: Gradients of the keys and values so far, to which these are added; None: there are none yet.

    Returns:
        Twice [B, N, S, K], in fp32 at least.
    """
    if into is None:
        zeros = torch.zeros(2, *k.shape, dtype=d_q.dtype, device=k.device)
        into = zeros[0], zeros[1]
    d_k, d_v = into
    for group in groups:
        backward = _tiles_backward if _is_fused(q, group) else _blocks_backward
        backward(q, k, v, group, grad, lse, out, d_q, d_k, d_v)
    return d_k, d_v


def row_products(out: Tensor, grad: Tensor) -> Tensor:
    """Return the row sums of an output times its gradient, both [B, H, T, K], in fp32 at least: [B, H, T]."""
    exact = torch.promote_types(out.dtype, torch.float32)
    return (out.to(exact) * grad.to(exact)).sum(-1)


def _is_fused(q: Tensor, group: RowGroup) -> bool:
    return group.window is None and q.dtype in (torch.float32, torch.float64) and kernel_device(q) == "cpu"


_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, group: RowGroup, out: Tensor, lse: Tensor, is_only: bool
) -> None:
    rows = slice(*group.rows)
    for a, e, first, last, is_triangle, is_first in group.tiles:
        k_t, v_t = k[rows, :, first:last], v[rows, :, first:last]
        here, here_lse = _fused(q[rows, :, a:e], k_t, v_t, 0.0, is_triangle)
        if is_first and is_only:
            out[rows, :, a:e] = here
            lse[rows, :, a:e] = here_lse
        else:
            merge(out[rows, :, a:e], lse[rows, :, a:e], here, here_lse)


def _tiles_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: RowGroup,
    grad: Tensor,
    lse: Tensor,
    out: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> None:
    rows = slice(*group.rows)
    for a, e, first, last, is_triangle, _ in group.tiles:
        at, keys = (rows, slice(None), slice(a, e)), (rows, slice(None), slice(first, last))
        found = _fused_backward(grad[at], q[at], k[keys], v[keys], out[at], lse[at], 0.0, is_triangle)
        d_q[at] += found[0]
        d_k[keys] += found[1]
        d_v[keys] += found[2]


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, group: RowGroup, out: Tensor, lse: Tensor, is_only: bool
) -> None:
    n, exact, at = k.shape[1], out.dtype, slice(*group.rows)
    q_r, out_r, lse_r = (_grouped(x[at], n) for x in (q, out, lse))
    k_r, v_r = k[at].flatten(0, 1), v[at].flatten(0, 1)
    for a, e, pieces in group.blocks:
        q_b, sums = q_r[:, :, :, a:e], out_r[:, :, :, a:e]
        scores = [_scores(q_b, k_r, piece, group.window, exact) for piece in pieces]
        total = torch.stack([each.logsumexp(-1) for each in scores]).logsumexp(0)
        # A query of the block that sees no key of the part has -inf in place of every score.
        safe = total.masked_fill(total == float("-inf"), 0)
        if not is_only:
            sums = torch.zeros_like(sums)
        for each, piece in zip(scores, pieces, strict=True):
            weights = _stacked(each.sub_(safe.unsqueeze(-1)).exp_().to(q.dtype))
            sums += torch.bmm(weights, v_r[:, piece.start : piece.stop]).view(sums.shape)
        if is_only:
            lse_r[:, :, :, a:e] = total
        else:
            merge(out_r[:, :, :, a:e], lse_r[:, :, :, a:e], sums, total)


def _blocks_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: RowGroup,
    grad: Tensor,
    lse: Tensor,
    out: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> None:
    n, size, exact, at = k.shape[1], k.shape[3], d_q.dtype, slice(*group.rows)
    q_r, g_r, l_r, dq_r = (_grouped(x[at], n) for x in (q, grad, lse, d_q))
    p_r = _grouped(row_products(out[at], grad[at]), n)
    k_r, v_r = k[at].flatten(0, 1), v[at].flatten(0, 1)
    for a, e, pieces in group.blocks:
        q_b, g_b = _stacked(q_r[:, :, :, a:e]), _stacked(g_r[:, :, :, a:e])
        row_lse, row_sum = l_r[:, :, :, a:e].unsqueeze(-1), p_r[:, :, :, a:e].unsqueeze(-1)
        dq_b = dq_r[:, :, :, a:e]
        for piece in pieces:
            keys = slice(piece.start, piece.stop)
            weights = _scores(q_r[:, :, :, a:e], k_r, piece, group.window, exact).sub_(row_lse).exp_()
            d_weights = torch.bmm(g_b, v_r[:, keys].mT).view(weights.shape).to(exact)
            d_scores = _stacked(d_weights.sub_(row_sum).mul_(weights).mul_(size**-0.5).to(q.dtype))
            dq_b += torch.bmm(d_scores, k_r[:, keys]).view(dq_b.shape)
            for total, left, right in ((d_k, d_scores, q_b), (d_v, _stacked(weights.to(q.dtype)), g_b)):
                part = total[at, :, keys]
                part += torch.bmm(left.mT, right).view(part.shape)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the attention to one part of the keys into that to other parts, ``out`` and ``lse``, in place.

    Args:
        out: [B, H, T, K], in fp32 at least.
        lse: [B, H, T].
        other: Output of the other part, [B, H, T, K].
        other_lse: [B, H, T].
    """
    total = torch.logaddexp(lse, other_lse)
    safe = total.masked_fill(total == float("-inf"), 0)
    out.lerp_(other, (other_lse - safe).exp().unsqueeze(-1))
    lse.copy_(total)


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


def _grouped(x: Tensor, n: int) -> Tensor:
    """Return [B, H, ...] as [B, N, G, ...], a view."""
    return x.unflatten(1, (n, -1))


def _stacked(x: Tensor) -> Tensor:
    """Return [B, N, G, Q, ...] as [B·N, G·Q, ...]: the heads that share their keys as rows of one product."""
    return x.flatten(2, 3).flatten(0, 1)


def _scores(q: Tensor, k: Tensor, piece: KeyPiece, window: int | None, exact: torch.dtype) -> Tensor:
    """Return the masked scores of a block of queries [B, N, G, Q, K] with a piece of keys: [B, N, G, Q, S]."""
    queries, size = q.shape[3:]
    scores = torch.bmm(_stacked(q), k[:, piece.start : piece.stop].mT).to(exact).mul_(size**-0.5)
    scores = scores.view(*q.shape[:4], piece.stop - piece.start)
    if piece.is_whole:
        return scores
    distance = (
        piece.distance
        + torch.arange(queries, device=q.device)[:, None]
        - torch.arange(piece.stop - piece.start, device=q.device)
    )
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return scores.masked_fill_(hidden, float("-inf"))
