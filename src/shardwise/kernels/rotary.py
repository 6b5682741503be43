"""Rotary positions: each pair of features turns by an angle that grows with the position.

    angle(t, j) = t / theta^(2j/K)                                  j in [0, K/2)
    out[j]       = x[j] cos - x[j + K/2] sin
    out[j + K/2] = x[j + K/2] cos + x[j] sin

so that query · key depends on the distance only. The pairs are (j, j + K/2), as in published weights.
The backward pass is the rotation by the opposite angle: nothing of the input is saved. Cosine and sine are rounded to
the input's dtype. On a device with Triton it is one kernel, which adds in fp32 and rounds once; the plain form rounds
each product.

``scaling`` is LLaMA 3.1's change of the angles for contexts beyond the one trained on: frequencies that turn less
than ``low`` times over the original context slow down by ``factor``, those above ``high`` stay, and the change is
linear between them.

Papers: Su et al. 2021, arXiv:2104.09864; Dubey et al. 2024, arXiv:2407.21783.
Shapes: B batch, H heads, T sequence, K head size.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardwise.kernels.choice import fused
from shardwise.kernels.operation import device_operation


class FrequencyScaling(NamedTuple):
    """Numbers by which frequencies are slowed down for long contexts."""

    factor: float
    """Factor by which low frequencies slow down."""
    low: float
    """Number of turns over the original context below which a frequency slows down fully."""
    high: float
    """Number of turns over the original context above which a frequency stays."""
    original_context: int
    """Length in tokens of the context trained on."""


class RotaryAngles(NamedTuple):
    """Cosine and sine of every position's angles, each [T, K/2] in fp32."""

    cos: Tensor
    sin: Tensor


def angles(
    start: int,
    stop: int,
    size: int,
    theta: float,
    device: torch.device,
    scaling: FrequencyScaling | None = None,
) -> RotaryAngles:
    """Return the angles of positions [start, stop) for heads of ``size`` features.

    Angles are a function of the position instead of a buffer, so there is nothing to save, to move, or to forget on the
    meta device.

    Args:
        start: first position.
        stop: end of the positions.
        size: features of a head, K.
        theta: base of the frequencies.
        device: device of the angles.
        scaling: change for long contexts; None leaves the frequencies.
    """
    # The order of these operations matters: another order moves the far positions of published models by 1e-4.
    frequency = 1 / theta ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    if scaling is not None:
        turns = scaling.original_context * frequency / (2 * math.pi)
        keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / scaling.factor)
    angle = torch.arange(start, stop, device=device, dtype=torch.float32)[:, None] * frequency
    return RotaryAngles(angle.cos(), angle.sin())


def rotate(x: Tensor, at: RotaryAngles) -> Tensor:
    """Return x [B, H, T, K] turned by the angles of its T positions, contiguous."""
    if torch.compiler.is_compiling():
        return plain_rotate(
            x, at
        )  # The compiler fuses the formula, and refuses to write into halves of a tensor.
    if fused(x):
        return _DeviceRotate.apply(x, at.cos, at.sin)
    return _Rotate.apply(x, at.cos.to(x.dtype), at.sin.to(x.dtype))


def plain_rotate(x: Tensor, at: RotaryAngles) -> Tensor:
    """Return ``rotate`` in plain torch operations: the reference."""
    a, b = x.chunk(2, -1)
    cos, sin = at.cos.to(x.dtype), at.sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    a, b = x.chunk(2, -1)
    out_a, out_b = out.chunk(2, -1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return _turn(grad, cos, -sin), None, None


class _DeviceRotate(torch.autograd.Function):
    """Rotation on a device, by the fused kernel."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out: Tensor = _turned(x, cos, sin, False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _turned(grad, *ctx.saved_tensors, True), None, None  # type: ignore[attr-defined]


@device_operation(
    "turned(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    lambda x, cos, sin, inverse: x.new_empty(x.shape),
)
def _turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    if not fused(x):
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return _turn(x, cos, -sin if inverse else sin)
    from shardwise.kernels.fused import rotary as kernels

    dense = x if x.stride(-1) == 1 else x.contiguous()
    return kernels.turned(dense, cos.contiguous(), sin.contiguous(), inverse)
