"""Mean cross entropy of large vocabularies, a few rows at a time, in fp32 whatever the logits' dtype.

    loss     = -1/n · sum over the n rows with a target of log softmax(z)[target]
    d loss/dz = (softmax(z) - onehot(target)) / n

Casting all logits to fp32 and keeping their log-softmax takes 20 bytes a logit at the peak in bf16. This function only
saves the logits themselves, and computes the gradient straight into its buffer: 4 bytes. As many rows are cast at a
time as stay in the cache. Without any target the loss is 0 with a gradient of 0, not 0/0: a rank without data can run.

A row's numbers and the gradient that follows from them are separate functions, because a vocabulary that is cut needs
them by parts (parallel/tensor/loss.py). On a device with Triton each is one kernel: exponentials and sums in fp32, over
blocks of a row in their order, and one rounding of the gradient. On any device a target outside the vocabulary makes
the loss and its row's gradient NaN, and the step reports it. On a CPU it raises: an assertion inside a kernel would end
the device's context of the process, and torch would report it in a later, unrelated operation.

Cost:  one exponential a logit in each direction, as usual.
Shapes: N rows, V vocabulary.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardwise.kernels.choice import fused, kernel_device
from shardwise.kernels.operation import device_operation

IGNORE = -100
"""Target that does not count: torch's convention."""

