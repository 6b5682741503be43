"""Grouped product: rows sorted by group, with a separate matrix for each group.

    out[r]  = rows[r] W_gᵀ              r in group g
    drows   = dout[r] W_g
    dW_g    = dout_gᵀ rows_g            zero if the group has no row

It is one operation of autograd, whatever the counts: a rank without a row keeps as many tensors as the others, and a
checkpoint stops at the same place on all of them. Products go straight into the result.

Each product has two forms. The loop makes one matrix product for each group, and needs the numbers of rows on the host.
``torch.nn.functional.grouped_mm`` is one launch for all groups, and reads where they end on the device: it serves bf16
on devices where it does not wait for the host (``choice.has_grouped_mm``), if rows and matrices begin at multiples of
16 bytes. On a CPU it is no faster than the loop, and it refuses fp64.

Two products with silu(gate) · up between them are one operation too. On a CPU the loop's intermediate is as large as a
group, not as all rows, so that it stays in a cache and in memory that was touched before: fresh memory is what costs
time there. Where all rows fit into a cache, and on a device, the gate of all groups is computed at once.

Cost:   2·R·K·N operations forward, twice that backward.
Shapes: rows [R, K], weights [G, N, K], sizes: G numbers whose sum is at most R, out [R, N]. Rows behind the last group
        belong to none; their results and gradients are undefined.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels import choice
from shardwise.kernels.deferred import Deferral, ProductQueue, deferral_of, later
from shardwise.kernels.gated import gate, gate_gradient
from shardwise.kernels.operation import operation

_TwoDeferrals = tuple[Deferral | None, Deferral | None]
"""Where the gradients of gate and up, and of down, wait for W."""
_STRETCH_ELEMENTS = 1 << 17
_ALIGNED_BYTES = 16


class GroupSizes(Sequence[int]):
    """Numbers of rows of groups, which lie on the host or on a device until they are needed on the other.

    Args:
        counts: the numbers; None if the host does not have them.
        ends: where each group ends, int32 [G]; None if the device does not have them.
    """

    def __init__(self, counts: Sequence[int] | None, ends: Tensor | None = None) -> None:
        assert counts is not None or ends is not None, "sizes are given in one of two forms"
        self._counts = None if counts is None else tuple(counts)
        self._ends = ends

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of rows of each group; the host waits for the device if only the device has them."""
        if self._counts is None:
            assert self._ends is not None, "sizes are given in one of two forms"
            ends = self._ends.tolist()
            self._counts = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        return self._counts

    def ends(self, device: torch.device) -> Tensor:
        """Return where each group ends, on ``device``: int32 [G]."""
        if self._ends is None:
            ends = torch.tensor(list(accumulate(self.counts)), dtype=torch.int32)
            self._ends = ends if device.type == "cpu" else ends.pin_memory().to(device, non_blocking=True)
        return self._ends

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.counts) if self._ends is None else len(self._ends)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        """Return the number of rows of a group."""
        return self.counts[place]


def sizes_of(sizes: Sequence[int]) -> GroupSizes:
    """Return ``sizes`` itself, or numbers of the host as ``GroupSizes``."""
    return sizes if isinstance(sizes, GroupSizes) else GroupSizes(sizes)


@operation("product")
def grouped_product(
    rows: Tensor, weights: Tensor, sizes: Sequence[int], waits: Deferral | None = None
) -> Tensor:
    """Multiply each row by the matrix of its group: [R, N]. The first ``sizes[0]`` rows are of group 0, and so on.

    Args:
        rows: rows sorted by group, [R, K].
        weights: matrix of each group, [G, N, K].
        sizes: number of rows of each group.
        waits: where the gradient of ``weights`` waits for W; None: it is computed with that of ``rows``.
    """
    rows, weights = _autocast(rows, weights)
    form = _GroupedMm if is_one_launch(rows, weights) else _GroupedProduct
    product: Tensor = form.apply(rows, weights, sizes_of(sizes), waits)
    return product


