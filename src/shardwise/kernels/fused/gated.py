"""The gate silu(gate) · up in one launch each way; both halves' gradients are written into one tensor."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def gated(gate_up: Tensor) -> Tensor:
    """Return silu of the first half of each row times the second: [N, 2F] contiguous -> [N, F]."""
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, hidden, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _gated[(rows, triton.cdiv(hidden, _BLOCK))](gate_up, out, hidden, BLOCK=_BLOCK, enable_fp_fusion=True)
    return out


def gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of both halves: [N, F], [N, 2F] contiguous -> [N, 2F]."""
    out = torch.empty_like(gate_up)
    rows, hidden = grad.shape
    if out.numel():
        _gradient[(rows, triton.cdiv(hidden, _BLOCK))](
            grad, gate_up, out, hidden, BLOCK=_BLOCK, enable_fp_fusion=True
        )
    return out


@triton.jit
def _gated(gate_up, out, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < hidden
    at = row * hidden * 2 + column
    gate = tl.load(gate_up + at, here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + hidden, here, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), here)


@triton.jit
def _gradient(grad, gate_up, out, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < hidden
    at = row * hidden * 2 + column
    gate = tl.load(gate_up + at, here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + hidden, here, other=0.0).to(tl.float32)
    g = tl.load(grad + row * hidden + column, here, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = g * up * share * (1 + gate * (1 - share))
    tl.store(out + at, d_gate.to(out.dtype.element_ty), here)
    tl.store(out + at + hidden, (g * gate * share).to(out.dtype.element_ty), here)
