"""Where a NaN came from: the first module whose output is not finite, on whichever rank, by one more forward pass.

Every rank looks at its own batches; then they compare, and all tell the same story: of what was found, the earliest
stage, microbatch and call, and the lowest rank where these are equal. A rank without a NaN of its own so learns which
one it got it from.

What has no numbers here (a value of another stage, a weight that ZeRO 3 has released) is NaN too, and comes before all:
the passes of the second look are watched, whatever was watched before, and the error that they end with is the answer.

Cost: after a failed step alone: one forward pass of its microbatches, and two small all-reduces.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.engine.parts import Parts, Stage
from shardwise.engine.weighing import IGNORE, labels_in
from shardwise.plan.errors import CommError
from shardwise.plan.pytree import tensors_in

_TEXT_BYTES = 2000
_ABSENT, _BEFORE, _AFTER = -2, -1, 1 << 40
"""Stage of what is absent, of a batch and of a loss: before and after all others."""


class _Found(NamedTuple):
    """A place where a value is not finite; compared in the order of the fields."""

    stage: int
    microbatch: int
    call: int
    text: str


class Look:
    """Notes what is not finite in the passes that run while it looks."""

    def __init__(self, parts: Parts):
        self._parts = parts
        self._calls = 0
        self.found: list[_Found] = []
        self.microbatch = 0
        """The one that runs; in a pipeline the stage knows."""

    def batch(self, microbatch: int, batch: Any) -> None:
        """A microbatch begins."""
        self.microbatch = microbatch
        if not _is_finite(batch):
            self.found.append(_Found(_BEFORE, microbatch, 0, "its batch holds NaN or infinity"))

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
            self.found.append(_Found(_BEFORE, microbatch, 0, text))
        else:
            text = "the loss is the first value that is not finite"
            self.found.append(_Found(_AFTER, microbatch, 0, text))

    def hook(self, stage: Stage, name: str) -> Callable[..., None]:
        """A forward hook for one module."""

        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._calls += 1
            if not _is_finite(output):
                inputs = "" if _is_finite((args, kwargs)) else "; its inputs are not finite either"
                text = f"the first module with a non-finite output is {name!r}{inputs}"
                microbatch = self.microbatch if stage.run is None else stage.hooks.microbatch
                self.found.append(_Found(stage.index, microbatch, self._calls, text))

        return look


def origin(parts: Parts, run: Callable[[Look], None]) -> str:
    """A sentence that says where the first value that is not finite stands, the same on all ranks. ``run`` repeats the
    forward passes of the step. Collective."""
    look = Look(parts)
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
        look.found.append(_Found(_ABSENT, look.microbatch, 0, text))
    finally:
        for handle in handles:
            handle.remove()
    return _agreed(parts, min(look.found, default=None))


def _computed_here(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose output says something: in a pipeline those that own weights of this stage, for the others may be
    handed values that another stage has."""
    owners = {
        slot.name.rpartition(".")[0]
        for state in stage.hooks.states
        for bucket in state.buckets
        for slot in bucket.layout.slots
    }
    for name, module in stage.module.named_modules():
        if stage.run is None or name in owners:
            yield name or "(root)", module


def _agreed(parts: Parts, mine: _Found | None) -> str:
    """The earliest of all ranks' findings."""
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
