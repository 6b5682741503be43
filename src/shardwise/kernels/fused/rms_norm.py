"""RMSNorm in one launch forward; backward one for the input's gradient and parts of the weight's, and their sum.

A program of the backward pass takes every ``_PROGRAMS``-th group of rows and sums the weight's gradient over them;
one more kernel adds the programs' sums. Their number depends on shapes only: the same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 1 << 14
"""Width of the widest row, because a row is held in registers."""
_TILE = 2048
_PROGRAMS = 256


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x`` [N, D] over its root mean square times ``weight``, and 1 / that root, fp32 [N]."""
    out, r = torch.empty_like(x), torch.empty(len(x), dtype=torch.float32, device=x.device)
    if x.numel():
        block, rows, warps = _tile(x.shape[1])
        _normed[(triton.cdiv(len(x), rows),)](
            x,
            weight,
            out,
            r,
            len(x),
            x.shape[1],
            eps,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=True,
        )
    return out, r


def gradients(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and ``weight``."""
    d_x = torch.empty_like(x)
    if not x.numel():
        return d_x, torch.zeros_like(weight)
    block, rows, warps = _tile(x.shape[1])
    programs = min(_PROGRAMS, triton.cdiv(len(x), rows))
    parts = torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
    _gradients[(programs,)](
        grad,
        x,
        weight,
        r,
        d_x,
        parts,
        len(x),
        x.shape[1],
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    return d_x, parts.sum(0).to(weight.dtype)


def _tile(width: int) -> tuple[int, int, int]:
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    return block, rows, max(4, min(16, block * rows // 512))


@triton.jit(do_not_specialize=["rows"])
def _normed(x, weight, out, r, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < width)[None, :]
    at = (row * width)[:, None] + column[None, :]
    held = tl.load(x + at, here, other=0.0).to(tl.float32)
    w = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    root = 1 / tl.sqrt_rn(tl.sum(held * held, 1) / width + eps)
    tl.store(r + row, root, row < rows)
    tl.store(out + at, (held * root[:, None] * w[None, :]).to(out.dtype.element_ty), here)


@triton.jit(do_not_specialize=["rows"])
def _gradients(grad, x, weight, r, d_x, parts, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
        here = (row < rows)[:, None] & (column < width)[None, :]
        at = (row * width)[:, None] + column[None, :]
        held = tl.load(x + at, here, other=0.0).to(tl.float32)
        g = tl.load(grad + at, here, other=0.0).to(tl.float32)
        root = tl.load(r + row, row < rows, other=0.0)
        product = g * held
        d_weight += tl.sum(product * root[:, None], 0)
        pull = tl.sum(product * w[None, :], 1) * (root * root * root / -width)
        d_held = g * w[None, :] * root[:, None] + held * pull[:, None]
        tl.store(d_x + at, d_held.to(d_x.dtype.element_ty), here)
    tl.store(parts + tl.program_id(0) * width + column, d_weight, column < width)
