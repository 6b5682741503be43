"""Rotary positions: each pair of features turns by an angle that grows with the position.

    angle(t, j) = t / theta^(2j/K)                                  j in [0, K/2)
    out[j]       = x[j] cos - x[j + K/2] sin
    out[j + K/2] = x[j + K/2] cos + x[j] sin

so that query · key depends on the distance only. The pairs are (j, j + K/2), as in published weights.
The backward pass is the rotation by the opposite angle: nothing of the input is saved. Cosine and sine are rounded to
the input's dtype. On a device with Triton it is one kernel, which adds in fp32 and rounds once; the plain form rounds
each product. ``split_heads`` cuts a fused product into queries, keys and values and turns the first two; on a device
with Triton that is one kernel each way.

``scaling`` is LLaMA 3.1's change of the angles for contexts beyond the one trained on: frequencies that turn less
than ``low`` times over the original context slow down by ``factor``, those above ``high`` stay, and the change is
linear between them.

Papers: Su et al. 2021, arXiv:2104.09864; Dubey et al. 2024, arXiv:2407.21783.
Shapes: B batch, H heads, N key and value heads, T sequence, K head size.
"""

import math
from collections.abc import Sequence
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
    """Cosine and sine of every position's angles in fp32, each [T, K/2], or [B, 1, T, K/2] if sequences differ."""

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
    return angles_at(torch.arange(start, stop, device=device), size, theta, scaling)


def angles_at(
    positions: Tensor, size: int, theta: float, scaling: FrequencyScaling | None = None
) -> RotaryAngles:
    """Return the angles of ``positions`` for heads of ``size`` features.

    Args:
        positions: positions of the tokens, whole numbers, [T], or [B, T] if sequences differ.
        size: features of a head, K.
        theta: base of the frequencies.
        scaling: change for long contexts; None leaves the frequencies.
    """
    device = positions.device
    # The order of these operations matters: another order moves the far positions of published models by 1e-4.
    frequency = 1 / theta ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    if scaling is not None:
        turns = scaling.original_context * frequency / (2 * math.pi)
        keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / scaling.factor)
    if positions.dim() > 1:
        positions = positions.unsqueeze(1)  # all heads turn alike
    angle = positions.to(torch.float32).unsqueeze(-1) * frequency
    return RotaryAngles(angle.cos(), angle.sin())


def rotate(x: Tensor, at: RotaryAngles) -> Tensor:
    """Return x [B, H, T, K] turned by the angles of its T positions, contiguous."""
    if torch.compiler.is_compiling():
        return plain_rotate(
            x, at
        )  # The compiler fuses the formula, and refuses to write into halves of a tensor.
    if fused(x) and at.cos.dim() == 2:
        return _DeviceRotate.apply(x, at.cos, at.sin)
    return _Rotate.apply(x, at.cos.to(x.dtype), at.sin.to(x.dtype))


def plain_rotate(x: Tensor, at: RotaryAngles) -> Tensor:
    """Return ``rotate`` in plain torch operations: the reference."""
    a, b = x.chunk(2, -1)
    cos, sin = at.cos.to(x.dtype), at.sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def split_heads(
    x: Tensor, counts: Sequence[int], size: int, at: RotaryAngles | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a fused product, with queries and keys turned.

    Args:
        x: the product, [B, T, (H + 2N)K].
        counts: numbers of heads: (H, N, N).
        size: features of a head, K.
        at: angles of the T positions; None: nothing is turned, and the results are views of ``x``.

    Returns:
        [B, H, T, K], [B, N, T, K] and [B, N, T, K].
    """
    heads = x.unflatten(-1, (-1, size))  # [B, T, H + 2N, K]
    # The kernel reads angles that all sequences share.
    if at is not None and at.cos.dim() == 2 and fused(x) and not torch.compiler.is_compiling():
        found: tuple[Tensor, Tensor, Tensor] = _DeviceSplit.apply(heads, at.cos, at.sin, counts[0])
        return found
    # Cut before the transposition, or the backward pass would copy the joined gradient once more.
    q, k, v = (each.transpose(1, 2) for each in heads.split(list(counts), 2))
    if at is None:
        return q, k, v
    # Without contiguous(), v would be a view, and the backward pass would keep the whole fused output alive.
    return rotate(q, at), rotate(k, at), v.contiguous()


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

    return kernels.turned(_dense(x), cos.contiguous(), sin.contiguous(), inverse)


class _DeviceSplit(torch.autograd.Function):
    """``split_heads`` on a device, by one fused kernel each way."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, heads: Tensor, cos: Tensor, sin: Tensor, queries: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        found: tuple[Tensor, Tensor, Tensor] = _split(heads, cos, sin, queries)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _join(*grads, *ctx.saved_tensors), None, None, None  # type: ignore[attr-defined]


def _empty_heads(heads: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, ...]:
    batch, places, count, size = heads.shape
    keys = (count - queries) // 2
    return tuple(heads.new_empty(batch, each, places, size) for each in (queries, keys, keys))


@device_operation(
    "split_heads(Tensor heads, Tensor cos, Tensor sin, int queries) -> (Tensor, Tensor, Tensor)", _empty_heads
)
def _split(heads: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    if not fused(heads):
        cos, sin, keys = cos.to(heads.dtype), sin.to(heads.dtype), (heads.shape[2] - queries) // 2
        q, k, v = (each.transpose(1, 2) for each in heads.split([queries, keys, keys], 2))
        return _turn(q, cos, sin), _turn(k, cos, sin), v.clone(memory_format=torch.contiguous_format)
    from shardwise.kernels.fused import rotary as kernels

    return kernels.split(_dense(heads), cos.contiguous(), sin.contiguous(), queries)


@device_operation(
    "join_heads(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin) -> Tensor",
    lambda q, k, v, cos, sin: q.new_empty(
        q.shape[0], q.shape[2], q.shape[1] + k.shape[1] + v.shape[1], q.shape[3]
    ),
)
def _join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not fused(q, k, v):
        cos, back = cos.to(q.dtype), -sin.to(q.dtype)
        return torch.cat([each.transpose(1, 2) for each in (_turn(q, cos, back), _turn(k, cos, back), v)], 2)
    from shardwise.kernels.fused import rotary as kernels

    return kernels.join(_dense(q), _dense(k), _dense(v), cos.contiguous(), sin.contiguous())


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