_CHUNK_ELEMENTS = {"cpu": 1 << 18}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 26
"""Number of logits that are cast to fp32 at once: what fits into a core's cache, or keeps an accelerator busy."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the targets that are not ``IGNORE``: [..., V], [...] -> [].

    The result is fp32 (fp64 for fp64 logits).
    """
    return _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log softmax(logits)[target], 0 for ``IGNORE``: [..., V], [...] -> [...].

    The result is fp32 (fp64 for fp64 logits). On a device a target outside the vocabulary gives NaN, to its row's
    gradient too.
    """
    rows = logits.reshape(-1, logits.shape[-1]).to(_wide(logits))
    inside, factors = _on_device_inside(targets.reshape(-1), rows)
    losses = F.cross_entropy(rows, inside, ignore_index=IGNORE, reduction="none")
    return -(losses if factors is None else losses * factors).view(targets.shape)


def plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return ``cross_entropy`` in plain torch operations: the reference."""
    wide = logits.reshape(-1, logits.shape[-1]).to(_wide(logits))
    total = F.cross_entropy(wide, targets.reshape(-1), ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp_min(1)


def _on_device_inside(targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the targets [N] with 0 for targets outside of rows [N, V], and factors that are NaN at these targets.

    The factors are None on a CPU, where torch raises an error that names the target.
    """
    if kernel_device(rows) == "cpu":
        return targets, None
    outside = ((targets < 0) | (targets >= rows.shape[1])) & (targets != IGNORE)
    factors = torch.ones_like(targets, dtype=rows.dtype).masked_fill_(outside, math.nan)
    return targets.masked_fill(outside, 0), factors


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of ``logits`` [N, V] that are cast to fp32 at once."""
    elements = _CHUNK_ELEMENTS.get(kernel_device(logits), _CHUNK_ELEMENTS_ELSEWHERE)
    rows = max(1, elements // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _no_rows(logits: Tensor, columns: Tensor) -> Tensor:
    return logits.new_empty(3, len(logits), dtype=_wide(logits))


@device_operation("row_numbers(Tensor logits, Tensor columns) -> Tensor", _no_rows)
def _row_numbers(logits: Tensor, columns: Tensor) -> Tensor:
    if not fused(logits):
        return plain_row_numbers(logits, columns)
    from shardwise.kernels.fused import cross_entropy as kernels

    return kernels.row_numbers(_dense_rows(logits), columns.contiguous())


def row_numbers(logits: Tensor, columns: Tensor) -> Tensor:
    """Return m = max z, sum exp(z - m), and z at the column of each row.

    [N, V], int64 [N, 1] -> fp32 or fp64 [3, N].
    """
    out: Tensor = (_row_numbers if fused(logits) else plain_row_numbers)(logits, columns)
    return out


def plain_row_numbers(logits: Tensor, columns: Tensor) -> Tensor:
    """Return ``row_numbers`` in plain torch operations: the reference."""
    wide = _wide(logits)
    numbers = logits.new_empty(3, len(logits), dtype=wide)
    for rows in row_chunks(logits):
        chunk = logits[rows].to(wide)
        numbers[0, rows], _ = chunk.max(-1)
        numbers[2, rows] = _at_columns(chunk, columns[rows])
        # Not in place: ``chunk`` is a view of the logits if these are wide already.
        numbers[1, rows] = (chunk - numbers[0, rows, None]).exp_().sum(-1)
    return numbers


def _at_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the number at a column of each row: [N, V], [N, 1] -> [N]. On a device it is NaN for a column outside."""
    if kernel_device(rows) == "cpu":
        return rows.gather(1, columns)[:, 0]
    outside = (columns < 0) | (columns >= rows.shape[1])
    return rows.gather(1, columns.masked_fill(outside, 0)).masked_fill_(outside, math.nan)[:, 0]


def _add_at_columns(rows: Tensor, columns: Tensor, addends: Tensor) -> Tensor:
    """Add a number at a column of each row, in place. On a device a column outside gives NaN to its row."""
    if kernel_device(rows) == "cpu":
        return rows.scatter_add_(1, columns, addends)
    outside = (columns < 0) | (columns >= rows.shape[1])
    return rows.scatter_add_(1, columns.masked_fill(outside, 0), addends.masked_fill(outside, math.nan))


@device_operation(
    "row_gradient(Tensor logits, Tensor columns, Tensor lse, Tensor of_all, Tensor of_target) -> Tensor",
    lambda logits, *numbers: logits.new_empty(logits.shape),
)
def _row_gradient(logits: Tensor, columns: Tensor, lse: Tensor, of_all: Tensor, of_target: Tensor) -> Tensor:
    if not fused(logits):
        return plain_row_gradient(logits, columns, lse, of_all, of_target)
    from shardwise.kernels.fused import cross_entropy as kernels

    numbers = (columns, lse, of_all, of_target)
    return kernels.gradient(_dense_rows(logits), *(each.contiguous() for each in numbers))


def row_gradient(logits: Tensor, columns: Tensor, lse: Tensor, of_all: Tensor, of_target: Tensor) -> Tensor:
    """Return exp(z - lse) · of_all, with of_target added at the column.

    Args:
        logits: z, [N, V].
        columns: column of each row's target, [N, 1].
        lse: logarithm of the sum of exponentials of each row, [N].
        of_all: factor of each row, [N, 1].
        of_target: addend at each row's column, [N, 1].

    Returns:
        [N, V].
    """
    form = _row_gradient if fused(logits) else plain_row_gradient
    out: Tensor = form(logits, columns, lse, of_all, of_target)
    return out


def plain_row_gradient(
    logits: Tensor, columns: Tensor, lse: Tensor, of_all: Tensor, of_target: Tensor
) -> Tensor:
    """Return ``row_gradient`` in plain torch operations: the reference."""
    d_logits = torch.empty_like(logits)
    for rows in row_chunks(logits):
        d_rows = torch.sub(logits[rows], lse[rows, None]).exp_().mul_(of_all[rows])
        d_logits[rows] = _add_at_columns(d_rows, columns[rows], of_target[rows])
    return d_logits


def _dense_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, targets: Tensor) -> Tensor:
        counts = targets != IGNORE
        # Other targets outside the vocabulary must still fail in gather, so only IGNORE is replaced.
        columns = targets.masked_fill(~counts, 0)[:, None]  # [N, 1]
        share = counts.to(_wide(logits)) / counts.sum().clamp_min(1)  # [N]
        if fused(logits):
            largest, total, at_target = row_numbers(logits, columns)
            lse = largest + total.log()
            losses, saved = at_target - lse, [lse]
        else:
            losses, saved = torch.empty_like(share), []
            for rows in row_chunks(logits):
                log_softmax = logits[rows].log_softmax(-1, dtype=share.dtype)
                losses[rows] = _at_columns(log_softmax, columns[rows])
        ctx.save_for_backward(logits, columns, share, *saved)
        ctx.counted_labels = counts.sum()  # type: ignore[attr-defined]  # the engine weighs the mean by this number
        return -torch.dot(losses.masked_fill_(~counts, 0), share)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        logits, columns, share, *saved = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = (share * grad)[:, None]  # [N, 1]
        if saved:
            return row_gradient(logits, columns, saved[0], scale, -scale), None
        d_logits = torch.empty_like(logits)
        for rows in row_chunks(logits):
            d_rows = logits[rows].softmax(-1, dtype=share.dtype).mul_(scale[rows])
            d_logits[rows] = _add_at_columns(d_rows, columns[rows], -scale[rows])
        return d_logits, None
