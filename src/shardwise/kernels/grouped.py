"""Grouped product: rows sorted by group, with a separate matrix for each group.

    out[r]  = rows[r] W_gᵀ              r in group g
    drows   = dout[r] W_g
    dW_g    = dout_gᵀ rows_g            zero if the group has no row

It is one operation of autograd, whatever the counts: a rank without a row keeps as many tensors as the others, and a
checkpoint stops at the same place on all of them. Products go straight into the result.
``torch.nn.functional.grouped_mm`` is no faster than this loop on a CPU, and refuses fp64.

Two products with silu(gate) · up between them are one operation too: the intermediate is as large as a group, not as
all rows, so that it stays in a cache and in memory that was touched before. On a CPU, fresh memory is what costs time.

Cost:   2·R·K·N operations forward, twice that backward.
Shapes: rows [R, K], weights [G, N, K], counts G numbers whose sum is R, out [R, N].
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels.operation import operation

_STRETCH_ELEMENTS = 1 << 17


@operation("product")
def grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply each row by the matrix of its group: [R, N]. The first ``counts[0]`` rows are of group 0, and so on."""
    product: Tensor = _GroupedProduct.apply(*_autocast(rows, weights), tuple(counts))
    return product


def plain_grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Return ``grouped_product`` in plain torch operations: the reference."""
    parts = rows.split(list(counts))
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


@operation("product")
def gated_experts(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute each row with the gated net of its group: [R, D].

    The outputs of gate and up are kept for each row. Their product is computed again in backward, group by group, in
    memory that is still in a cache.

    Args:
        rows: rows sorted by group, [R, D].
        gate_up: weights of gate, then up, [G, 2F, D].
        down: weights of the second layer, [G, D, F].
        counts: number of rows of each group.
    """
    cast = _autocast(rows, gate_up, down)
    out: Tensor = _GatedExperts.apply(*cast, tuple(counts), torch.is_grad_enabled())
    return out


def plain_gated_experts(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int]) -> Tensor:
    """Return ``gated_experts`` in plain torch operations: the reference."""
    gate, up = plain_grouped_product(rows, gate_up, counts).chunk(2, -1)
    return plain_grouped_product(F.silu(gate) * up, down, counts)


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the dtypes in which torch's own products take them under autocast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    narrow = torch.get_autocast_dtype(device)
    return [tensor.to(narrow) if tensor.dtype == torch.float32 else tensor for tensor in tensors]


def stretches(rows: Tensor) -> Iterator[slice]:
    """Yield ranges of ``rows`` [n, D] that stay in a core's cache from one operation to the next.

    On a device a single range.
    Large results are then written once instead of going to memory and back for each operation.
    """
    step = max(_STRETCH_ELEMENTS // max(rows.shape[1], 1), 1) if rows.device.type == "cpu" else len(rows) or 1
    for start in range(0, len(rows), step):
        yield slice(start, min(start + step, len(rows)))


def _places(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield the groups that have rows, with the ranges of these rows."""
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


class _GatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, gate_up: Tensor, down: Tensor, counts: tuple[int, ...], keeps: bool
    ) -> Tensor:
        out, kept = rows.new_empty(rows.shape[0], down.shape[1]), []
        for group, part in enumerate(rows.split(counts)):
            both = torch.mm(part, gate_up[group].T)
            hidden = both.new_empty(both.shape[0], both.shape[1] // 2)
            for place in stretches(both):
                gate, up = both[place].chunk(2, -1)
                torch.ops.aten.silu.out(gate, out=hidden[place])
                hidden[place].mul_(up)
            torch.mm(hidden, down[group].T, out=out.split(counts)[group])
            kept.append(both if keeps else part)
        ctx.save_for_backward(rows, gate_up, down, *kept)
        ctx.counts = counts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, gate_up, down, *kept = ctx.saved_tensors
        d_rows, d_gate_up, d_down = (
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip((rows, gate_up, down), ctx.needs_input_grad, strict=False)
        )
        parts = zip(rows.split(ctx.counts), grad.split(ctx.counts), kept, strict=True)
        for group, (part, own, both) in enumerate(parts):
            d_hidden = torch.mm(own, down[group])
            hidden, d_both = torch.empty_like(d_hidden), torch.empty_like(both)
            for place in stretches(both):
                _silu_backward(both[place], d_hidden[place], hidden[place], d_both[place])
            if d_down is not None:
                torch.mm(own.T, hidden, out=d_down[group])
            if d_gate_up is not None:
                torch.mm(d_both.T, part, out=d_gate_up[group])
            if d_rows is not None:
                torch.mm(d_both, gate_up[group], out=d_rows.split(ctx.counts)[group])
        return d_rows, d_gate_up, d_down, None, None


def _silu_backward(both: Tensor, d_hidden: Tensor, hidden: Tensor, d_both: Tensor) -> None:
    """Write ``hidden`` = silu(gate) · up again, and the gradient of ``both``; ``d_hidden`` is overwritten."""
    gate, up = both.chunk(2, -1)
    d_gate, d_up = d_both.chunk(2, -1)
    torch.ops.aten.silu.out(gate, out=hidden)
    torch.mul(d_hidden, hidden, out=d_up)
    hidden.mul_(up)
    torch.ops.aten.silu_backward.grad_input(d_hidden.mul_(up), gate, grad_input=d_gate)
