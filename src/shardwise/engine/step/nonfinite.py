"""The origin of a NaN: the first module whose output is not finite, on any rank, found by one more forward pass.

Every rank checks its own batches; then the ranks compare, and all report the same finding: the earliest by stage,
microbatch and call, and of the lowest rank if these are equal. So a rank without a NaN of its own learns which rank the
NaN came from.

A value that is absent on a rank (a value of another stage, a weight that ZeRO 3 has released) is NaN too, and would be
found before all others. So accesses of absent values are checked in the second passes, even if they were not before,
and an error that ends these passes is the finding.

Cost: only after a failed step: one forward pass of its microbatches, and two small all-reduces.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import CommError
from shardwise.base.pytree import tensors_in
from shardwise.engine.parts.parts import EngineParts, Stage
from shardwise.engine.parts.weighing import IGNORE, labels_in

_TEXT_BYTES = 2000
_ABSENT, _BEFORE, _AFTER = -2, -1, 1 << 40
"""Stages of an absent value, of a batch and of a loss: before and after all others."""


class _NonFiniteValue(NamedTuple):
    """A place where a value is not finite; compared in the order of the fields."""

    stage: int
    microbatch: int
    call: int
    text: str


class NonFiniteProbe:
    """A record of the values that are not finite in the passes that run while its hooks are in place."""

    def __init__(self, parts: EngineParts):
        self._parts = parts
        self._calls = 0
        self.found: list[_NonFiniteValue] = []
        self.microbatch = 0
        """The running microbatch; in a pipeline the stage's hooks have it."""

    def batch(self, microbatch: int, batch: Any) -> None:
        """Begin a microbatch, and note its batch if it is not finite."""
        self.microbatch = microbatch
        if not _is_finite(batch):
            self.found.append(_NonFiniteValue(_BEFORE, microbatch, 0, "its batch holds NaN or infinity"))

    def loss(self, microbatch: int, loss: Any, batch: Any) -> None:
        """Note the loss of ``batch``, if it is not finite."""
        if _is_finite(loss):
            return
        labels = labels_in(batch)
        if labels is not None and bool((labels == IGNORE).all()):
            text = (
                f"its batch has no counted label (all {labels.numel()} are {IGNORE}), so that its loss is a mean of "
                "nothing: divide by the number of labels, kept from 0 with clamp_min(1), or leave the batch out"
            )
            self.found.append(_NonFiniteValue(_BEFORE, microbatch, 0, text))
        else:
            text = "the loss is the first value that is not finite"
            self.found.append(_NonFiniteValue(_AFTER, microbatch, 0, text))

    def hook(self, stage: Stage, name: str) -> Callable[..., None]:
        """Return a forward hook that notes an output of module ``name`` if it is not finite."""

        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._calls += 1
            if not _is_finite(output):
                inputs = "" if _is_finite((args, kwargs)) else "; its inputs are not finite either"
                text = f"the first module with a non-finite output is {name!r}{inputs}"
                microbatch = self.microbatch if stage.run is None else stage.hooks.microbatch
                self.found.append(_NonFiniteValue(stage.index, microbatch, self._calls, text))

        return look


def origin(parts: EngineParts, run: Callable[[NonFiniteProbe], None]) -> str:
    """Return a sentence about the first value that is not finite, the same on all ranks. Collective.

    Args:
        parts: The running parts of the engine.
        run: Repeats the forward passes of the step.
    """
    look = NonFiniteProbe(parts)
    handles = [
        module.register_forward_hook(look.hook(stage, name), with_kwargs=True)
        for stage in parts.stages
        for name, module in _computed_here(stage)
    ]
    try:
        with torch.no_grad():
            run(look)
    except CommError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        text = f"the same passes again, in which what is absent is marked, ended with {said}"
        look.found.append(_NonFiniteValue(_ABSENT, look.microbatch, 0, text))
    finally:
        for handle in handles:
            handle.remove()
    return _agreed(parts, min(look.found, default=None))


def _computed_here(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose output is checked, by name.

    In a pipeline these are the modules that own weights of this stage, because other modules may be given values that
    only another stage has.
    """
    owners = {
        slot.name.rpartition(".")[0]
        for state in stage.hooks.states
        for bucket in state.buckets
        for slot in bucket.layout.slots
    }
    for name, module in stage.module.named_modules():
        if stage.run is None or name in owners:
            yield name or "(root)", module


def _agreed(parts: EngineParts, mine: _NonFiniteValue | None) -> str:
    """Return the sentence of the earliest of all ranks' findings."""
    world = parts.groups["world"]
    rows = torch.zeros(world.size, 4, dtype=torch.float64, device=parts.device)
    if mine is not None:
        rows[world.index] = torch.tensor([1, *mine[:3]], dtype=torch.float64)
    world.all_reduce(rows.view(-1), "where values are not finite", purpose="control").wait()
    places = [(*row[1:], rank) for rank, row in enumerate(rows.tolist()) if row[0]]
    if not places:
        return (
            "all outputs of the forward pass are finite on every rank, so they overflow in the backward pass"
        )
    rank = min(places)[-1]
    text = torch.zeros(_TEXT_BYTES, dtype=torch.int64, device=parts.device)
    if mine is not None and rank == world.index:
        place = f"on rank {parts.world.members[rank]}, in microbatch {mine.microbatch}, "
        sentence = mine.text if mine.stage == _ABSENT else place + mine.text
        said = sentence.encode()[:_TEXT_BYTES]
        text[: len(said)] = torch.tensor(list(said))
    world.all_reduce(text, "the words for it", purpose="control").wait()
    return bytes(byte for byte in text.tolist() if byte).decode(errors="replace")


def _is_finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(tensor).all())
        for tensor in tensors_in(value)
        if tensor.is_floating_point() and tensor.numel()
    )
