"""Log-probabilities of given tokens under a model, from logits that stay cut over the vocabulary if possible.

    log p_t = log softmax(logits_t)[target_t]

If the model passes its head's output to a loss of a causal language model, the logits may stay cut for this function
too, and no rank computes the full logits. For other models the code after the head is not known, and the full logits
are used.

Shapes: B batch, T sequence, V vocabulary.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.base.pytree import part_named
from shardwise.kernels.cross_entropy import log_probs
from shardwise.parallel.tensor.layers import VocabularyHead
from shardwise.parallel.tensor.loss import vocabulary_log_probs


def log_probs_of(
    model: nn.Module,
    call: Callable[[], Any],
    targets: Tensor,
    own: Callable[[Tensor], Tensor] = lambda targets: targets,
) -> Tensor:
    """Return the log-probabilities of ``targets`` under the logits of a model.

    Args:
        model: The model, cut or not.
        call: Function that calls ``model`` and returns its output.
        targets: Token ids [B, T].
        own: Function that returns the targets of the tokens that the model's logits are of, after ``call``.

    Returns:
        Log-probabilities [B, T].

    Raises:
        UsageError: If the output has no logits [B, T, V].
    """
    heads = [module for module in model.modules() if isinstance(module, VocabularyHead)]
    head = heads[0] if len(heads) == 1 and heads[0].region.takes_cut_logits else None
    with nullcontext() if head is None else head.region.keep_cut_logits():
        logits = _logits(call())
    targets = own(targets)
    if logits.shape[:-1] != targets.shape:
        raise UsageError(
            f"log_probs: the model's logits are {list(logits.shape)}, the targets {list(targets.shape)}; expected one "
            "target for each place: logits[:, t] are about what follows token t"
        )
    targets = targets.to(logits.device)
    if head is None:
        return log_probs(logits, targets)
    return vocabulary_log_probs(logits, targets, head.rows.start, head.vocabulary, head.site)


def _logits(output: Any) -> Tensor:
    found = part_named(output, "logits")
    if not isinstance(found, Tensor) or found.dim() < 2:
        raise UsageError(
            f"log_probs: the model returned a {type(output).__name__} in which there are no logits; call it with a "
            "batch without labels or targets, for which it returns logits, alone or as 'logits'"
        )
    return found
