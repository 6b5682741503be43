"""The choice of experts and their weights in one launch each way; a row of scores is held in registers.

Counts are added by atomic operations: they are integers, so their order does not matter. Entropies are summed by
program, then over programs in a fixed order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
_COUNTED = 1024


def _rows_of(experts: int) -> tuple[int, int]:
    block = triton.next_power_of_2(experts)
    return block, max(1, _TILE // block)


def chosen_experts(logits: Tensor, bias: Tensor | None, top_k: int, is_sigmoid: bool) -> Tensor:
    """Return the experts of largest score plus ``bias``: [n, E] contiguous -> int64 [n, k]."""
    n, experts = logits.shape
    out = torch.empty(n, top_k, dtype=torch.int64, device=logits.device)
    if n:
        block, rows = _rows_of(experts)
        _chosen_experts[(triton.cdiv(n, rows),)](
            logits,
            logits if bias is None else bias.contiguous(),
            out,
            n,
            experts,
            TOP_K=top_k,
            HAS_BIAS=bias is not None,
            IS_SIGMOID=is_sigmoid,
            ROWS=rows,
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return out


def expert_weights(
    logits: Tensor, index: Tensor, is_sigmoid: bool, normalizes: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the weights of the chosen experts, [n, k], and the scores of all, [n, E]."""
    n, experts = logits.shape
    weights = torch.empty(index.shape, dtype=logits.dtype, device=logits.device)
    scores = torch.empty_like(logits)
    if n:
        block, rows = _rows_of(experts)
        _expert_weights[(triton.cdiv(n, rows),)](
            logits,
            index,
            weights,
            scores,
            n,
            experts,
            scale,
            TOP_K=index.shape[1],
            IS_SIGMOID=is_sigmoid,
            NORMALIZES=normalizes,
            ROWS=rows,
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return weights, scores


def expert_weight_gradient(
    d_weights: Tensor,
    d_scores: Tensor | None,
    scores: Tensor,
    index: Tensor,
    is_sigmoid: bool,
    normalizes: bool,
    scale: float,
) -> Tensor:
    """Return the gradient of the logits: [n, E]."""
    n, experts = scores.shape
    out = torch.empty_like(scores)
    if n:
        block, rows = _rows_of(experts)
        _expert_weight_gradient[(triton.cdiv(n, rows),)](
            d_weights,
            scores if d_scores is None else d_scores,
            scores,
            index,
            out,
            n,
            experts,
            scale,
            TOP_K=index.shape[1],
            HAS_SCORES=d_scores is not None,
            IS_SIGMOID=is_sigmoid,
            NORMALIZES=normalizes,
            ROWS=rows,
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return out


def route_counts(index: Tensor, experts: int, places: Sequence[int], first: int) -> Tensor:
    """Return ``first``, the pairs of each expert, and the rows that reach each place: int64 [1 + E + Σ places]."""
    counts = torch.zeros(1 + experts + sum(places), dtype=torch.int64, device=index.device)
    start = 1 + experts
    for level, each in enumerate(places):
        padded = triton.next_power_of_2(each)
        tile = max(_COUNTED // padded, 16)
        _route_counts[(max(triton.cdiv(len(index), tile), 1),)](
            index,
            counts,
            len(index),
            experts,
            experts // each,
            start,
            first,
            TOP_K=index.shape[1],
            PLACES=each,
            PADDED=padded,
            IS_FIRST=level == 0,
            TILE=tile,
            enable_fp_fusion=True,
        )
        start += each
    return counts


def load_counts(chosen: Tensor, kept: Tensor, scores: Tensor, is_sigmoid: bool, beside: int) -> Tensor:
    """Return the pairs by expert, those kept, the tokens, zeros, and the sum of entropies: fp64 [2·E + beside]."""
    n, experts = scores.shape
    loads = torch.zeros(2 * experts + beside, dtype=torch.float64, device=scores.device)
    if n:
        block, rows = _rows_of(experts)
        programs = triton.cdiv(n, rows)
        parts = torch.empty(programs, dtype=torch.float64, device=scores.device)
        _load_counts[(programs,)](
            chosen,
            kept,
            scores,
            loads,
            parts,
            n,
            experts,
            TOP_K=chosen.shape[1],
            IS_SIGMOID=is_sigmoid,
            ROWS=rows,
            BLOCK=block,
            enable_fp_fusion=True,
        )
        torch.sum(parts, 0, out=loads[-1])
    return loads


@triton.jit
def _tile(rows, experts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows and experts of a program's tile of [rows, experts], the offset of each element, and a mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (expert < experts)[None, :]
    return row, expert, row[:, None] * experts + expert[None, :], here


@triton.jit
def _score_of(scores, expert, chosen):
    """Return the score of the chosen expert of each row: 0 if it is -1."""
    return tl.sum(tl.where(expert[None, :] == chosen[:, None], scores, 0.0), 1)


@triton.jit
def _scores(logits, IS_SIGMOID: tl.constexpr):
    """Return the scores of logits [ROWS, BLOCK], which are -inf where there is no expert."""
    if IS_SIGMOID:
        return 1 / (1 + tl.exp(-logits))
    above = tl.exp(logits - tl.max(logits, 1)[:, None])
    return above / tl.sum(above, 1)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _chosen_experts(
    logits,
    bias,
    out,
    rows,
    experts,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, expert, at, here = _tile(rows, experts, ROWS, BLOCK)
    held = tl.load(logits + at, here, other=-float("inf"))
    seen = _scores(held, IS_SIGMOID)
    if HAS_BIAS:
        seen += tl.load(bias + expert, expert < experts, other=0.0)[None, :].to(tl.float32)
    seen = tl.where((expert < experts)[None, :], seen, -float("inf"))
    for j in range(TOP_K):
        best = tl.minimum(tl.argmax(seen, 1), experts - 1)
        tl.store(out + row * TOP_K + j, best.to(tl.int64), row < rows)
        seen = tl.where(expert[None, :] == best[:, None], -float("inf"), seen)


@triton.jit(do_not_specialize=["rows"])
def _expert_weights(
    logits,
    index,
    weights,
    scores,
    rows,
    experts,
    scale,
    TOP_K: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, expert, at, here = _tile(rows, experts, ROWS, BLOCK)
    found = _scores(tl.load(logits + at, here, other=-float("inf")), IS_SIGMOID)
    tl.store(scores + at, found, here)
    total = tl.zeros([ROWS], tl.float32) + 1e-20
    for j in range(TOP_K):
        own = tl.load(index + row * TOP_K + j, row < rows, other=-1)
        total += _score_of(found, expert, own)
    for j in range(TOP_K):
        own = tl.load(index + row * TOP_K + j, row < rows, other=-1)
        chosen = _score_of(found, expert, own)
        if NORMALIZES:
            chosen = chosen / total
        tl.store(weights + row * TOP_K + j, chosen * scale, row < rows)


@triton.jit(do_not_specialize=["rows"])
def _expert_weight_gradient(
    d_weights,
    d_scores,
    scores,
    index,
    out,
    rows,
    experts,
    scale,
    TOP_K: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, expert, at, here = _tile(rows, experts, ROWS, BLOCK)
    held = tl.load(scores + at, here, other=0.0)
    pull = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_SCORES:
        pull = tl.load(d_scores + at, here, other=0.0)
    total = tl.zeros([ROWS], tl.float32) + 1e-20
    dot = tl.zeros([ROWS], tl.float32)
    if NORMALIZES:
        for j in range(TOP_K):
            own = tl.load(index + row * TOP_K + j, row < rows, other=-1)
            chosen = _score_of(held, expert, own)
            total += chosen
            dot += chosen * tl.load(d_weights + row * TOP_K + j, row < rows, other=0.0) * scale
    for j in range(TOP_K):
        own = tl.load(index + row * TOP_K + j, row < rows, other=-1)
        given = tl.load(d_weights + row * TOP_K + j, row < rows, other=0.0) * scale
        if NORMALIZES:
            given = (given - dot / total) / total
        pull += tl.where(expert[None, :] == own[:, None], given[:, None], 0.0)
    whole = pull if IS_SIGMOID else pull - tl.sum(pull * held, 1)[:, None]
    tl.store(out + at, whole * held * (1 - held) if IS_SIGMOID else whole * held, here)


@triton.jit(do_not_specialize=["rows", "first"])
def _route_counts(
    index,
    counts,
    rows,
    experts,
    local,
    start,
    first,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    IS_FIRST: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, PADDED)
    hit = tl.zeros([TILE, PADDED], tl.int32)
    for j in range(TOP_K):
        expert = tl.load(index + row * TOP_K + j, row < rows, other=-1)
        lives = expert >= 0
        hit = tl.where(tl.where(lives, expert // local, -1)[:, None] == place[None, :], 1, hit)
        if IS_FIRST:
            tl.atomic_add(counts + 1 + expert, tl.full([TILE], 1, tl.int64), lives)
    tl.atomic_add(counts + start + place, tl.sum(hit, 0).to(tl.int64), place < PLACES)
    if IS_FIRST and tl.program_id(0) == 0:
        tl.store(counts, first)


@triton.jit(do_not_specialize=["rows"])
def _load_counts(
    chosen,
    kept,
    scores,
    loads,
    parts,
    rows,
    experts,
    TOP_K: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for j in range(TOP_K):
        routed = tl.load(chosen + row * TOP_K + j, row < rows, other=-1)
        tl.atomic_add(loads + routed, tl.full([ROWS], 1, tl.float64), routed >= 0)
        stayed = tl.load(kept + row * TOP_K + j, row < rows, other=-1)
        tl.atomic_add(loads + experts + stayed, tl.full([ROWS], 1, tl.float64), stayed >= 0)
    expert = tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (expert < experts)[None, :]
    held = tl.load(scores + row[:, None] * experts + expert[None, :], here, other=0.0).to(tl.float32)
    if IS_SIGMOID:
        held = held / (tl.sum(held, 1)[:, None] + 1e-20)
    counts = tl.load(chosen + row * TOP_K, row < rows, other=-1) >= 0
    entropy = tl.where(
        held > 0, -held * tl.log(tl.where(held > 0, held, 1.0)), tl.where(held == 0, 0.0, held)
    )
    entropy = tl.where(counts, tl.sum(entropy, 1), 0.0)
    tl.store(parts + tl.program_id(0), tl.sum(entropy.to(tl.float64), 0))
    tokens = tl.sum(counts.to(tl.int32), 0)
    tl.atomic_add(loads + 2 * experts, tokens.to(tl.float64))
