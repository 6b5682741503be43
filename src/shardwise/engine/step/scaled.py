"""Scaled losses: factors of a plain loop between the loss of ``engine(batch)`` and ``engine.backward``.

    factor                                    habit                              first step
    a power of two, 2^10 or more              ``scaler.scale(loss)``             UsageError
    1 / accumulation                          ``loss / accumulation``            UsageError if the loss is the
                                                                                 engine's, else a warning

The engine averages over microbatches and scales fp16 losses itself, so either factor would reach gradients, losses and
the norm that is clipped. Other factors are a user's weights of losses, and are allowed.

Cost: a look at the outermost nodes of the loss's graph, in the first step only.
"""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import UsageError

_log = logging.getLogger(__name__)
_NODES = 8
_LEAST = 2.0**10
"""Least power of two that is taken for a GradScaler's factor; a GradScaler begins with 2^16."""
_PASSED = ("ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0", "NegBackward0")


def check_unscaled(loss: Tensor, own: Any, accumulation: int) -> None:
    """Check the factors around a loss.

    Args:
        loss: The tensor that ``backward`` was given.
        own: The graph node of the loss that the engine's call returned; None if the call returned none.
        accumulation: The number of microbatches in a step.

    Raises:
        UsageError: if a factor is a GradScaler's, or 1 / ``accumulation`` of the engine's own loss.
    """
    node: Any = loss.grad_fn
    factors: list[tuple[str, float]] = []
    for _ in range(_NODES):
        if node is None or node is own:
            break
        factor = _factor(node)
        if factor is None and type(node).__name__ not in _PASSED:
            break
        if factor is not None:
            factors.append((type(node).__name__, factor))
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    for kind, factor in factors:
        if factor >= _LEAST and math.frexp(factor)[0] == 0.5:
            raise UsageError(
                f"backward: the loss was multiplied by {factor:g}, as torch's GradScaler does. The engine scales fp16 "
                "losses itself and no other dtype needs it: give backward the loss as it is, and leave scaler.step and "
                "scaler.update out. Where the factor is meant, set batch.scaled_losses: allow"
            )
        if accumulation > 1 and factor == float(torch.tensor(1.0 / accumulation, dtype=loss.dtype)):
            said = (
                f"backward: the loss was multiplied by 1/{accumulation}, and batch.accumulation is {accumulation}. The "
                "engine averages over microbatches itself, so gradients would be divided twice: give backward the loss "
                "as it is"
            )
            if node is own and own is not None:
                raise UsageError(f"{said}. Where the factor is meant, set batch.scaled_losses: allow")
            if kind == "DivBackward0":
                _log.warning("%s, unless the factor is a part of the loss", said)


def _factor(node: Any) -> float | None:
    """Return the constant number that a node multiplies by; None if there is none."""
    kind = type(node).__name__
    if kind not in ("MulBackward0", "DivBackward0"):
        return None
    if sum(parent is not None for parent, _ in node.next_functions) != 1:
        return None
    first = node.next_functions[0][0] is not None
    other = node._saved_other if first else None
    if kind == "MulBackward0" and not first:
        other = node._saved_self
    if not isinstance(other, Tensor) or other.numel() != 1:
        return None
    value = float(other.detach())
    if kind == "MulBackward0":
        return value
    return 1.0 / value if value else None
