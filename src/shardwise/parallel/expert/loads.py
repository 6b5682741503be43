"""Loads: what went to which expert in a step, over all ranks; what moves in a router by it, and what metrics show.

    a forward pass    a layer adds what the tokens here chose     held back, by microbatch
    its backward      the microbatch counts, or weighs nothing and counts nowhere
    NORM              the sums of all ranks, with the norm        ``numbers``, ``end_step``
    the step          tallies; where it is applied, biases and the loads of routers move, once

What runs again, or without gradients, adds nothing. Passes with gradients that no backward pass follows count with the
microbatch that comes next.

Cost: 2·E + 4 numbers a layer in the one small all-reduce of a step; nothing is synchronised before it.
Shapes: E experts of a layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.memory.replay import Replay
from shardwise.parallel.expert.router import Router

_TOKENS, _ROWS_SENT, _ROWS_CROSSED, _ENTROPY = -4, -3, -2, -1
_BESIDE = 4
"""Numbers of a layer behind those by expert, in this order."""


class ExpertTally(NamedTuple):
    """What one layer did in one step, over all ranks and microbatches."""

    routed: tuple[int, ...]
    """(token, expert) pairs by expert, before drops: tokens times k together."""
    kept: tuple[int, ...]
    """Those of them that found room."""
    tokens: int
    """That counted."""
    rows_sent: int
    """Rows that left a rank in dispatch."""
    rows_crossed: int
    """Those of them that left a host."""
    entropy: float
    """Of the router's scores, made shares of 1: the mean over tokens, in nats. ln E where it knows nothing."""

    @property
    def load(self) -> float:
        """Pairs of the busiest expert over the mean; 1 is even."""
        pairs = sum(self.routed)
        return max(self.routed) * len(self.routed) / pairs if pairs else 1.0

    @property
    def dropped(self) -> int:
        """Pairs that found no room."""
        return sum(self.routed) - sum(self.kept)


class ExpertSummary(NamedTuple):
    """All layers of a step in three numbers."""

    expert_load: float
    """Pairs of the busiest expert over the mean, in the worst layer."""
    expert_drops: float
    """Share of all pairs that found no room."""
    router_entropy: float
    """The mean over tokens and layers, in nats."""


def summary_of(tallies: Iterable[ExpertTally]) -> ExpertSummary | None:
    """None without layers."""
    found = list(tallies)
    if not found:
        return None
    pairs = sum(sum(each.routed) for each in found)
    return ExpertSummary(
        max(each.load for each in found),
        sum(each.dropped for each in found) / max(pairs, 1),
        sum(each.entropy for each in found) / len(found),
    )


class ExpertLoads:
    """Of one engine. ``layers``: experts of each layer of the whole model by its name, alike on all ranks."""

    def __init__(self, layers: Mapping[str, int], replay: Replay) -> None:
        self.layers = dict(layers)
        """Experts by name of the layer."""
        self.microbatch = 0
        """The one whose forward pass runs."""
        self.last: dict[str, ExpertTally] = {}
        """Of the last step, by layer."""
        self.routers: dict[str, Router] = {}
        """Of the layers on this rank."""
        self._replay = replay
        self._waiting: dict[int, dict[str, Tensor]] = {}
        """By microbatch and layer, until its backward pass: fp64 [2·E + 4]."""
        self._counted: dict[str, Tensor] = {}

    def add(
        self,
        layer: str,
        routed: Tensor,
        kept: Tensor,
        tokens: Tensor | int,
        entropy: Tensor | float,
    ) -> None:
        """What the tokens here did in a forward pass of ``layer``: ``routed``, ``kept`` [E], counts; ``entropy`` summed
        over the tokens."""
        beside = [
            each.view(1) if isinstance(each, Tensor) else routed.new_full((1,), each, dtype=torch.float64)
            for each in (tokens, 0, 0, entropy)
        ]
        self._add(layer, [routed, kept, *beside])

    def sent(self, layer: str, rows: int, crossed: int) -> None:
        """Rows that left this rank in a forward pass of ``layer``; ``crossed`` of them left its host."""
        chosen = self._waiting.get(self.microbatch, {}).get(layer)
        device = (
            None if chosen is None else chosen.device
        )  # filled there: nothing is copied, so nothing waited for
        numbers = torch.zeros(2 * self.layers[layer] + _BESIDE, dtype=torch.float64, device=device)
        numbers[_ROWS_SENT].fill_(rows)
        numbers[_ROWS_CROSSED].fill_(crossed)
        self._add(layer, [numbers])

    @torch.no_grad()
    def _add(self, layer: str, parts: Sequence[Tensor]) -> None:
        in_backward = (
            torch._C._current_graph_task_id() >= 0
        )  # where a checkpoint of the user's own runs again
        if self._replay.runs_again or in_backward:
            return
        waiting, device = self._waiting.setdefault(self.microbatch, {}), parts[0].device
        numbers = torch.cat([each.detach().to(device, torch.float64) for each in parts])
        waiting[layer] = waiting[layer].to(device) + numbers if layer in waiting else numbers

    def count(self, microbatch: int, weight: float | Tensor) -> None:
        """The backward pass of ``microbatch`` begins; with a ``weight`` of 0 it counts nowhere."""
        for layer, numbers in self._waiting.pop(microbatch, {}).items():
            if isinstance(weight, Tensor):
                numbers = numbers.masked_fill(weight.to(numbers.device) == 0, 0.0)
            elif not weight:
                continue
            before = self._counted.get(layer)
            self._counted[layer] = numbers if before is None else before.to(numbers.device) + numbers

    def numbers(self, device: torch.device) -> Tensor:
        """Of this rank in the step so far, all layers of the model one after another: fp64 [Σ (2·E + 4)]."""
        found = [torch.zeros(0, dtype=torch.float64, device=device)]
        for layer, experts in self.layers.items():
            mine = self._counted.get(layer)
            found.append(found[0].new_zeros(2 * experts + _BESIDE) if mine is None else mine.to(device))
        return torch.cat(found)

    def end_step(self, sums: Sequence[float]) -> None:
        """A step is over, in which ``numbers`` of all ranks sum to ``sums``."""
        rest = iter(sums)
        for layer, experts in self.layers.items():
            mine = list(islice(rest, 2 * experts + _BESIDE))
            tokens = mine[_TOKENS]
            self.last[layer] = ExpertTally(
                tuple(map(int, mine[:experts])),
                tuple(map(int, mine[experts : 2 * experts])),
                int(tokens),
                int(mine[_ROWS_SENT]),
                int(mine[_ROWS_CROSSED]),
                mine[_ENTROPY] / tokens if tokens else 0.0,
            )
        self.forget()

    def tell_routers(self) -> None:
        """The step was applied: what moves with loads in each router moves, once."""
        for layer, router in self.routers.items():
            if router.bias is None and router.loads is None:
                continue
            router.end_step(torch.tensor(self.last[layer].routed, device=router.weight.device))

    def forget(self) -> None:
        """The step begins anew."""
        self._waiting, self._counted = {}, {}
