"""Grouped product: rows sorted by group, each group with a matrix of its own.

    out[r]  = rows[r] W_gᵀ              r in group g
    drows   = dout[r] W_g
    dW_g    = dout_gᵀ rows_g            zero where the group has no row

One operation of autograd, whatever the counts: it always keeps ``rows`` and ``weights``, so a rank without a row keeps
as many tensors as the others, and a checkpoint stops at the same place on all of them. Products go straight into the
result. ``torch.nn.functional.grouped_mm`` is no faster than this loop on a CPU and refuses fp64.

Cost:   2·R·K·N operations forward, twice that backward.
Shapes: rows [R, K], weights [G, N, K], counts G numbers whose sum is R, out [R, N].
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Each row times the matrix of its group: [R, N]. The first ``counts[0]`` rows are of group 0, and so on."""
    product: Tensor = _GroupedProduct.apply(rows, weights, tuple(counts))
    return product


def plain_grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """The formula as it stands: the reference."""
    parts = rows.split(list(counts))
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of rows that hold gate and up side by side: [R, 2F] -> [R, F]. Keeps ``gate_up`` alone."""
    hidden: Tensor = _SwiGlu.apply(gate_up)
    return hidden


def _places(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Groups that have rows, with where these lie."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.counts = counts
        out = rows.new_empty(rows.shape[0], weights.shape[1])
        for group, place in _places(counts):
            torch.mm(rows[place], weights[group].T, out=out[place])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weights = ctx.saved_tensors
        needs_rows, needs_weights, _ = ctx.needs_input_grad
        d_rows = torch.empty_like(rows) if needs_rows else None
        d_weights = torch.empty_like(weights) if needs_weights else None
        if d_weights is not None:
            for group, count in enumerate(ctx.counts):
                if not count:
                    d_weights[group].zero_()
        for group, place in _places(ctx.counts):
            if d_weights is not None:
                torch.mm(grad[place].T, rows[place], out=d_weights[group])
            if d_rows is not None:
                torch.mm(grad[place], weights[group], out=d_rows[place])
        return d_rows, d_weights, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return d_gate_up
