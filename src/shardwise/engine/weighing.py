"""What a microbatch counts where the user does not say: the number of labels that its loss is the mean of.

    g = Σ w_i ∇loss_i / Σ w_i        equals the gradient of one batch where w_i is what loss_i was divided by

Ranks and microbatches hold unlike numbers of labels (padding, prompts of -100), so means may not be averaged alike. The
loss itself knows what it was divided by, shifted labels or not, and its graph tells:

    cross entropy, mean                 the labels that were not ignored (their class weights, where it has some)
    sum of cross entropies / d          d: the labels, or ``num_items_in_batch``, which is the same for all and so alike
    sum of cross entropies              1: nothing was divided, microbatches count alike
    cross entropy, none; mean           all its rows
    no cross entropy in sight           labels in the batch that are not -100: ``labels``, ``targets``, or the last of a
                                        tuple, if they are whole numbers; shifted by one for causal models of
                                        transformers
    neither                             1: alike

Without gradients there is no graph, so an evaluation counts labels, shifted if the training steps have shown it.
On a device these numbers are there when the pass has run; the first microbatches are waited for, those after them go
on unread, as tensors, to where the gradients are scaled.

Cost: a walk over at most 64 nodes of the graph a microbatch.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.engine.sums import Number, number_of
from shardwise.plan.errors import UsageError

_log = logging.getLogger(__name__)

IGNORE = -100
_NODES = 64
_NLL = ("NllLossBackward0", "NllLoss2DBackward0")
_NONE, _MEAN = 0, 1
"""torch's numbers of reductions; a sum is 2."""
_CAUSAL_LOSS = "ForCausalLMLoss"


class Weighing:
    """See the module's docstring."""

    def __init__(self, by: Literal["auto", "tokens", "batches"], model: nn.Module) -> None:
        self._by = by
        named = getattr(getattr(model, "loss_function", None), "__name__", "") == _CAUSAL_LOSS
        self._is_shifted = named and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        self._told = False
        self._warned = False
        self._has_learned = False
        """Whether looking at a further microbatch could say no more about shifted labels."""

    def of_loss(self, loss: Tensor, batch: Any) -> Number:
        """What the microbatch ``batch`` with the loss ``loss`` counts."""
        if self._by == "batches":
            return 1.0
        found = divisors_of(loss)
        if self._told and self._has_learned and any(isinstance(each, Tensor) for each in found):
            return _largest(found)
        counts = [float(each) for each in found]
        count = max(counts, default=None)
        if len(set(counts)) > 1 and not self._warned:
            self._warned = True
            _log.warning(
                "the loss adds up cross entropies over unlike numbers of labels (%s): one number cannot weigh all, "
                "and %g is taken; over several ranks or microbatches give backward(loss, weight=...)",
                ", ".join(f"{each:g}" for each in sorted(set(counts))),
                count,
            )
        if count is None:
            count = self.of_batch(batch)
        elif count > 0:
            self._learn(batch, count)
        if count is None and self._by == "tokens":
            raise UsageError(
                "batch.weigh_by: tokens, but neither a cross entropy in the loss nor whole-number labels in the "
                "batch say how many there are; give backward(loss, weight=...) or train_step(batches, weights)"
            )
        if count is not None and not self._told:
            self._told = True
            _log.info(
                "microbatches count by the labels that their loss is the mean of (%g in the first), so that the "
                "gradient is "
                "that of one batch; batch.weigh_by: batches counts them alike",
                count,
            )
        return 1.0 if count is None else count

    def of_batch(self, batch: Any) -> float | None:
        """Its labels that are counted, by what is known of the model; None where it has none."""
        labels = None if self._by == "batches" else labels_in(batch)
        return None if labels is None else _count(labels, self._is_shifted)

    def _learn(self, batch: Any, count: float) -> None:
        labels = labels_in(batch)
        if labels is None or labels.dim() <= 1:
            self._has_learned = True
            return
        plain, shifted = _count(labels, False), _count(labels, True)
        self._has_learned = plain != shifted
        if plain != shifted and count in (plain, shifted):
            self._is_shifted = count == shifted


