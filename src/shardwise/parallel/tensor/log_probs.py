"""Log-probabilities of given tokens under a model, from logits that are cut over the vocabulary where they can be.

    log p_t = log softmax(logits_t)[target_t]

Where the model hands its head's output to a loss of a causal language model, cut logits may go to this function too,
and no rank makes the whole. Elsewhere what follows the head is not known, and the whole logits are used.

Shapes: B batch, T sequence, V vocabulary.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from shardwise.kernels.cross_entropy import log_probs
from shardwise.parallel.tensor.layers import VocabularyHead
from shardwise.parallel.tensor.loss import vocabulary_log_probs
from shardwise.plan.errors import UsageError
from shardwise.plan.pytree import part_named


def log_probs_of(model: nn.Module, call: Callable[[], Any], targets: Tensor) -> Tensor:
    """[B, T] of ``targets`` [B, T] from the logits [B, T, V] of ``call()``, which calls ``model``.

    Errors: UsageError where there are no logits of that shape.
    """
    heads = [module for module in model.modules() if isinstance(module, VocabularyHead)]
    head = heads[0] if len(heads) == 1 and heads[0].region.takes_cut_logits else None
    with nullcontext() if head is None else head.region.keep_cut_logits():
        logits = _logits(call())
    if logits.shape[:-1] != targets.shape:
        raise UsageError(
            f"log_probs: the model's logits are {list(logits.shape)}, the targets {list(targets.shape)}; expected one "
            "target for each place: logits[:, t] are about what follows token t"
        )
    targets = targets.to(logits.device)
    if head is None:
        return log_probs(logits, targets)
    return vocabulary_log_probs(logits, targets, head.rows.start, head.vocabulary, head.region.group)


def _logits(output: Any) -> Tensor:
    found = part_named(output, "logits")
    if not isinstance(found, Tensor) or found.dim() < 2:
        raise UsageError(
            f"log_probs: the model returned a {type(output).__name__} in which there are no logits; call it with a "
            "batch without labels or targets, for which it returns logits, alone or as 'logits'"
        )
    return found
