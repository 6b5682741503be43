"""RMSNorm with a backward pass that reads its input twice instead of nine times.

    y  = x · r · w              r = (mean(x²) + eps)^-1/2, one number a row
    dw = (g · x)ᵀ r             matrix times vector
    dx = g·w·r - x · r³/D · ((g · x) w)

Autograd's version of the plain formula writes every intermediate; here the two reductions are BLAS calls on one
product. 16-bit input is computed in fp32 and rounded once. On a device with Triton it is one kernel forward and two
backward, with the same roundings and sums in another order; without Triton, torch's own kernel if the dtypes are equal.

    s = x + a,  y = rms_norm(s)          ds = dx of above + the gradient that reaches s by its other use

``rms_norm_of_sum`` computes the sum of a residual block in the launch of the norm behind the sum, and adds the two
gradients of the residual stream in the launch of the norm's gradient.

Paper: Zhang and Sennrich 2019, arXiv:1910.07467.
Cost:  saves x and r; backward makes two temporaries of x's size in fp32.
Shapes: x [..., D], w [D].
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardwise.kernels.choice import fused, kernel_device
from shardwise.kernels.operation import device_operation, operation

_WIDEST = 1 << 14
"""Length of the longest row that Triton's form holds at once."""


@operation("fp32")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x over its root mean square along the last dim, times ``weight``, in x's dtype: [..., D]."""
    if torch.compiler.is_compiling():
        return plain_rms_norm(x, weight, eps)  # The compiler fuses the formula.
    if _is_fused(x, weight):
        return _RmsNormFunction.apply(x, weight, eps)
    if kernel_device(x) == "cpu":
        # Autocast chooses dtypes op by op, which the kernel's two reductions would mix.
        return (
            plain_rms_norm(x, weight, eps)
            if torch.is_autocast_enabled("cpu")
            else _RmsNormFunction.apply(x, weight, eps)
        )
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return plain_rms_norm(x, weight, eps)


def joins_sum(weight: Tensor, *addends: Tensor) -> bool:
    """Return whether ``rms_norm_of_sum`` takes fewer launches for these addends than a sum and a norm.

    The dtypes must be equal: a mode that chooses dtypes by operation keeps weights in fp32, and treats sum and norm
    differently.
    """
    return (
        all(each.dtype == weight.dtype and _is_fused(each, weight) for each in addends)
        and not torch.compiler.is_compiling()
    )


def rms_norm_of_sum(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + added and its ``rms_norm``, by the kernel of a device: twice [..., D].

    Args:
        x: the residual stream, [..., D]
        added: the output of a part of the block, [..., D]; None: ``x`` itself is normed, and returned.
        weight: the norm's weight, [D].
        eps: the number that is added to the mean square.
    """
    found: tuple[Tensor, Tensor] = _SumNormFunction.apply(x, added, weight, eps)
    return found


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``rms_norm`` in plain torch operations: the reference."""
    wide = _at_least_fp32(x)
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def _is_fused(x: Tensor, weight: Tensor) -> bool:
    return fused(x, weight) and x.shape[-1] <= _WIDEST


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.forms = (_normed, _gradients) if _is_fused(x, weight) else (_plain_normed, _plain_gradients)  # type: ignore[attr-defined]
        out, r = ctx.forms[0](x, weight, eps)  # type: ignore[attr-defined]
        ctx.save_for_backward(x, weight, r)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors  # type: ignore[attr-defined]
        d_x, d_weight = ctx.forms[1](grad, x, weight, r)  # type: ignore[attr-defined]
        return d_x, d_weight, None


def _plain_normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _at_least_fp32(x)
    r = torch.linalg.vecdot(wide, wide)[..., None].div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
    return torch.mul(wide, r).mul_(weight).to(x.dtype), r


def _plain_gradients(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    d = x.shape[-1]
    wide_x, wide_w, r = _at_least_fp32(x).reshape(-1, d), _at_least_fp32(weight), r.view(-1, 1)
    g = _at_least_fp32(grad).reshape(-1, d)
    product = g * wide_x
    d_weight = torch.mv(product.T, r[:, 0])
    pull = torch.mv(product, wide_w)[:, None] * (r**3 / -d)  # [rows, 1]
    d_x = torch.mul(g, wide_w, out=product).mul_(r).addcmul_(wide_x, pull)
    return d_x.to(x.dtype).view_as(x), d_weight.to(weight.dtype)


class _SumNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, added: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if added is None:
            total = x
            out, r = _normed(x, weight, eps)
        else:
            out, r, total = _normed_sum(x, added, weight, eps)
        ctx.save_for_backward(total, weight, r)
        ctx.adds = added is not None  # type: ignore[attr-defined]
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        total, weight, r = ctx.saved_tensors  # type: ignore[attr-defined]
        d_total, d_weight = _sum_gradients(grads[1], total, weight, r, grads[0])
        return d_total, d_total if ctx.adds else None, d_weight, None  # type: ignore[attr-defined]


@device_operation(
    "rms_normed(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: (x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)),
)
def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not fused(x, weight):
        return _plain_normed(x, weight, eps)
    from shardwise.kernels.fused import rms_norm as kernels

    out, r, _ = kernels.normed(_rows(x), weight.contiguous(), eps)
    return out.view(x.shape), r.view(*x.shape[:-1], 1)


@device_operation(
    "rms_normed_sum(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, added, weight, eps: (
        x.new_empty(x.shape),
        x.new_empty(*x.shape[:-1], 1, dtype=torch.float32),
        x.new_empty(x.shape),
    ),
)
def _normed_sum(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not fused(x, added, weight):
        total = x + added
        return *_plain_normed(total, weight, eps), total
    from shardwise.kernels.fused import rms_norm as kernels

    out, r, total = kernels.normed(_rows(x), weight.contiguous(), eps, _rows(added))
    return out.view(x.shape), r.view(*x.shape[:-1], 1), total.view(x.shape)


@device_operation(
    "rms_norm_gradients(Tensor grad, Tensor x, Tensor weight, Tensor r) -> (Tensor, Tensor)",
    lambda grad, x, weight, r: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
def _gradients(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    if not fused(grad, x, weight):
        return _plain_gradients(grad, x, weight, r)
    from shardwise.kernels.fused import rms_norm as kernels

    d_x, d_weight = kernels.gradients(_rows(grad), _rows(x), weight.contiguous(), r)
    return d_x.view(x.shape), d_weight


@device_operation(
    "rms_norm_sum_gradients(Tensor grad, Tensor total, Tensor weight, Tensor r, Tensor further) -> (Tensor, Tensor)",
    lambda grad, total, weight, r, further: (total.new_empty(total.shape), weight.new_empty(weight.shape)),
)
def _sum_gradients(
    grad: Tensor, total: Tensor, weight: Tensor, r: Tensor, further: Tensor
) -> tuple[Tensor, Tensor]:
    if not fused(grad, total, weight, further):
        d_total, d_weight = _plain_gradients(grad, total, weight, r)
        return d_total.add_(further), d_weight
    from shardwise.kernels.fused import rms_norm as kernels

    d_total, d_weight = kernels.gradients(_rows(grad), _rows(total), weight.contiguous(), r, _rows(further))
    return d_total.view(total.shape), d_weight


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