def plain_grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Return ``grouped_product`` in plain torch operations: the reference."""
    parts = rows.split(list(counts))
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


@operation("product")
def gated_experts(
    rows: Tensor,
    gate_up: Tensor,
    down: Tensor,
    sizes: Sequence[int],
    queue: ProductQueue | None = None,
) -> Tensor:
    """Compute each row with the gated net of its group: [R, D].

    The outputs of gate and up are kept for each row. Their product is computed again in backward.

    Args:
        rows: rows sorted by group, [R, D].
        gate_up: weights of gate, then up, [G, 2F, D].
        down: weights of the second layer, [G, D, F].
        sizes: number of rows of each group.
        queue: products that wait for W, to which those of the weights' gradients are added; None: none wait.
    """
    waits = deferral_of(queue, gate_up, rows), deferral_of(queue, down, rows)
    cast = _autocast(rows, gate_up, down)
    form = _GatedMm if is_one_launch(*cast) else _GatedExperts
    out: Tensor = form.apply(*cast, sizes_of(sizes), torch.is_grad_enabled(), waits)
    return out


def plain_gated_experts(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int]) -> Tensor:
    """Return ``gated_experts`` in plain torch operations: the reference."""
    gate, up = plain_grouped_product(rows, gate_up, counts).chunk(2, -1)
    return plain_grouped_product(F.silu(gate) * up, down, counts)


def is_one_launch(rows: Tensor, *stacks: Tensor) -> bool:
    """Return whether ``grouped_mm`` serves these rows [R, K] and stacks of matrices [G, N, K]."""
    if rows.dtype != torch.bfloat16 or not choice.has_grouped_mm(rows.device):
        return False
    sizes = {size for stack in stacks for size in stack.shape[1:]}
    return (
        all(stack.dtype == torch.bfloat16 and stack.is_contiguous() for stack in stacks)
        and all(size * rows.itemsize % _ALIGNED_BYTES == 0 for size in sizes)
        and all(tensor.data_ptr() % _ALIGNED_BYTES == 0 for tensor in (rows, *stacks))
        and len(stacks[0]) <= _MOST_GROUPS
    )


_MOST_GROUPS = 1023
"""Number of groups that torch's kernel takes."""


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


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, sizes: GroupSizes, waits: Deferral | None) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.sizes, ctx.waits = sizes, waits
        return _mm(rows, weights.mT, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weights = ctx.saved_tensors
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        grad, sizes, d_weights = grad.contiguous(), ctx.sizes, None
        d_rows = _mm(grad, weights, sizes) if needs_rows else None
        if needs_weights:
            d_weights = later(ctx.waits, lambda: _mm(grad.mT, rows.contiguous(), sizes), grad, rows)
        return d_rows, d_weights, None, None


class _GatedMm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        gate_up: Tensor,
        down: Tensor,
        sizes: GroupSizes,
        keeps: bool,
        waits: _TwoDeferrals,
    ) -> Tensor:
        both = _mm(rows, gate_up.mT, sizes)
        ctx.save_for_backward(rows, gate_up, down, both)
        ctx.sizes, ctx.waits = sizes, waits
        return _mm(gate(both), down.mT, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, gate_up, down, both = ctx.saved_tensors
        needs_rows, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        grad, sizes, (of_gate_up, of_down) = grad.contiguous(), ctx.sizes, ctx.waits
        d_gate_up = d_down = None
        if needs_down:
            d_down = later(of_down, lambda: _mm(grad.mT, gate(both), sizes), grad, both)
        if not needs_rows and not needs_gate_up:
            return None, None, d_down, None, None, None
        d_both = gate_gradient(_mm(grad, down, sizes), both)
        if needs_gate_up:
            d_gate_up = later(of_gate_up, lambda: _mm(d_both.mT, rows.contiguous(), sizes), d_both, rows)
        return _mm(d_both, gate_up, sizes) if needs_rows else None, d_gate_up, d_down, None, None, None


def _mm(a: Tensor, b: Tensor, sizes: GroupSizes) -> Tensor:
    """Return the products of the groups: [R, K], [G, K, N] -> [R, N], or [M, R], [R, N] -> [G, M, N]."""
    return F.grouped_mm(a, b, offs=sizes.ends(a.device))


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, sizes: GroupSizes, waits: Deferral | None) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.counts, ctx.waits = sizes.counts, waits
        out = rows.new_empty(rows.shape[0], weights.shape[1])
        matrices = weights.mT.unbind()
        for group, place in _places(ctx.counts):
            torch.mm(rows[place], matrices[group], out=out[place])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weights = ctx.saved_tensors
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        d_rows = torch.empty_like(rows) if needs_rows else None
        waits = needs_weights and ctx.waits is not None and ctx.waits.is_open
        if waits:
            counts, shape = ctx.counts, weights.shape
            later(ctx.waits, lambda: _stack_product(grad, rows, counts, shape), grad, rows)
        d_weights = torch.empty_like(weights) if needs_weights and not waits else None
        if d_weights is not None:
            for group, count in enumerate(ctx.counts):
                if not count:
                    d_weights[group].zero_()
        for group, place in _places(ctx.counts):
            if d_weights is not None:
                torch.mm(grad[place].T, rows[place], out=d_weights[group])
            if d_rows is not None:
                torch.mm(grad[place], weights[group], out=d_rows[place])
        return d_rows, d_weights, None, None


def _stack_product(grad: Tensor, rows: Tensor, counts: Sequence[int], shape: torch.Size) -> Tensor:
    """Return the gradient of a stack of matrices [G, N, K] from the groups of ``grad`` [R, N] and ``rows`` [R, K]."""
    return _stack_of(_split(grad, counts), _split(rows, counts), grad, shape)


def _stack_of(grads: Sequence[Tensor], rows: Sequence[Tensor], like: Tensor, shape: torch.Size) -> Tensor:
    """Return the products of each group's ``grads`` [n, N] and ``rows`` [n, K], stacked: [G, N, K]."""
    stacked = like.new_empty(shape)
    _multiply([part.T for part in grads], rows, stacked.unbind())
    return stacked


