"""Rotary positions in one launch, which reads a tensor of any strides, such as heads cut out of a fused product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return ``x`` [B, H, T, K], whose last dim is dense, turned by [T, K/2] angles in fp32, or back; contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        batch, heads, places, size = x.shape
        block = triton.next_power_of_2(size // 2)
        rows = max(1, _TILE // block)
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
