"""What one rank holds besides whole tensors: the evidence from which a wrong tensor is explained.

    positions     for each parameter, the place in the whole tensor of each element of this rank's piece
    copies        this rank's own weights at the start and after each step
    addends       this rank's own gradient of each parameter, by backward pass, before any sum over ranks
    squares       Σ g² of the summed gradients that this rank's masters own

Gradients before the sums are read by hooks on the parameters, and those after the sums by a follower of the step
(engine/parts/followers.py), which is called after SUM and before the update.

Cost: a copy of all gradients and weights of the rank in each step. A rank on which this takes more than a quarter of
the free memory keeps positions and squares alone, and then fewer mistakes are explained.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.base.words import bytes_text
from shardwise.engine.engine import Engine
from shardwise.engine.parts.followers import BucketSquares, StepFollower
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.parts.sums import Number
from shardwise.engine.state import state
from shardwise.observe.memory import available_bytes
from shardwise.precision.policy import SIXTEEN_BITS
from shardwise.verify.trail import SUMMED, StepTrail


class SummedGradients(StepFollower):
    """The gradients of the running step after all sums over ranks and before the update.

    Args:
        parts: The parts of the engine.
        trail: The trail of the running step.
    """

    name = "recorded"

    def __init__(self, parts: EngineParts, trail: StepTrail) -> None:
        self._parts = parts
        self._trail = trail
        self._sums: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        """Whole gradients by name, divided by ``divisor``."""
        self.divisor = 1.0
        self.owned_squares: list[float] = []
        """Σ g² of the gradients that this rank's masters own, by bucket, before the division."""

    def numbers(self, squares: BucketSquares) -> Sequence[Number]:
        """Return an empty list: the record takes no part in the sums of NORM."""
        return ()

    def over_model(self, sums: Tensor) -> Sequence[Number]:
        """Return an empty list: the ranks that share a model sum nothing either."""
        return ()

    def settle(self, sums: Sequence[float], over_model: Sequence[float] | None) -> None:
        """Copy the summed gradients. Collective."""
        self._trail.mark(SUMMED)
        self._sums = {name: each.detach().clone() for name, each in state.gradients(self._parts, 1.0).items()}
        self.owned_squares = [
            float(bucket.gradient.owned.double().square().sum()) for bucket, _ in self._parts.trained
        ]

    def results(self, weight: float, divisor: float) -> Mapping[str, Any]:
        """Divide the sums by the divisor of the step, in fp32 at least: 16 bits would round a second time."""
        self.divisor = divisor
        self.gradients = {
            name: (each.float() if each.dtype in SIXTEEN_BITS else each) / divisor
            for name, each in self._sums.items()
        }
        return {}


_SHARE_OF_FREE = 0.25


def lacks_room(parts: EngineParts, steps: int) -> str:
    """Return the reason why a rank cannot keep its weights and gradients of all steps; "" if it can.

    Args:
        parts: The parts of the engine.
        steps: Steps of the run.
    """
    own = sum(bucket.layout.elements * bucket.dtypes.compute.itemsize for bucket in state.buckets(parts))
    wanted = own * (1 + steps * (2 + parts.accumulation.microbatches))
    free = _SHARE_OF_FREE * (available_bytes(torch.device("cpu")) or 0) / parts.world.local_size
    if wanted <= free or not free:
        return ""
    return f"weights and gradients of {steps} steps take {bytes_text(wanted)} and {bytes_text(int(free))} may be used"


class HeldState:
    """The evidence of one rank.

    Args:
        engine: The engine.
        records: Record positions, and copies and addends if there is room; False: only the summed gradients.
        steps: Steps of the run.
    """

    def __init__(self, engine: Engine, records: bool = True, steps: int = 1) -> None:
        self._parts = engine._parts
        self.lacks = lacks_room(self._parts, steps) if records else ""
        """The reason why copies and addends are not recorded."""
        self._records = records and not self.lacks
        self.trail = StepTrail(self._parts)
        self.summed = SummedGradients(self._parts, self.trail)
        # Last, because the followers before it may refuse the step.
        self._parts.followers = (*self._parts.followers, self.summed)
        self._own: dict[str, Tensor] = {}
        self._released: set[str] = set()
        for bucket in state.buckets(self._parts):
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                self._own[slot.name] = parameter
                if bucket.weight.has_window:
                    self._released.add(slot.name)
        self._addends: dict[str, list[Tensor]] = {}
        self.found: dict[str, Any] = {
            "positions": _positions(self._parts, self._own) if records else {},
            "canonical": dict(self._parts.spec.canonical),
            "buckets": [[slot.name for slot in bucket.layout.slots] for bucket, _ in self._parts.trained],
            "copies": [self._weights()] if self._records else [],
            "addends": [],
            "squares": [],
            "divisors": [],
            "trails": [],
        }

    def _weights(self) -> dict[str, Tensor]:
        """Return copies of the weights that stay in memory between passes (ZeRO stages 0 to 2)."""
        kept = self._own.items() if self._records else ()
        with torch.no_grad():
            return {name: each.detach().clone() for name, each in kept if name not in self._released}

    def weight_rows(self) -> dict[str, Tensor]:
        """Return the rows of each weight that this rank holds, by name of the module."""
        found = {}
        for name, places in self.found["positions"].items():
            shape = self._parts.registry.get("parameter", name).shape
            if name.endswith(".weight") and places.dim() and bool((places >= 0).all()):
                rows = places.reshape(len(places), -1)[:, 0] // max(torch.Size(shape[1:]).numel(), 1)
                found[name.removesuffix(".weight")] = rows
        return found

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the step that runs inside the context."""
        self._addends = {}
        watched = self._own.items() if self._records else ()
        handles = [
            handle for name, each in watched if each.requires_grad for handle in self._watch(name, each)
        ]
        try:
            with self.trail.recording():
                yield
        finally:
            for handle in handles:
                handle.remove()
        self.found["trails"].append([tuple(each) for each in self.trail.entries])
        self.found["divisors"].append(self.summed.divisor)
        self.found["squares"].append(self.summed.owned_squares)
        if self._records:
            self.found["addends"].append(self._addends)
            self.found["copies"].append(self._weights())

    def _watch(self, name: str, parameter: Tensor) -> list[Any]:
        """Record the gradients of a parameter, and return the handles that end it.

        A gradient whose product waits for W does not pass autograd, so the queue is watched too.
        """

        def reached(gradient: Tensor | None) -> None:
            if gradient is not None and gradient.layout is torch.strided:
                self._addends.setdefault(name, []).append(gradient.detach().clone())
                self.trail.mark(f"own gradient of {name}")

        reached.watches_w = True  # type: ignore[attr-defined]
        queues = (hooks.windows.products for hooks in self._parts.hooks)
        handles = [
            queue.watch(parameter, reached) for queue in queues if queue is not None and queue.has(parameter)
        ]
        return [parameter.register_hook(reached), *handles]  # type: ignore[no-untyped-call]


def _positions(parts: EngineParts, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the place in the flattened whole tensor of each element of this rank's pieces, by name; -1: padding."""
    found = {}
    for name in names:
        info = parts.registry.get("parameter", name)
        shape = parts.slices.local_shape(info)
        places = torch.full((torch.Size(shape).numel(),), -1, dtype=torch.long)
        for run in parts.slices.runs(info):
            places[run.local : run.local + run.elements] = torch.arange(run.full, run.full + run.elements)
        found[name] = places.view(shape)
    return found
