"""A copy of a run's model without weights, from which the run is foreseen.

The copy is taken before the engine cuts the model, so the function that builds a user's model is not called a second
time: such functions may read files, count or print. Every pass on shapes cuts a copy of this copy.

Cost: a copy of the model's Python objects; tensors of the copy are on meta.
"""

import copy
from typing import NamedTuple

import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.engine.step.uncut import keep_uncut
from shardwise.parallel.pipeline.layers import Layers


class ModelCopy(NamedTuple):
    """A model without weights, and what is known of the weights of the original."""

    model: nn.Module | None
    """The copy; None if the model cannot be copied."""
    reason: str
    """Reason why there is no copy; empty if there is one."""
    draws: bool
    """True if the engine draws start weights, because the original is on meta."""
    given_bytes: int
    """Bytes of the original's parameters; 0 if the original is on meta."""

    @classmethod
    def of(cls, model: nn.Module) -> "ModelCopy":
        """Copy a model that no engine has cut yet."""
        draws = any(each.is_meta for each in model.parameters())
        given_bytes = 0 if draws else sum(each.nbytes for each in model.parameters())
        return cls(*_without_weights(model), draws, given_bytes)

    def make(self) -> nn.Module:
        """Return a new copy, which may be cut.

        Raises:
            UsageError: if the model cannot be copied.
        """
        found, reason = (None, self.reason) if self.model is None else _without_weights(self.model)
        if found is None:
            raise UsageError(f"the model cannot be copied: {reason}")
        return found


def _without_weights(model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return a copy of the model on meta and an empty reason, or None and the reason why there is none."""
    if not isinstance(model, Layers):
        return keep_uncut(model)[:2]
    memo = {id(each): _on_meta(each) for each in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
