"""Head and mean cross entropy as one operation, a tile of tokens at a time: no whole logits, and no gradient of them.

    z  = x Wᵀ + b                                  for the tokens of one tile
    L  = Σ share · (lse - z[target])               lse = log Σ exp z;  share: 1/n for the n tokens with a target, else 0
    dz = share · (exp(z - lse) - onehot(target))
    dx = dz W        dW = Σ over tiles dzᵀ x        db = Σ dz

A tile's gradient is computed in one of two passes:

    at once       after its logits, in the forward pass: three products, as without tiles. dx and the sums of dW and db
                  wait for the backward pass, which multiplies them by the gradient of the loss
    in backward   the forward pass only keeps lse, the backward pass computes each tile's logits again: four products.
                  Used under fp16, whose gradients are zero without the scale of the loss, and if many passes wait for
                  their backward pass, each with a sum of the size of W

If the vocabulary is cut, lse needs numbers of each row from all ranks (``combine``). In backward, and without
gradients, the numbers of all tiles travel in one exchange. At once, a tile's numbers travel while the logits of the
next tile are computed, and its gradient starts after that: ranks that are not in step wait for at most a tile. One
exchange for all tiles would cost the fourth product there too, because dW sums rows that would have to be scaled first.

Sums of dW and db are kept in fp32 (fp64 for fp64) and returned once, so that a hook on the parameter gets one gradient.
Without gradients there is no gradient work; a frozen weight costs none. Rows of a tile go through the kernels of
``kernels/cross_entropy.py``.

Paper: Wijmans et al. 2024, arXiv:2411.09009 (there in one kernel); Hsu et al. 2024, arXiv:2410.10989 (at once).
Cost:  2·C·V elements beside x, dx, W and its sum (3·C·V while numbers travel); without tiles 2·N·V.
Shapes: N tokens, C tokens of a tile, D width, V vocabulary (a rank's part of it, if it is cut).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from shardwise.base.errors import UsageError
from shardwise.kernels.choice import kernel_device
from shardwise.kernels.cross_entropy import IGNORE, row_gradient, row_numbers
from shardwise.kernels.operation import operation

_TILE_BYTES = {"cpu": 64 << 20}
_TILE_BYTES_ELSEWHERE = 512 << 20
"""Bytes of a tile's logits under ``auto``: little of a host's or a device's memory, and hundreds of tokens for a
product that reads the whole weight.
"""
_LEAST_TOKENS = 128
"""Smallest number of tokens of a tile under ``auto``, however large the vocabulary."""
_BLOCK_ROWS = 16384
"""Rows of dW that a product in 16 bits computes at once, before they are added to the sum."""

RowTotals = tuple[Tensor, Tensor]
"""(lse, z[target]) of each row over the whole vocabulary; [N], [N]."""
Combine = Callable[[Tensor], Callable[[], RowTotals]]
"""Function that starts to exchange rows' numbers over this part of the vocabulary (``numbers_of``, [3, N]) and returns
a function that waits for the totals.
"""


Change = Callable[[Tensor], Tensor]
"""Function that a model applies to the logits before the loss (a factor, a cap): [C, V] -> [C, V]."""


class LossTile(NamedTuple):
    """Size of a tile, and the pass that computes its gradient."""

    tokens: int | None = None
    """Number of tokens of a tile; None chooses it (``auto``)."""
    at_once: bool = True
    """True if gradients are computed in the forward pass where that is possible."""

    def of(self, tokens: int, columns: int, x: Tensor) -> int:
        """Return the tokens of a tile for ``tokens`` rows like ``x`` [..., D] and ``columns`` columns; 0 for no tiles.

        There are no tiles if one would hold all tokens, or, under ``auto``, if logits and their gradient are smaller
        than the sum of dW that tiles keep.
        """
        size = self.tokens
        if size is None:
            if tokens * x.element_size() <= 2 * x.shape[-1]:
                return 0
            limit = _TILE_BYTES.get(kernel_device(x), _TILE_BYTES_ELSEWHERE)
            size = max(_LEAST_TOKENS, limit // max(1, columns * x.element_size()))
        return size if size < tokens else 0


class TargetRows(NamedTuple):
    """Targets of the rows of x, with the divisor of the loss."""

    columns: Tensor
    """Columns of the targets: int64 [N]."""
    counts: Tensor
    """True for rows with a target: bool [N]."""
    owned: Tensor
    """True for rows whose target is among the columns of this rank: bool [N]."""
    divisor: Tensor
    """Divisor of the sum of the losses: []."""
    counted: Tensor
    """Weight of the loss in a mean over several losses: []."""


def head_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tokens: int, at_once: bool = True
) -> Tensor:
    """Return the mean over the targets that are not ``IGNORE``: [..., D], [V, D], [V], [...] -> [].

    The result is fp32 (fp64 for fp64).

    Args:
        x: input of the head.
        weight: weight of the head.
        bias: bias of the head; may be None.
        targets: targets, or ``IGNORE``.
        tokens: tokens of a tile.
        at_once: True computes gradients in the forward pass.
    """
    targets = targets.reshape(-1)
    counts = targets != IGNORE
    # Other targets outside the vocabulary must still fail in gather, so only IGNORE is replaced.
    columns, counted = targets.masked_fill(~counts, 0), counts.sum()
    rows = TargetRows(columns, counts, counts, counted.clamp_min(1), counted)
    return summed_loss(x, weight, bias, rows, tokens, at_once)


@_disable_dynamo
@operation("product")
def summed_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: TargetRows,
    tokens: int,
    at_once: bool = True,
    combine: Combine | None = None,
    change: Change | None = None,
) -> Tensor:
    """Return the sum of the losses of the rows that count, over ``rows.divisor``: [..., D], [V, D], [V] -> [].

    Args:
        x: input of the head.
        weight: weight of the head, or this rank's part of it.
        bias: bias of the head; may be None.
        rows: targets of the rows.
        tokens: tokens of a tile.
        at_once: True computes gradients in the forward pass.
        combine: exchanges the numbers of rows with the other parts of the vocabulary; None if this part is all of it.
        change: applied to logits before the loss; its intermediate tensors are kept beside a tile's logits.
    """
    if torch.is_autocast_enabled(
        x.device.type
    ):  # Autocast skips products with ``out=`` and the backward pass.
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    x = x.reshape(-1, x.shape[-1])
    at_once = at_once and x.dtype != torch.float16 and torch.is_grad_enabled()
    loss: Tensor = _HeadLoss.apply(x, weight, bias, rows, tokens, at_once, combine or _alone, change)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: TargetRows,
        tokens: int,
        at_once: bool,
        combine: Combine,
        change: Change | None,
    ) -> Tensor:
        numbers: list[Tensor] = []
        found: list[RowTotals] = []
        sums = None
        if at_once and any(ctx.needs_input_grad):
            sums = _HeadGradients(x, weight, bias, ctx.needs_input_grad)
        share = 1 / rows.divisor.to(_wide(x))
        waiting: list[tuple[slice, _TileLogits, Callable[[], RowTotals]]] = []
        """Tiles without their gradients, whose numbers travel."""

        def end() -> None:
            tile, logits, totals = waiting.pop(0)
            found.append(totals())
            assert sums is not None, "a tile waits for its gradient"
            sums.add(tile, _gradient(logits, rows, tile, found[-1][0], share), x, weight)

        for tile in _tiles(x, tokens):
            logits = _TileLogits(F.linear(x[tile], weight, bias), change)  # [C, V]
            numbers.append(numbers_of(logits.z, rows.columns[tile], rows.owned[tile]))
            if sums is not None:
                waiting.append((tile, logits, combine(numbers.pop())))
            del logits  # otherwise two tiles' logits would be in memory at once
            while len(waiting) > (combine is not _alone):
                end()
        while waiting:
            end()
        if numbers:
            found = [combine(torch.cat(numbers, 1))()]
        lse, at_target = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.rows, ctx.tokens, ctx.sums, ctx.counted_labels = rows, tokens, sums, rows.counted
        ctx.change = change
        if sums is None:
            ctx.save_for_backward(x, weight, bias, lse)
        return (lse - at_target).masked_fill_(~rows.counts, 0).sum() * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.sums is None:
            return *_second_pass(ctx, grad), None, None, None, None, None
        if ctx.sums.handed_out:
            raise UsageError(
                "backward: an earlier backward pass took the gradients of this loss along; give that one "
                "retain_graph=True"
            )
        # The sums belong to the node, so they stay in memory as long as the loss is referenced.
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        return *ctx.sums.scaled(grad, keeps), None, None, None, None, None


def _second_pass(ctx: Any, grad: Tensor) -> Iterator[Tensor | None]:
    x, weight, bias, lse = ctx.saved_tensors
    sums, scale = _HeadGradients(x, weight, bias, ctx.needs_input_grad), grad / ctx.rows.divisor
    for tile in _tiles(x, ctx.tokens):
        logits = _TileLogits(F.linear(x[tile], weight, bias), ctx.change)
        sums.add(tile, _gradient(logits, ctx.rows, tile, lse[tile], scale), x, weight)
        del logits
    return sums.scaled(None)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _tiles(x: Tensor, tokens: int) -> Iterator[slice]:
    return (slice(start, start + tokens) for start in range(0, len(x), tokens))


def numbers_of(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """Return the largest, the sum of exponentials over it, and z[target] of each row: [3, C].

    z[target] is 0 if the target is not among this rank's columns.
    """
    if logits.shape[1]:
        found = row_numbers(logits, columns[:, None])
        found[2].masked_fill_(~owned, 0)
        return found
    found = logits.new_zeros(3, len(logits), dtype=_wide(logits))
    found[0].fill_(torch.finfo(found.dtype).min)
    return found


def _alone(numbers: Tensor) -> Callable[[], RowTotals]:
    return lambda: (numbers[0] + numbers[1].log(), numbers[2])


class _TileLogits:
    """Logits of a tile, as the loss takes them: ``z`` [C, V]."""

    def __init__(self, product: Tensor, change: Change | None) -> None:
        self.z, self._product, self._changed = product, product, product
        if change is not None:
            self._product = product.detach().requires_grad_()
            with torch.enable_grad():
                self._changed = change(self._product)
            self.z = self._changed.detach()

    def gradient(self, d_z: Tensor) -> Tensor:
        """Return the gradient of the head's output: [C, V]."""
        if self._changed is self._product:
            return d_z
        return torch.autograd.grad(self._changed, self._product, d_z.to(self._changed.dtype))[0]


