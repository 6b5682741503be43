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
        # Each tensor is cut once for all groups: with many groups, the cuts would take longer than the products.
        cuts = (rows.split(counts), out.split(counts), gate_up.mT.unbind(), down.mT.unbind())
        for part, result, first, second in zip(*cuts, strict=True):
            both = torch.mm(part, first)
            kept.append(both if keeps else part)
            if len(part):
                torch.mm(_gated(both), second, out=result)
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
        cuts = (rows.split(ctx.counts), grad.split(ctx.counts), kept, gate_up.unbind(), down.unbind())
        into_first = _cut(d_gate_up, len(kept))
        into_second = _cut(d_down, len(kept))
        into_rows = [None] * len(kept) if d_rows is None else d_rows.split(ctx.counts)
        results = (into_first, into_second, into_rows)
        for part, own, both, first, second, d_first, d_second, d_part in zip(*cuts, *results, strict=True):
            d_hidden = torch.mm(own, second)
            hidden, d_both = torch.empty_like(d_hidden), torch.empty_like(both)
            for place in stretches(both):
                _silu_backward(both[place], d_hidden[place], hidden[place], d_both[place])
            if d_second is not None:
                torch.mm(own.T, hidden, out=d_second)
            if d_first is not None:
                torch.mm(d_both.T, part, out=d_first)
            if d_part is not None:
                torch.mm(d_both, first, out=d_part)
        return d_rows, d_gate_up, d_down, None, None


def _cut(stacked: Tensor | None, groups: int) -> Sequence[Tensor | None]:
    """Return the matrix of each group, or None for each group if there are none."""
    return [None] * groups if stacked is None else stacked.unbind()


def _gated(both: Tensor) -> Tensor:
    """Return silu(gate) · up of the columns of gate, then up."""
    gates, ups = both.chunk(2, -1)
    hidden = torch.empty_like(gates, memory_format=torch.contiguous_format)
    places = list(stretches(both))
    if len(places) == 1:
        return torch.ops.aten.silu.out(gates, out=hidden).mul_(ups)  # type: ignore[no-any-return]
    for place in places:
        torch.ops.aten.silu.out(gates[place], out=hidden[place])
        hidden[place].mul_(ups[place])
    return hidden


def _silu_backward(both: Tensor, d_hidden: Tensor, hidden: Tensor, d_both: Tensor) -> None:
    """Write ``hidden`` = silu(gate) · up again, and the gradient of ``both``; ``d_hidden`` is overwritten."""
    gate, up = both.chunk(2, -1)
    d_gate, d_up = d_both.chunk(2, -1)
    torch.ops.aten.silu.out(gate, out=hidden)
    torch.mul(d_hidden, hidden, out=d_up)
    hidden.mul_(up)
    torch.ops.aten.silu_backward.grad_input(d_hidden.mul_(up), gate, grad_input=d_gate)
