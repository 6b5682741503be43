"""RMSNorm in one launch forward; backward one for the input's gradient and parts of the weight's, and their sum.

A program of the backward pass takes every ``_PROGRAMS``-th group of rows and sums the weight's gradient over them;
one more kernel adds the programs' sums. Their number depends on shapes only: the same bits in every run.

The residual sum in front of the norm, and the sum of the two gradients that meet behind it, are computed in the same
launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 1 << 14
"""Width of the widest row, because a row is held in registers."""
_TILE = 2048
_PROGRAMS = 256
_COLUMNS = 64


def normed(
    x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of ``x`` + ``added`` [N, D] times ``weight``, 1 / root mean square, fp32 [N], and the sum [N, D].

    Without ``added`` the sum is ``x`` itself.
    """
    out, r = torch.empty_like(x), torch.empty(len(x), dtype=torch.float32, device=x.device)
    total = x if added is None else torch.empty_like(x)
    if x.numel():
        block, rows, warps = _tile(x.shape[1])
        _normed[(triton.cdiv(len(x), rows),)](
            x,
            x if added is None else added,
            weight,
            total,
            out,
            r,
            len(x),
            x.shape[1],
            eps,
            ADDS=added is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=True,
        )
    return out, r, total


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, further: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x``, to which ``further`` is added, and of ``weight``."""
    d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
    if not x.numel():
        return d_x, d_weight.zero_()
    block, rows, warps = _tile(x.shape[1])
    programs = min(_PROGRAMS, triton.cdiv(len(x), rows))
    parts = torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
    _gradients[(programs,)](
        grad,
        x,
        weight,
        r,
        x if further is None else further,
        d_x,
        parts,
        len(x),
        x.shape[1],
        ADDS=further is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    _summed[(triton.cdiv(x.shape[1], _COLUMNS),)](
        parts, d_weight, programs, x.shape[1], ROWS=_COLUMNS, BLOCK=_COLUMNS
    )
    return d_x, d_weight


def _tile(width: int) -> tuple[int, int, int]:
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    return block, rows, max(4, min(16, block * rows // 512))


@triton.jit(do_not_specialize=["rows"])
def _normed(
    x,
    added,
    weight,
    total,
    out,
    r,
    rows,
    width,
    eps,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < width)[None, :]
    at = (row * width)[:, None] + column[None, :]
    held = tl.load(x + at, here, other=0.0).to(tl.float32)
    if ADDS:
        addend = tl.load(added + at, here, other=0.0).to(tl.float32)
        rounded = (held + addend).to(total.dtype.element_ty)
        tl.store(total + at, rounded, here)
        held = rounded.to(tl.float32)
    w = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    root = 1 / tl.sqrt_rn(tl.sum(held * held, 1) / width + eps)
    tl.store(r + row, root, row < rows)
    tl.store(out + at, (held * root[:, None] * w[None, :]).to(out.dtype.element_ty), here)


@triton.jit(do_not_specialize=["rows"])
def _gradients(
    grad,
    x,
    weight,
    r,
    further,
    d_x,
    parts,
    rows,
    width,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        if ADDS:
            d_held += tl.load(further + at, here, other=0.0).to(tl.float32)
        tl.store(d_x + at, d_held.to(d_x.dtype.element_ty), here)
    tl.store(parts + tl.program_id(0) * width + column, d_weight, column < width)


@triton.jit(do_not_specialize=["programs"])
def _summed(parts, out, programs, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        here = (row < programs)[:, None] & (column < width)[None, :]
        total += tl.sum(tl.load(parts + (row * width)[:, None] + column[None, :], here, other=0.0), 0)
    tl.store(out + column, total.to(out.dtype.element_ty), column < width)
