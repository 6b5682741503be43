"""Mean cross entropy of logits whose vocabulary is cut: no rank ever holds the logits of a whole row.

    m_i = max z_i        s_i = sum exp(z_i - m_i)        t_i = z[target] if rank i holds it, else 0
    M   = max m_i        lse = M + log sum s_i exp(m_i - M)        loss = mean(lse - sum t_i)
    log p = sum t_i - lse                                d log p/dz = onehot(target) - exp(z - lse)

One all-gather of (m, s, t) a row; every rank then computes the same bits. Rows are cast to fp32 a few at a time, only
the logits are saved for the backward pass, and the gradient is computed directly into its buffer, as in
``kernels/cross_entropy.py``. Together with the head, by tiles of rows, even the rank's logits never exist in full
(``kernels/head_loss.py``). The vocabulary may have any size: a rank may hold fewer columns than another, or none.

Paper: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (with three all-reduces).
Cost:  3·N·(tp-1) elements sent per rank; the logits and their gradient take 2·N·V/tp elements.
Shapes: N rows, V vocabulary, a rank's logits [..., V/tp].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm.operators import ExchangeSite, exchange_operator
from shardwise.kernels.cross_entropy import IGNORE, row_gradient
from shardwise.kernels.head_loss import Change, RowTotals, TargetRows, numbers_of, summed_loss


def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    first: int,
    vocabulary: int,
    site: ExchangeSite,
    count: Tensor | None = None,
) -> Tensor:
    """Return the mean loss over the targets that are not ``IGNORE``, in fp32 (fp64 for fp64 logits).

    Args:
        logits: This rank's columns [..., V/tp] of the logits.
        targets: Token ids [...] of the whole vocabulary.
        first: Index in the vocabulary of this rank's first column.
        vocabulary: Size of the whole vocabulary.
        site: The "tp" ranks and the name of the loss.
        count: Divisor of the summed loss, or None for the number of counted targets.

    Returns:
        The loss, the same on every rank.
    """
    found = vocabulary_log_probs(logits, targets, first, vocabulary, site).reshape(-1)
    counts = (targets != IGNORE).reshape(-1)
    return -found.sum() / (counts.sum().clamp_min(1) if count is None else count)


def vocabulary_log_probs(
    logits: Tensor, targets: Tensor, first: int, vocabulary: int, site: ExchangeSite
) -> Tensor:
    """Return log softmax(logits)[target] of every row, and 0 if the target is ``IGNORE``.

    Args:
        logits: This rank's columns [..., V/tp] of the logits.
        targets: Token ids [...] of the whole vocabulary.
        first: Index in the vocabulary of this rank's first column.
        vocabulary: Size of the whole vocabulary.
        site: The "tp" ranks and the name of the loss.

    Returns:
        Log-probabilities [...], the same on every rank; fp32 (fp64 for fp64 logits).
    """
    rows = logits.flatten(0, -2)
    found: Tensor = _VocabularyLogProbs.apply(rows, targets.reshape(-1), first, vocabulary, site)
    return found.view(targets.shape)


def vocabulary_head_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    first: int,
    vocabulary: int,
    site: ExchangeSite,
    tokens: int,
    at_once: bool = True,
    count: Tensor | None = None,
    change: Change | None = None,
) -> Tensor:
    """Return ``vocabulary_cross_entropy`` of the head's logits, computed by tiles of rows.

    Args:
        x: Input of the head [..., D]; its gradient is this rank's addend.
        weight: This rank's rows [V/tp, D] of the head.
        bias: This rank's part of the head's bias, or None.
        targets: Token ids [...] of the whole vocabulary.
        first: Index in the vocabulary of this rank's first row.
        vocabulary: Size of the whole vocabulary.
        site: The "tp" ranks and the name of the loss.
        tokens: Rows of ``x`` in a tile.
        at_once: True to compute the gradients in the forward pass.
        count: Divisor of the summed loss, or None for the number of counted targets.
        change: Function applied to the logits before the loss, or None.

    Returns:
        The loss, the same on every rank.
    """
    columns, counts, owned = _placed(targets.reshape(-1), first, len(weight), vocabulary)
    counted = counts.sum()
    divisor = counted.clamp_min(1) if count is None else torch.as_tensor(count, device=x.device)
    rows = TargetRows(columns, counts, owned, divisor, counted if count is None else divisor)
    return summed_loss(
        x, weight, bias, rows, tokens, at_once, lambda numbers: _of_all_ranks(numbers, site), change
    )


def _placed(targets: Tensor, first: int, held: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (columns, counts, owned) for targets [N].

    ``columns`` are the targets' columns among the ``held`` columns from ``first`` on, ``counts`` marks the rows
    that count in the loss, and ``owned`` marks the counted rows whose target lies on this rank.
    """
    counts = targets != IGNORE
    # Targets of other ranks are masked; targets outside the vocabulary must still fail in gather, on every rank.
    columns = targets - first
    foreign = (targets < vocabulary) & (targets >= 0) & ((columns < 0) | (columns >= held))
    columns = columns.masked_fill(foreign | ~counts, 0).masked_fill((targets >= vocabulary), -1)
    columns = columns.masked_fill((targets < 0) & counts, -1)
    return columns, counts, counts & ~foreign


def _of_all_ranks(numbers: Tensor, site: ExchangeSite) -> Callable[[], RowTotals]:
    """Begin to gather (m, s, t) [3, N] of every rank, and return the call that waits and combines them.

    The call returns lse [N] and the logit at the target [N].
    """
    if torch.compiler.is_compiling():
        every = _numbers_of_all(site, numbers)
        return lambda: _totals(every)
    finish = _start_numbers(site, numbers)
    return lambda: _totals(finish())


def _start_numbers(site: ExchangeSite, numbers: Tensor) -> Callable[[], Tensor]:
    every = numbers.new_empty(site.size, *numbers.shape)
    pending = site.group.all_gather(every.view(-1), numbers.view(-1), "the loss", "activations")

    def finish() -> Tensor:
        pending.wait()
        return every

    return finish


@exchange_operator(
    "numbers_of_all(Tensor numbers) -> Tensor", lambda size, numbers: numbers.new_empty(size, *numbers.shape)
)
def _numbers_of_all(site: ExchangeSite, numbers: Tensor) -> Tensor:
    return _start_numbers(site, numbers)()


def _totals(every: Tensor) -> RowTotals:
    largest = every[:, 0].amax(0)
    total = (every[:, 1] * (every[:, 0] - largest).exp_()).sum(0)
    return largest + total.log_(), every[:, 2].sum(0)


class _VocabularyLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, vocabulary: int, site: ExchangeSite
    ) -> Tensor:
        columns, counts, owned = _placed(targets, first, logits.shape[1], vocabulary)
        lse, at_target = _of_all_ranks(numbers_of(logits, columns, owned), site)()
        ctx.counted_rows = counts.sum()  # for code that weights a loss made from these log-probabilities
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