def labels_in(batch: Any) -> Tensor | None:
    """``labels`` or ``targets`` of a mapping, the last of a tuple or list; None where they are no whole numbers."""
    found = None
    if isinstance(batch, Mapping):
        found = batch.get("labels", batch.get("targets"))
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        found = batch[-1]
    if (
        not isinstance(found, Tensor)
        or not found.dim()
        or found.is_floating_point()
        or found.dtype == torch.bool
    ):
        return None
    return found


def _count(labels: Tensor, is_shifted: bool) -> float:
    counted = labels[..., 1:] if is_shifted and labels.dim() > 1 else labels
    return float((counted != IGNORE).sum())


class _Place(NamedTuple):
    node: Any
    quotients: tuple[Any, ...]
    """The divisions on the way here, the last first; what they divided by is read where a cross entropy is found, for
    in a block that runs again reading it runs the block."""
    rows: float | None
    """How many a mean on the way was taken over."""


def divisor_of(loss: Tensor) -> float | None:
    """What a loss of cross entropies was divided by, 1 for a sum; None where its graph shows no cross entropy.

    Several of them with unlike counts cannot be weighed by one number: the largest is taken.
    """
    return max(map(float, divisors_of(loss)), default=None)


def divisors_of(loss: Tensor) -> list[Number]:
    """Of each cross entropy in the graph of ``loss``, the nearest first; unread where they are on a device."""
    found: list[Number] = []
    waiting = deque([_Place(loss.grad_fn, (), None)])
    for _ in range(_NODES):
        if not waiting:
            break
        node, quotients, rows = waiting.popleft()
        if node is None:
            continue
        own = getattr(node, "counted_labels", None)  # our cross entropies
        if own is not None:
            found.append(number_of(own))
            continue
        name = type(node).__name__
        if name in _NLL or hasattr(node, "counted_rows"):
            if name in _NLL and node._saved_reduction == _MEAN:
                found.append(number_of(node._saved_total_weight))
            else:
                found.append(_divided_by(node, quotients, rows))
            continue
        if name == "DivBackward0":
            quotients = (node, *quotients)
        elif name == "MeanBackward0":
            rows = float(node._saved_self_sym_numel)
        waiting.extend(_Place(parent, quotients, rows) for parent, _ in node.next_functions)
    return found


def _largest(numbers: Sequence[Number]) -> Number:
    """Of numbers some of which are on a device."""
    if len(numbers) == 1:
        return numbers[0]
    device = next(each.device for each in numbers if isinstance(each, Tensor))
    return torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each in numbers]).amax()


def _divided_by(node: Any, quotients: tuple[Any, ...], rows: float | None) -> Number:
    """Of cross entropies that were not averaged by themselves: the mean's rows, the divisor, or 1 for a sum.

    Divisors are kept from 0 (``clamp_min(1)``): a microbatch without any label, divided by 1, weighs nothing.
    """
    if rows is not None:
        return rows
    divisor = next((each for each in map(_divisor, quotients) if each is not None), None)
    if divisor is None:
        return 1.0
    if not isinstance(divisor, Tensor) and divisor > 1:
        return divisor
    labels = number_of(_labels(node))
    if isinstance(divisor, Tensor) or isinstance(labels, Tensor):
        return divisor * ((labels > 0) | (divisor > 1))  # both unread, or a number of the host beside one
    return divisor if labels else 0.0


def _labels(node: Any) -> Tensor:
    """How many a cross entropy that was not averaged by itself counted."""
    counted = getattr(node, "counted_rows", None)
    if counted is not None:
        return torch.as_tensor(counted)
    ignored = node._saved_ignore_index
    return (node._saved_target != (ignored if ignored < 1 << 63 else ignored - (1 << 64))).sum()


def _divisor(quotient: Any) -> Number | None:
    """None where it is no single number."""
    value = quotient._saved_other
    return number_of(value.detach()) if isinstance(value, Tensor) and value.numel() == 1 else None
