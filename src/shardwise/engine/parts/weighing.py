"""Weights of microbatches for which the user gives none: the number of labels over which a loss is a mean.

    g = Σ w_i ∇loss_i / Σ w_i        equals the gradient of one batch if w_i is the divisor of loss_i

Ranks and microbatches hold different numbers of labels (padding, prompts of -100), so means must not be averaged with
equal weights. The graph of the loss shows the divisor, shifted labels or not:

    cross entropy, mean                 the labels that were not ignored (their class weights, if it has some)
    sum of cross entropies / d          d: the labels, or ``num_items_in_batch``, which is the same for all and so alike
    sum of cross entropies              1: nothing was divided, microbatches count alike
    cross entropy, none; mean           all its rows
    any other sum / d                   d: ``-(log_probs * mask).sum() / mask.sum()``
    any other mean, of a batch with     the numbers that the mean is taken over: rows, or elements
    whole-number labels
    any other mean                      1: alike

A batch has whole-number labels in ``labels``, ``targets``, or the last of a tuple. Some graphs show nothing: a compiled
model, a custom function (Liger, Unsloth), a reentrant checkpoint around the loss. Then the labels of the batch are
counted by the rules that every loss before agreed with (all that are not -100, or all but the first of each row, rows,
elements). If the remaining rules give different numbers, the count is a guess, and a step whose guesses are uneven over
microbatches or ranks is refused (``are_uneven``). A compiled model runs its first pass without the compiler, so that
the graph of that pass shows the rule. ``batch.weigh_by`` names the rule instead.

Without gradients there is no graph, so an evaluation counts labels by the same rules.
On a device these numbers exist when the pass has run. The host waits for those of the first microbatches; later numbers
stay on the device, as tensors, up to the scaling of the gradients.

Cost: a walk over the numbers that a loss adds up, and over at most 64 nodes behind each of them.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.engine.parts.sums import Number, number_of

_log = logging.getLogger(__name__)

IGNORE = -100
_NODES = 64
_SCALARS = 10_000
"""Nodes of single numbers that a walk follows: a loss may add up a penalty for each of many weights."""
_NLL = ("NllLossBackward0", "NllLoss2DBackward0")
_NONE, _MEAN, _SUM = 0, 1, 2
"""Numbers of torch for the reductions of losses."""
_CAUSAL_LOSS = "ForCausalLMLoss"
_RULES = ("plain", "shifted", "rows", "elements", "alike")
"""Rules to count a batch whose loss shows no divisor, the likeliest first."""
_LOOKS = 8
"""Most passes of a compiled model that run without the compiler so that their graphs can be read."""

WeighBy = Literal["auto", "tokens", "shifted_tokens", "batches"]


class WeightGuesses(NamedTuple):
    """Sums over the microbatches of a step whose weights are guessed; ranks find uneven microbatches from them."""

    number: float = 0.0
    plain: float = 0.0
    plain_squares: float = 0.0
    shifted: float = 0.0
    shifted_squares: float = 0.0

    def with_counts(self, plain: float, shifted: float) -> "WeightGuesses":
        """Return the sums with one more microbatch."""
        more = (1.0, plain, plain**2, shifted, shifted**2)
        return WeightGuesses(*(a + b for a, b in zip(self, more, strict=True)))


def are_uneven(sums: Sequence[float]) -> bool:
    """Return whether guessed microbatches hold different numbers of labels, from ``WeightGuesses`` of all ranks."""
    number, plain, plain_squares, shifted, shifted_squares = sums
    return number * plain_squares - plain**2 > 0.5 or number * shifted_squares - shifted**2 > 0.5


UNEVEN = (
    "backward: microbatches or ranks hold unlike numbers of labels, and the graph of the loss does not show which of "
    "them the loss is the mean of (the model is compiled, or the loss comes from a function of its own or lies in a "
    "reentrant checkpoint), so the engine cannot weigh them. Give the number that each loss was divided by, "
    "engine.backward(loss, weight=...) or train_step(batches, weights), or name the rule: batch.weigh_by: tokens (all "
    "labels that are not -100), shifted_tokens (all but the first of each row), or batches (microbatches count alike)"
)


class MicrobatchWeights:
    """The weights of one engine's microbatches.

    Args:
        by: The rule of ``batch.weigh_by``.
        model: The model; causal language models of transformers shift labels, and compiled models hide their graphs.
        share_of: Returns the share of a batch's labels that this rank's part of the sequences has.
        share_of_loss: Returns this rank's share in the loss of the last pass, if several ranks computed the same loss
            of whole sequences.
    """

    def __init__(
        self,
        by: WeighBy,
        model: nn.Module,
        share_of: Callable[[Any], float] = lambda batch: 1.0,
        share_of_loss: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._by = by
        self._share_of = share_of
        self._share_of_loss = share_of_loss
        own = getattr(model, "_orig_mod", model)
        named = getattr(getattr(own, "loss_function", None), "__name__", "") == _CAUSAL_LOSS
        self._is_causal = named and type(own).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        first = "shifted" if self._is_causal or by == "shifted_tokens" else "plain"
        self._rules: tuple[str, ...] = (first, *(rule for rule in _RULES if rule != first))
        """The rules that agree with every loss so far whose graph showed its divisor."""
        self._told = False
        self._warned = False
        self._has_learned = False
        """True if a further microbatch could not show more about shifted labels."""
        self._looks_left = _LOOKS if any(_is_compiled(module) for module in model.modules()) else 0
        """Passes of a compiled model that may still run without the compiler."""
        self._divides: bool | None = None
        """True if losses of batches without labels are divided by a count; None before the first such loss."""
        self._guesses = WeightGuesses()

    # A pass ----------------------------------------------------------------------------------------------------

    def seen_through(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Return the context of a training pass: without the compiler if the graph of the pass has to be read."""
        if not self._looks_left or self._by != "auto" or "torch._dynamo" not in sys.modules:
            return nullcontext()
        labels = labels_in(kwargs or (args[0] if len(args) == 1 else args))
        if labels is None or len({_counted(labels, rule) for rule in self._rules}) == 1:
            return nullcontext()
        self._looks_left -= 1
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance

    def of_loss(self, loss: Tensor, batch: Any) -> Number:
        """Return the weight of the microbatch ``batch`` with the loss ``loss``.

        Raises:
            UsageError: if ``batch.weigh_by`` names a rule and neither the loss nor the batch shows a number of labels.
        """
        if self._by == "batches":
            return self._share_of(batch)
        found = divisors_of(loss)
        if self._told and self._has_learned and any(isinstance(each, Tensor) for each in found):
            return _largest(found) * self._share_of_loss()
        counts = [float(each) for each in found]
        count = max(counts, default=None)
        if len(set(counts)) > 1:
            self._warn("cross entropies", counts, max(counts))
        if count is None:
            count = self._without_cross_entropy(loss, batch)
        elif count > 0:
            self._learn(batch, count)
        if count is None and self._by != "auto":
            raise UsageError(
                f"batch.weigh_by: {self._by}, but neither the graph of the loss nor whole-number labels in the "
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
        return self._share_of(batch) if count is None else count * self._share_of_loss()

    def of_given(self, weight: float, batch: Any) -> float:
        """Return this rank's part of the weight that the caller gave for ``batch``."""
        return weight * self._share_of(batch)

    def _warn(self, what: str, counts: Sequence[float], taken: float) -> None:
        if self._warned:
            return
        self._warned = True
        _log.warning(
            "the loss adds up %s over unlike numbers of labels (%s): one number cannot weigh all, and %g is taken; "
            "over several ranks or microbatches give backward(loss, weight=...)",
            what,
            ", ".join(f"{each:g}" for each in sorted(set(counts))),
            taken,
        )

    def _without_cross_entropy(self, loss: Tensor, batch: Any) -> float | None:
        labels = labels_in(batch)
        reduced = _reduced(loss)
        if labels is None:
            return self._divided(reduced, loss)
        if not all(each.is_known for each in reduced):
            return self._guessed(batch, labels)
        divisors = {each.divisor for each in reduced if each.divisor is not None}
        counts = divisors | {each.rows for each in reduced if each.rows is not None}
        own = [_counted(labels, rule) for rule in self._rules[:3]]
        count = next((each for each in own if each in counts), max(counts, default=1.0))
        if len(counts) > 1:
            self._warn("means", list(counts), count)
        if count == 1 and divisors and not _count(labels, False):
            return 0.0  # no label, and a divisor kept from 0, for example by clamp_min(1)
        if count > 0:
            self._learn(batch, count)
        return max(count, 0.0)

    def _guessed(self, batch: Any, labels: Tensor) -> float:
        """Return the count of a microbatch whose loss shows no divisor."""
        given = batch.get("num_items_in_batch") if isinstance(batch, Mapping) else None
        if given is not None:
            return self._of_own_loss(float(given), batch)
        is_known = self._by != "auto" or (self._is_causal and self._rules[0] == "shifted")
        if len(self._rules) > 1 and not is_known:
            plain, shifted = _count(labels, False), _count(labels, True)
            self._guesses = self._guesses.with_counts(plain, shifted)
        return self._of_own_loss(_counted(labels, self._rules[0]), batch)

    def _of_own_loss(self, count: float, batch: Any) -> float:
        """Return the part of a batch's ``count`` of labels that this rank's loss is the mean of."""
        return count if self._share_of_loss() != 1 else self.of_given(count, batch)

    def _divided(self, reduced: Sequence["_LossReduction"], loss: Tensor) -> float | None:
        """Return the number by which the loss of a batch without labels is divided; None if the loss shows none."""
        divisors = {each.divisor for each in reduced if each.divisor is not None}
        if len(divisors) != 1:
            return None
        (divisor,) = divisors
        if divisor > 0 and self._divides is None:
            self._divides = divisor == round(divisor)
        if not self._divides or divisor < 0:
            return None
        return 0.0 if divisor == 1 and float(loss.detach()) == 0.0 else divisor

    # A step ----------------------------------------------------------------------------------------------------

    def take_guesses(self) -> WeightGuesses:
        """Return the sums over the guessed microbatches since the last call, and reset them."""
        taken, self._guesses = self._guesses, WeightGuesses()
        return taken

    # Rules -----------------------------------------------------------------------------------------------------

    def of_batch(self, batch: Any) -> float | None:
        """Return the count of a batch by the likeliest remaining rule; None if the batch has no labels."""
        labels = None if self._by == "batches" else labels_in(batch)
        return None if labels is None else self.of_given(_counted(labels, self._rules[0]), batch)

    def _learn(self, batch: Any, count: float) -> None:
        labels = labels_in(batch)
        if labels is None:
            self._has_learned = True
            return
        if self._share_of(batch) != 1:  # the loss is a mean over this rank's part of the labels
            self._has_learned = True
            return
        agreeing = tuple(rule for rule in self._rules if _counted(labels, rule) == count)
        if agreeing and self._by != "shifted_tokens":
            self._rules = agreeing
        self._has_learned = labels.dim() <= 1 or _count(labels, False) != _count(labels, True)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` or ``module.compile()`` has made a module."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def labels_in(batch: Any) -> Tensor | None:
    """Return ``labels`` or ``targets`` of a mapping, or the last of a tuple or list; None if not whole numbers."""
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


def _counted(labels: Tensor, rule: str) -> float:
    if rule == "rows":
        return float(len(labels))
    if rule == "elements":
        return float(labels.numel())
    return 1.0 if rule == "alike" else _count(labels, rule == "shifted")


# Cross entropies ---------------------------------------------------------------------------------------------------


class _GraphNode(NamedTuple):
    node: Any
    quotients: tuple[Any, ...]
    """The divisions on the way to this node, the last first.

    Their divisors are only read if a cross entropy is found, because in a recomputed block reading them runs the block.
    """
    rows: float | None
    """Number of values over which a mean on the way was taken; None without a mean."""


def divisor_of(loss: Tensor) -> float | None:
    """Return the divisor of a loss of cross entropies, 1 for a sum; None if the graph shows no cross entropy.

    For several cross entropies with different counts, which one number cannot weigh, the largest is returned.
    """
    return max(map(float, divisors_of(loss)), default=None)


def divisors_of(loss: Tensor) -> list[Number]:
    """Return the divisor of each cross entropy in the graph of ``loss``, the nearest first; unread on a device.

    A walk follows all nodes that hold one number, and 64 nodes behind each sum or mean that makes such a number.
    """
    found: list[Number] = []
    numbers = deque([_GraphNode(loss.grad_fn, (), None)] if loss.grad_fn is not None else [])
    sums: list[_GraphNode] = []
    for _ in range(_SCALARS):
        if not numbers:
            break
        for place in _behind(numbers.popleft(), found):
            (numbers if _numel(place.node) == 1 else sums).append(place)
    seen: set[Any] = set()
    for start in sums:
        others = deque([start])
        for _ in range(_NODES):
            if not others:
                break
            place = others.popleft()
            if place.node not in seen:
                seen.add(place.node)
                others.extend(_behind(place, found))
    return found


def _behind(place: _GraphNode, found: list[Number]) -> list[_GraphNode]:
    """Return the places behind ``place``; none behind a cross entropy, whose divisor is added to ``found``."""
    node, quotients, rows = place
    own = getattr(node, "counted_labels", None)  # Shardwise's own cross entropies
    if own is not None:
        found.append(number_of(own))
        return []
    name = type(node).__name__
    if name in _NLL or hasattr(node, "counted_rows"):
        if name in _NLL and node._saved_reduction == _MEAN:
            found.append(number_of(node._saved_total_weight))
        else:
            found.append(_divided_by(node, quotients, rows))
        return []
    if name == "DivBackward0":
        quotients = (node, *quotients)
    elif name == "MeanBackward0":
        rows = float(node._saved_self_sym_numel)
    return [_GraphNode(parent, quotients, rows) for parent, _ in node.next_functions if parent is not None]


def _largest(numbers: Sequence[Number]) -> Number:
    """Return the largest of numbers, some of which are on a device."""
    if len(numbers) == 1:
        return numbers[0]
    device = next(each.device for each in numbers if isinstance(each, Tensor))
    return torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each in numbers]).amax()


def _divided_by(node: Any, quotients: tuple[Any, ...], rows: float | None) -> Number:
    """Return the weight of cross entropies without a mean of their own: a later mean's rows, a divisor, or 1 for a sum.

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
        return divisor * ((labels > 0) | (divisor > 1))  # at least one is a tensor that the host has not read
    return divisor if labels else 0.0


def _labels(node: Any) -> Tensor:
    """Return the number of labels that a cross entropy without a mean of its own counted."""
    counted = getattr(node, "counted_rows", None)
    if counted is not None:
        return torch.as_tensor(counted)
    ignored = node._saved_ignore_index
    return (node._saved_target != (ignored if ignored < 1 << 63 else ignored - (1 << 64))).sum()


def _divisor(quotient: Any) -> Number | None:
    """Return the divisor of a division; None if it is no single number."""
    value = quotient._saved_other
    if not isinstance(value, Tensor) or value.numel() != 1:
        return None
    return number_of(value.detach() if value.requires_grad else value)


# Other sums and means ----------------------------------------------------------------------------------------------


class _LossReduction(NamedTuple):
    """A sum or a mean of many numbers in the graph of a loss."""

    divisor: float | None
    """The number by which a sum is divided; None without a division, and for a mean."""
    rows: float | None
    """The number of values over which a mean is taken; None for a sum."""
    is_known: bool = True
    """False if the graph does not show how many numbers became one."""


def _reduced(loss: Tensor) -> list[_LossReduction]:
    """Return the reductions in the graph of ``loss``, found by a walk over the nodes that hold one number."""
    found: list[_LossReduction] = []
    waiting: deque[tuple[Any, tuple[Any, ...]]] = deque([(loss.grad_fn, ())])
    for _ in range(_SCALARS):
        if not waiting:
            return found
        node, quotients = waiting.popleft()
        if node is None or type(node).__name__ == "AccumulateGrad":
            continue
        rows = _rows_of_mean(node)
        if rows is not None:
            found.append(_LossReduction(None, rows))
        elif type(node).__name__.startswith("SumBackward") or _reduction(node) == _SUM:
            divisor = next((each for each in map(_divisor, quotients) if each is not None), None)
            found.append(_LossReduction(None if divisor is None else float(divisor), None))
        elif _is_opaque(node):
            found.append(_LossReduction(None, None, False))
        else:
            if type(node).__name__ == "DivBackward0":
                quotients = (node, *quotients)
            waiting.extend((parent, quotients) for parent, _ in node.next_functions)
    return [*found, _LossReduction(None, None, False)]


def _rows_of_mean(node: Any) -> float | None:
    if type(node).__name__.startswith("MeanBackward") or _reduction(node) == _MEAN:
        parents = [_numel(parent) for parent, _ in node.next_functions if parent is not None]
        return float(max(parents, default=1))
    return None


def _reduction(node: Any) -> int | None:
    """Return torch's number of the reduction of a loss function's node; None for any other node."""
    value = getattr(node, "_saved_reduction", None)
    return value if isinstance(value, int) else None


def _is_opaque(node: Any) -> bool:
    """Return whether many numbers become one in a way that the graph does not show."""
    return any(_numel(parent) != 1 for parent, _ in node.next_functions if parent is not None) or not any(
        parent is not None for parent, _ in node.next_functions
    )


def _numel(node: Any) -> int:
    """Return the number of elements of the output of a graph's node."""
    made = node._input_metadata
    return prod(made[0].shape) if made else 0
