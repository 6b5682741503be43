"""Rotary positions in one launch, which reads a tensor of any strides, such as heads cut out of a fused product.

``split`` turns the queries and keys of a fused product, and copies its values, in one launch; ``join`` is its gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def _rows_of(size: int) -> tuple[int, int]:
    """Return the columns of a tile, which hold one half of a head, and its rows."""
    block = triton.next_power_of_2(size // 2)
    return block, max(1, _TILE // block)


def turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return ``x`` [B, H, T, K], whose last dim is dense, turned by [T, K/2] angles in fp32, or back; contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        batch, heads, places, size = x.shape
        block, rows = _rows_of(size)
        _turned[(triton.cdiv(batch * heads * places, rows),)](
            x,
            cos,
            sin,
            out,
            batch * heads * places,
            heads,
            places,
            size // 2,
            *x.stride()[:3],
            INVERSE=inverse,
            ROWS=rows,
            BLOCK=block,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["rows", "places"])
def _turned(
    x,
    cos,
    sin,
    out,
    rows,
    heads,
    places,
    half,
    batch_stride,
    head_stride,
    place_stride,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place, head, sample = row % places, row // places % heads, row // places // heads
    column = tl.arange(0, BLOCK)[None, :]
    here = (row < rows)[:, None] & (column < half)
    angle = (place * half)[:, None] + column
    dtype = x.dtype.element_ty
    c = tl.load(cos + angle, here, other=0.0).to(dtype).to(tl.float32)
    s = tl.load(sin + angle, here, other=0.0).to(dtype).to(tl.float32)
    if INVERSE:
        s = -s
    read = (sample * batch_stride + head * head_stride + place * place_stride)[:, None] + column
    a = tl.load(x + read, here, other=0.0).to(tl.float32)
    b = tl.load(x + read + half, here, other=0.0).to(tl.float32)
    write = (row * half * 2)[:, None] + column
    tl.store(out + write, (a * c - b * s).to(dtype), here)
    tl.store(out + write + half, (b * c + a * s).to(dtype), here)


def split(x: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys turned by [T, K/2] angles in fp32, and values, all contiguous.

    ``x`` is [B, T, H + 2N, K], whose last dim is dense, and the results are [B, H, T, K] and twice [B, N, T, K].
    """
    batch, places, heads, size = x.shape
    keys = (heads - queries) // 2
    q, k, v = (
        torch.empty(batch, each, places, size, dtype=x.dtype, device=x.device)
        for each in (queries, keys, keys)
    )
    if x.numel():
        block, rows = _rows_of(size)
        _split[(triton.cdiv(batch * places * heads, rows),)](
            x,
            cos,
            sin,
            q,
            k,
            v,
            batch * places * heads,
            places,
            queries,
            keys,
            size // 2,
            *x.stride()[:3],
            ROWS=rows,
            BLOCK=block,
            enable_fp_fusion=False,
        )
    return q, k, v


def join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the input of ``split``, contiguous, from those of its results, whose last dim is dense."""
    batch, queries, places, size = q.shape
    heads = queries + 2 * k.shape[1]
    out = torch.empty(batch, places, heads, size, dtype=q.dtype, device=q.device)
    if out.numel():
        block, rows = _rows_of(size)
        _join[(triton.cdiv(batch * places * heads, rows),)](
            q,
            k,
            v,
            cos,
            sin,
            out,
            batch * places * heads,
            places,
            queries,
            k.shape[1],
            size // 2,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            ROWS=rows,
            BLOCK=block,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _fused_tile(rows, places, heads, half, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return row, column, head, place and sample of the elements of a tile of [B, T, heads, K], and a mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    here = (row < rows)[:, None] & (column < half)
    return row, column, row % heads, row // heads % places, row // heads // places, here


@triton.jit(do_not_specialize=["rows", "places"])
def _split(
    x,
    cos,
    sin,
    q,
    k,
    v,
    rows,
    places,
    queries,
    keys,
    half,
    batch_stride,
    place_stride,
    head_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, head, place, sample, here = _fused_tile(rows, places, queries + 2 * keys, half, ROWS, BLOCK)
    turns = (head < queries + keys)[:, None]
    is_query, is_value = (head < queries)[:, None], (head >= queries + keys)[:, None]
    angle = (place * half)[:, None] + column
    dtype = x.dtype.element_ty
    c = tl.load(cos + angle, here & turns, other=1.0).to(dtype).to(tl.float32)
    s = tl.load(sin + angle, here & turns, other=0.0).to(dtype).to(tl.float32)
    read = (sample * batch_stride + place * place_stride + head * head_stride)[:, None] + column
    a = tl.load(x + read, here, other=0.0).to(tl.float32)
    b = tl.load(x + read + half, here, other=0.0).to(tl.float32)
    first = tl.where(turns, a * c - b * s, a).to(dtype)
    second = tl.where(turns, b * c + a * s, b).to(dtype)
    key = head - queries
    write = (((sample * queries + head) * places + place) * half * 2)[:, None] + column
    tl.store(q + write, first, here & is_query)
    tl.store(q + write + half, second, here & is_query)
    write = (((sample * keys + key) * places + place) * half * 2)[:, None] + column
    tl.store(k + write, first, here & turns & (key >= 0)[:, None])
    tl.store(k + write + half, second, here & turns & (key >= 0)[:, None])
    write = (((sample * keys + key - keys) * places + place) * half * 2)[:, None] + column
    tl.store(v + write, first, here & is_value)
    tl.store(v + write + half, second, here & is_value)


@triton.jit(do_not_specialize=["rows", "places"])
def _join(
    q,
    k,
    v,
    cos,
    sin,
    out,
    rows,
    places,
    queries,
    keys,
    half,
    q_batch,
    q_head,
    q_place,
    k_batch,
    k_head,
    k_place,
    v_batch,
    v_head,
    v_place,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, head, place, sample, here = _fused_tile(rows, places, queries + 2 * keys, half, ROWS, BLOCK)
    turns = (head < queries + keys)[:, None]
    is_query, is_value = (head < queries)[:, None], (head >= queries + keys)[:, None]
    key = head - queries
    is_key = turns & (key >= 0)[:, None]
    angle = (place * half)[:, None] + column
    dtype = out.dtype.element_ty
    c = tl.load(cos + angle, here & turns, other=1.0).to(dtype).to(tl.float32)
    s = -tl.load(sin + angle, here & turns, other=0.0).to(dtype).to(tl.float32)
    of_q = (sample * q_batch + head * q_head + place * q_place)[:, None] + column
    of_k = (sample * k_batch + key * k_head + place * k_place)[:, None] + column
    of_v = (sample * v_batch + (key - keys) * v_head + place * v_place)[:, None] + column
    a = tl.load(q + of_q, here & is_query, other=0.0).to(tl.float32)
    b = tl.load(q + of_q + half, here & is_query, other=0.0).to(tl.float32)
    a = tl.where(is_key, tl.load(k + of_k, here & is_key, other=0.0).to(tl.float32), a)
    b = tl.where(is_key, tl.load(k + of_k + half, here & is_key, other=0.0).to(tl.float32), b)
    a = tl.where(is_value, tl.load(v + of_v, here & is_value, other=0.0).to(tl.float32), a)
    b = tl.where(is_value, tl.load(v + of_v + half, here & is_value, other=0.0).to(tl.float32), b)
    write = (row * half * 2)[:, None] + column
    tl.store(out + write, tl.where(turns, a * c - b * s, a).to(dtype), here)
    tl.store(out + write + half, tl.where(turns, b * c + a * s, b).to(dtype), here)
