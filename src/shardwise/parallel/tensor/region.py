"""Region: whether the activations of the running pass hold the whole sequence or this rank's part.

With sequence parallelism a training pass is cut: between the cut layers each rank holds T/tp tokens. A pass without
gradients is not: it keeps no activations, so a cut would save little, and it may have any length and a cache. What
lies inside a backward pass (a block computed again) always belongs to a cut pass.

Shapes: T global sequence, tp ranks.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Group
from shardwise.plan.errors import UsageError

_TOKENS = ("tokens", "input_ids", "inputs_embeds")
_LATEST_ONLY = ("cache", "past_key_values", "logits_to_keep")
"""Arguments with which a model reads single places of the sequence, which a cut one may not hold."""


class Region:
    """One per model made parallel; its layers ask it in forward."""

    def __init__(self, group: Group, sequence: bool) -> None:
        self.group = group
        self.sequence = sequence
        self.cut = sequence
        """True while activations between the cut layers hold this rank's part of the sequence."""
        self.logits_cut = False
        """True while the head's output goes to a loss that takes this rank's part of the vocabulary."""

    def watch(self, model: nn.Module, takes_cut_logits: bool) -> None:
        """Decide at the start of each pass of ``model``, the root; ``takes_cut_logits`` where labels are given."""
        signature = inspect.signature(model.forward)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            given |= given.get("kwargs", {})
            training = torch.is_grad_enabled()
            self.cut = self.sequence and training
            self.logits_cut = takes_cut_logits and training and given.get("labels") is not None
            if self.cut:
                _check(given, self.group.size)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if self.logits_cut and getattr(output, "logits", None) is not None:
                output.logits = None  # A part of the vocabulary must not pass for the whole.
            self.cut, self.logits_cut = self.sequence, False

        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end, always_call=True)


def _check(given: dict[str, Any], ranks: int) -> None:
    latest = [name for name in _LATEST_ONLY if not (given.get(name) is None or _is_zero(given[name]))]
    if latest:
        raise UsageError(
            f"sequence parallelism: {latest[0]} is for generation, but gradients are recorded; call the model under "
            "torch.no_grad()"
        )
    tokens = _tokens(given)
    if tokens is not None and tokens % ranks:
        below, above = tokens // ranks * ranks, -(-tokens // ranks) * ranks
        near = f"{below} or {above}" if below else f"{above}"
        raise UsageError(
            f"sequence parallelism: a sequence of {tokens} tokens does not divide over tp={ranks} ranks; the nearest "
            f"that does is {near}. Pad it with targets of -100, set tensor.sequence_parallel: false, or, where no "
            "gradients are needed, call the model under torch.no_grad()"
        )


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _tokens(given: dict[str, Any]) -> int | None:
    named = [given[name] for name in _TOKENS if isinstance(given.get(name), Tensor)]
    rest = [value for value in given.values() if isinstance(value, Tensor) and value.dim() >= 2]
    found = named or rest
    return found[0].shape[1] if found and found[0].dim() >= 2 else None
