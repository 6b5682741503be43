"""Mean cross entropy of logits whose vocabulary is cut: no rank ever holds the logits of a whole row.

    m_i = max z_i        s_i = sum exp(z_i - m_i)        t_i = z[target] where rank i holds it, else 0
    M   = max m_i        lse = M + log sum s_i exp(m_i - M)        loss = mean(lse - sum t_i)
    log p = sum t_i - lse                                d log p/dz = onehot(target) - exp(z - lse)

One all-gather of (m, s, t) a row; every rank then computes the same bits. Rows are cast to fp32 a few at a time, the
logits themselves are all that is saved, and the gradient is computed straight into its buffer, as in
``kernels/cross_entropy.py``; together with the head, by tiles of rows, not even they are made whole
(``kernels/head_loss.py``). Any vocabulary: a rank may hold fewer columns than another, or none.

Paper: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (there three all-reduces).
Cost:  3·N·(tp-1) elements sent per rank; the logits and their gradient take 2·N·V/tp elements.
Shapes: N rows, V vocabulary, a rank's logits [..., V/tp].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.kernels.cross_entropy import IGNORE, row_gradient
from shardwise.kernels.head_loss import Change, RowTotals, TargetRows, numbers_of, summed_loss


@uncompiled
def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, first: int, vocabulary: int, group: Group, count: Tensor | None = None
) -> Tensor:
    """Mean over the targets that are not ``IGNORE``, or their sum over ``count``; fp32 (fp64 for fp64 logits).

    logits   [..., V/tp], columns [first, first + V/tp) of ``vocabulary``;  targets [...] over the whole vocabulary
    """
    found = vocabulary_log_probs(logits, targets, first, vocabulary, group).reshape(-1)
    counts = (targets != IGNORE).reshape(-1)
    return -found.sum() / (counts.sum().clamp_min(1) if count is None else count)


@uncompiled
def vocabulary_log_probs(
    logits: Tensor, targets: Tensor, first: int, vocabulary: int, group: Group
) -> Tensor:
    """log softmax(logits)[target] of every row, 0 where the target is ``IGNORE``: [...]; dtypes and shapes as above."""
    rows = logits.flatten(0, -2)
    found: Tensor = _VocabularyLogProbs.apply(rows, targets.reshape(-1), first, vocabulary, group)
    return found.view(targets.shape)


@uncompiled
def vocabulary_head_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    first: int,
    vocabulary: int,
    group: Group,
    tokens: int,
    at_once: bool = True,
    count: Tensor | None = None,
    change: Change | None = None,
) -> Tensor:
    """``vocabulary_cross_entropy`` of the logits of ``x`` [..., D], which are made ``tokens`` rows at a time, and go
    through ``change`` first.

    ``weight`` [V/tp, D]; the gradient of ``x`` is this rank's addend.
    """
    columns, counts, owned = _placed(targets.reshape(-1), first, len(weight), vocabulary)
    counted = counts.sum()
    divisor = counted.clamp_min(1) if count is None else torch.as_tensor(count, device=x.device)
    rows = TargetRows(columns, counts, owned, divisor, counted if count is None else divisor)
    return summed_loss(
        x, weight, bias, rows, tokens, at_once, lambda numbers: _of_all_ranks(numbers, group), change
    )


def _placed(targets: Tensor, first: int, held: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of the targets [N] among ``held`` ones from ``first`` on, which rows count, which of these lie here."""
    counts = targets != IGNORE
    # Targets of other ranks are masked; those of no rank must still fail in gather, on every rank.
    columns = targets - first
    foreign = (targets < vocabulary) & (targets >= 0) & ((columns < 0) | (columns >= held))
    columns = columns.masked_fill(foreign | ~counts, 0).masked_fill((targets >= vocabulary), -1)
    columns = columns.masked_fill((targets < 0) & counts, -1)
    return columns, counts, counts & ~foreign


def _of_all_ranks(numbers: Tensor, group: Group) -> Callable[[], RowTotals]:
    """lse and the logit at the target, of (m, s, t) of every rank, on their way: [3, N] -> [N], [N]."""
    every = numbers.new_empty(group.size, *numbers.shape)
    pending = group.all_gather(every.view(-1), numbers.view(-1), "the loss", "activations")

    def totals() -> RowTotals:
        pending.wait()
        largest = every[:, 0].amax(0)
        total = (every[:, 1] * (every[:, 0] - largest).exp_()).sum(0)
        return largest + total.log_(), every[:, 2].sum(0)

    return totals


class _VocabularyLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, vocabulary: int, group: Group
    ) -> Tensor:
        columns, counts, owned = _placed(targets, first, logits.shape[1], vocabulary)
        lse, at_target = _of_all_ranks(numbers_of(logits, columns, owned), group)()
        ctx.counted_rows = counts.sum()  # for who weighs a loss made of it
        ctx.gives = "WHOLE"
        ctx.save_for_backward(logits, columns[:, None], lse, counts, owned)
        return (at_target - lse).masked_fill_(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        logits, columns, lse, counts, owned = ctx.saved_tensors
        scale, owned_scale = (grad * counts)[:, None], (grad * owned)[:, None]  # [N, 1]
        if logits.shape[1]:
            d_logits = row_gradient(logits, columns, lse, -scale, owned_scale)
        else:
            d_logits = torch.empty_like(logits)
        return d_logits, None, None, None, None