def _gradient(logits: _TileLogits, rows: TargetRows, tile: slice, lse: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the tile's product: [C, V]."""
    if not logits.z.shape[1]:
        return logits.z
    of_all, of_target = (scale.to(lse.dtype) * each[tile, None] for each in (rows.counts, rows.owned))
    return logits.gradient(row_gradient(logits.z, rows.columns[tile, None], lse, of_all, -of_target))


class _HeadGradients:
    """dx, and the sums of dW and db, as far as they are needed."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Any) -> None:
        self.d_x = x.new_empty(x.shape) if needs[0] else None
        self.d_weight = weight.new_zeros(weight.shape, dtype=_wide(x)) if needs[1] else None
        self.d_bias = bias.new_zeros(bias.shape, dtype=_wide(x)) if bias is not None and needs[2] else None
        self.handed_out = False
        self._dtypes = x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype

    def add(self, tile: slice, d_logits: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add what the gradient of a tile's logits contributes."""
        if self.d_x is not None:
            torch.mm(d_logits, weight, out=self.d_x[tile])
        if self.d_weight is not None:
            add_product(self.d_weight, d_logits, x[tile])
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0, dtype=self.d_bias.dtype)

    def scaled(self, grad: Tensor | None, keeps: bool = False) -> Iterator[Tensor | None]:
        """Yield the gradients times ``grad``, in the dtypes of their tensors; in place unless ``keeps``."""
        sums = self.d_x, self.d_weight, self.d_bias
        if not keeps:
            self.d_x = self.d_weight = self.d_bias = None
            self.handed_out = True
        for found, dtype in zip(sums, self._dtypes, strict=True):
            if found is None or grad is None:
                yield None if found is None else found.to(dtype)
            elif found.dtype == dtype and not keeps:
                yield found.mul_(grad)
            else:
                yield torch.mul(found, grad.to(found.dtype), out=torch.empty_like(found, dtype=dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right to ``total``, whose dtype may be wider: [V, D], [C, V], [C, D]."""
    if total.dtype == right.dtype:
        total.addmm_(left.mT, right)
        return
    for start in range(0, len(total), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        total[block] += left[:, block].mT.mm(right)