class _GatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        gate_up: Tensor,
        down: Tensor,
        sizes: GroupSizes,
        keeps: bool,
        waits: _TwoDeferrals,
    ) -> Tensor:
        counts, columns = sizes.counts, gate_up.shape[1]
        at_once = _is_at_once(rows, columns)
        out = rows.new_empty(rows.shape[0], down.shape[1])
        both = rows.new_empty(rows.shape[0] if keeps or at_once else 0, columns)
        # Each tensor is cut once for all groups: with many groups, the cuts would take longer than the products.
        parts, results, firsts, seconds = (
            _split(rows, counts), _split(out, counts), gate_up.mT.unbind(), down.mT.unbind()
        )  # fmt: skip
        kept: Sequence[Tensor | None] = _split(both, counts) if len(both) else [None] * len(counts)
        if at_once:
            _multiply(parts, firsts, kept)
            _multiply(_split(_gated(both), counts), seconds, results)
        else:
            for part, first, second, into, result in zip(parts, firsts, seconds, kept, results, strict=True):
                product = torch.mm(part, first) if into is None else torch.mm(part, first, out=into)
                torch.mm(_gated(product), second, out=result)
        ctx.save_for_backward(rows, gate_up, down, both)
        ctx.counts, ctx.waits = counts, waits
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, gate_up, down, both = ctx.saved_tensors
        counts, groups = ctx.counts, len(ctx.counts)
        needs, (of_gate_up, of_down) = ctx.needs_input_grad, ctx.waits
        gate_up_waits, down_waits = (
            needed and waits is not None and waits.is_open
            for needed, waits in zip(needs[1:3], (of_gate_up, of_down), strict=True)
        )
        now = needs[0], needs[1] and not gate_up_waits, needs[2] and not down_waits
        d_rows, d_gate_up, d_down = (
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip((rows, gate_up, down), now, strict=True)
        )
        into_rows = [None] * groups if d_rows is None else _split(d_rows, counts)
        places = _Gradients(
            _split(grad, counts), _split(rows, counts), gate_up.unbind(), down.unbind(),
            _cut(d_gate_up, groups), _cut(d_down, groups), into_rows,
        )  # fmt: skip
        hidden: list[Tensor] = []
        of_both: list[Tensor] = []
        parts_of_both = [both] if _is_at_once(rows, gate_up.shape[1]) else _split(both, counts)
        step = groups // len(parts_of_both)
        for place, product in enumerate(parts_of_both):
            start = place * step
            made = places.of_groups(start, start + step, product, counts[start : start + step])
            if gate_up_waits or down_waits:
                hidden += made[0]
                of_both += made[1]
        if down_waits:
            grads, down_shape = places.grads, down.shape
            later(of_down, lambda: _stack_of(grads, hidden, grad, down_shape), grad, *hidden)
        if gate_up_waits:
            parts, up_shape = places.rows, gate_up.shape
            later(of_gate_up, lambda: _stack_of(of_both, parts, grad, up_shape), rows, *of_both)
        return d_rows, d_gate_up, d_down, None, None, None


class _Gradients(NamedTuple):
    """Tensors of each group in a backward pass, and the tensors that get its gradients; None where none is needed."""

    grads: Sequence[Tensor]
    rows: Sequence[Tensor]
    firsts: Sequence[Tensor]
    seconds: Sequence[Tensor]
    into_firsts: Sequence[Tensor | None]
    into_seconds: Sequence[Tensor | None]
    into_rows: Sequence[Tensor | None]

    def of_groups(
        self, start: int, stop: int, both: Tensor, counts: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Write the gradients of groups ``start`` to ``stop``; ``both`` has their products with gate and up.

        Returns:
            silu(gate) · up, and the gradient of ``both``, by group.
        """
        own = slice(start, stop)
        grads = self.grads[own]
        d_hidden = both.new_empty(both.shape[0], both.shape[1] // 2)
        _multiply(grads, self.seconds[own], _split(d_hidden, counts))
        hidden, d_both = torch.empty_like(d_hidden), torch.empty_like(both)
        for place in stretches(both):
            _silu_backward(both[place], d_hidden[place], hidden[place], d_both[place])
        of_both, of_hidden = _split(d_both, counts), _split(hidden, counts)
        _multiply([grad.T for grad in grads], of_hidden, self.into_seconds[own])
        _multiply([part.T for part in of_both], self.rows[own], self.into_firsts[own])
        _multiply(of_both, self.firsts[own], self.into_rows[own])
        return of_hidden, of_both


def _is_at_once(rows: Tensor, columns: int) -> bool:
    """Return whether the gate of all groups is computed at once: on a device, and where ``columns`` stay in a cache."""
    return rows.device.type != "cpu" or rows.shape[0] * columns <= _STRETCH_ELEMENTS


def _split(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the rows of each group; rows behind the last group are left out."""
    rest = rows.shape[0] - sum(counts)
    return rows.split([*counts, rest])[:-1] if rest else rows.split(counts)  # type: ignore[arg-type]


def _multiply(lefts: Sequence[Tensor], rights: Sequence[Tensor], into: Sequence[Tensor | None]) -> None:
    """Write the product of each pair of matrices."""
    for left, right, result in zip(lefts, rights, into, strict=True):
        if result is not None:
            torch.mm(left, right, out=result)


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
