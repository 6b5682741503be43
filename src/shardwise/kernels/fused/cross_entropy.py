"""Cross entropy in two kernels: numbers of each row of logits, and their gradient.

The first reads a row once, a block at a time, and keeps the largest number so far and the sum of exponentials over it;
a block with a larger number scales the sum down.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def row_numbers(logits: Tensor, columns: Tensor) -> Tensor:
    """Return (largest, sum of exponentials over it, logit at the column) of rows of [N, V]: fp32 [3, N]."""
    out = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        block = min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
        _row_numbers[(len(logits),)](
            logits,
            columns,
            out,
            len(logits),
            logits.shape[1],
            logits.stride(0),
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return out


def gradient(logits: Tensor, columns: Tensor, lse: Tensor, of_all: Tensor, of_target: Tensor) -> Tensor:
    """Return exp(logits - lse) · of_all, with of_target added at the column: [N, V]."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
        _gradient[(len(logits), triton.cdiv(logits.shape[1], block))](
            logits,
            columns,
            lse,
            of_all,
            of_target,
            out,
            logits.shape[1],
            logits.stride(0),
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _row_numbers(logits, columns, out, rows, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(columns + row)
    largest, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        z = tl.load(logits + row * stride + column, column < width, other=float("-inf")).to(tl.float32)
        after = tl.maximum(largest, tl.max(z, 0))
        over = tl.where(after == float("-inf"), 0.0, after)
        total = total * tl.exp(largest - over) + tl.sum(tl.exp(z - over), 0)
        largest = after
    inside = (target >= 0) & (target < width)
    at_target = tl.load(logits + row * stride + target, inside, other=float("nan")).to(tl.float32)
    tl.store(out + row, largest)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, at_target)


@triton.jit
def _gradient(logits, columns, lse, of_all, of_target, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride + column, column < width, other=float("-inf")).to(tl.float32)
    d = tl.exp(z - tl.load(lse + row)) * tl.load(of_all + row)
    d = tl.where(column == tl.load(columns + row), d + tl.load(of_target + row), d)
    tl.store(out + row * width + column, d.to(out.dtype.element_ty), column < width)
