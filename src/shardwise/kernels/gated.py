"""The gate of a SwiGLU net, on the product that holds both halves.

    y       = silu(gate) · up                      silu(z) = z σ(z)
    dgate   = g · up · σ(gate) (1 + gate (1 - σ(gate)))
    dup     = g · silu(gate)

The plain form is torch's two operations. On a device with Triton it is one kernel each way, which keeps only the
product, while autograd also keeps silu(gate), and writes both gradients into one tensor; the kernel computes in fp32
and rounds once where the plain form rounds twice.

Paper: Shazeer 2020, arXiv:2002.05202.
Cost:  reads 2F and writes F elements a row; backward reads 3F and writes 2F.
Shapes: gate_up [..., 2F], gate first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwise.kernels.choice import fused
from shardwise.kernels.operation import device_operation


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up of the halves of the last dim: [..., 2F] -> [..., F]."""
    if type(gate_up) is not Tensor and has_torch_function_unary(gate_up):
        noted: Tensor = handle_torch_function(gated, (gate_up,), gate_up)
        return noted
    if fused(gate_up) and not torch.compiler.is_compiling():
        return _Gated.apply(gate_up)
    return plain_gated(gate_up)


def plain_gated(gate_up: Tensor) -> Tensor:
    """Return ``gated`` in plain torch operations: the reference."""
    half, up = gate_up.chunk(2, -1)
    return F.silu(half) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        out: Tensor = gate(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors  # type: ignore[attr-defined]
        out: Tensor = gate_gradient(grad, gate_up)
        return out


@device_operation(
    "gated(Tensor gate_up) -> Tensor",
    lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
)
def gate(gate_up: Tensor) -> Tensor:
    """Return ``gated`` without a gradient, as one operation."""
    if not fused(gate_up):
        return plain_gated(gate_up)
    from shardwise.kernels.fused import gated as kernels

    rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
    return kernels.gated(rows).view(*gate_up.shape[:-1], -1)


@device_operation(
    "gated_gradient(Tensor grad, Tensor gate_up) -> Tensor",
    lambda grad, gate_up: gate_up.new_empty(gate_up.shape),
)
def gate_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of ``gate_up``, of which ``grad`` is that of ``gated``, as one operation: [..., 2F]."""
    if not fused(grad, gate_up):
        half, up = gate_up.chunk(2, -1)
        return torch.cat([torch.ops.aten.silu_backward(grad * up, half), grad * F.silu(half)], -1)
    from shardwise.kernels.fused import gated as kernels

    rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
    held = grad.reshape(-1, grad.shape[-1]).contiguous()
    return kernels.gradient(held, rows).view(gate_up.shape)
