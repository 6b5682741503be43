"""Loads: the pairs of each expert in a step, over all ranks, for the updates of routers and for metrics.

    a forward pass    a layer adds the choices of this rank's tokens    kept by microbatch
    its backward      the microbatch counts, unless its weight is 0
    NORM              the sums of all ranks, with the norm              ``numbers``, ``settle``
    the step          tallies; BALANCE, in a step that is applied: biases and the loads of routers move, once

Recomputations and passes without gradients add nothing. Passes with gradients that no backward pass follows count with
the next microbatch.

Cost: 2·E + 4 numbers a layer in the one small all-reduce of a step; nothing is synchronised before it.
Shapes: E experts of a layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.parallel.expert.router import Router
from shardwise.parallel.expert.surroundings import BESIDE_PAIRS
from shardwise.passes.replay import DrawReplay

_TOKENS, _ROWS_SENT, _ROWS_CROSSED, _ENTROPY = -4, -3, -2, -1
"""Number of entries of a layer behind those by expert, in this order."""


class ExpertTally(NamedTuple):
    """Loads of one layer in one step, over all ranks and microbatches."""

    routed: tuple[int, ...]
    """(token, expert) pairs by expert, before drops; the sum is tokens times k."""
    kept: tuple[int, ...]
    """Pairs by expert that had room."""
    tokens: int
    """Number of tokens that counted."""
    rows_sent: int
    """Number of rows that left a rank in dispatch."""
    rows_crossed: int
    """Number of those rows that left a host."""
    entropy: float
    """Entropy of the router's scores divided by their sum, as a mean over tokens, in nats; ln E for uniform scores."""

    @property
    def load(self) -> float:
        """Pairs of the busiest expert over the mean; 1 is even."""
        pairs = sum(self.routed)
        return max(self.routed) * len(self.routed) / pairs if pairs else 1.0

    @property
    def dropped(self) -> int:
        """Number of pairs that had no room."""
        return sum(self.routed) - sum(self.kept)


class ExpertSummary(NamedTuple):
    """Three numbers that summarize all layers in one step."""

    expert_load: float
    """Pairs of the busiest expert over the mean, in the worst layer."""
    expert_drops: float
    """Share of all pairs that had no room."""
    router_entropy: float
    """Mean entropy of router scores over tokens and layers, in nats."""


def summary_of(tallies: Iterable[ExpertTally]) -> ExpertSummary | None:
    """Return the summary of all layers; None if there are none."""
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
    """Loads of the experts of one engine.

    Args:
        layers: number of experts of each layer of the whole model by its name, the same on all ranks.
        replay: tells recomputations apart from first passes.
    """

    def __init__(self, layers: Mapping[str, int], replay: DrawReplay) -> None:
        self.layers = dict(layers)
        """Number of experts by name of the layer."""
        self.microbatch = 0
        """Index of the microbatch whose forward pass runs."""
        self.last: dict[str, ExpertTally] = {}
        """Loads of the last step, by layer."""
        self.routers: dict[str, Router] = {}
        """Routers of the layers on this rank, by layer."""
        self._replay = replay
        self._waiting: dict[int, dict[str, Tensor]] = {}
        """Numbers by microbatch and layer until its backward pass: fp64 [2·E + 4]."""
        self._counted: dict[str, Tensor] = {}

    def add(self, layer: str, loads: Tensor) -> None:
        """Add the choices of this rank's tokens in a forward pass of ``layer``.

        Args:
            layer: name of the layer.
            loads: pairs that chose each expert, [E], and that had room, [E], the number of tokens, 0, 0, and the
                entropy of the scores, summed over the tokens: fp64 [2·E + 4].
        """
        if self._counts_now:
            waiting = self._waiting.setdefault(self.microbatch, {})
            before = waiting.get(layer)
            waiting[layer] = loads if before is None else before.to(loads.device) + loads

    def sent(self, layer: str, rows: int, crossed: int) -> None:
        """Add the rows that left this rank in a forward pass of ``layer``; ``crossed`` of them left its host."""
        if not self._counts_now:
            return
        waiting = self._waiting.setdefault(self.microbatch, {})
        if layer not in waiting:
            waiting[layer] = torch.zeros(2 * self.layers[layer] + BESIDE_PAIRS, dtype=torch.float64)
        for place, number in ((_ROWS_SENT, rows), (_ROWS_CROSSED, crossed)):
            if number:
                waiting[layer][place].add_(number)

    @property
    def _counts_now(self) -> bool:
        """False in a pass that runs again, also in recomputations of the user's own checkpoints."""
        return not self._replay.runs_again and torch._C._current_graph_task_id() < 0

    def count(self, microbatch: int, weight: float | Tensor) -> None:
        """Count the numbers of ``microbatch``, whose backward pass begins.

        With a ``weight`` of 0 they are discarded.
        """
        waiting = self._waiting.pop(microbatch, {})
        is_unused: Tensor | None = None
        for layer, numbers in waiting.items():
            if isinstance(weight, Tensor):
                if is_unused is None or is_unused.device != numbers.device:
                    is_unused = weight.to(numbers.device) == 0
                numbers = numbers.masked_fill(is_unused, 0.0)
            elif not weight:
                continue
            before = self._counted.get(layer)
            self._counted[layer] = numbers if before is None else before.to(numbers.device) + numbers

    def numbers(self, device: torch.device) -> Tensor:
        """Return this rank's numbers in the step so far, all layers of the model in order: fp64 [Σ (2·E + 4)]."""
        found = [torch.zeros(0, dtype=torch.float64, device=device)]
        for layer, experts in self.layers.items():
            mine = self._counted.get(layer)
            found.append(found[0].new_zeros(2 * experts + BESIDE_PAIRS) if mine is None else mine.to(device))
        return torch.cat(found)

    def settle(self, sums: Sequence[float]) -> None:
        """Store the loads of the step, from the ``sums`` of all ranks' ``numbers``."""
        rest = iter(sums)
        for layer, experts in self.layers.items():
            mine = list(islice(rest, 2 * experts + BESIDE_PAIRS))
            tokens = mine[_TOKENS]
            self.last[layer] = ExpertTally(
                tuple(map(int, mine[:experts])),
                tuple(map(int, mine[experts : 2 * experts])),
                int(tokens),
                int(mine[_ROWS_SENT]),
                int(mine[_ROWS_CROSSED]),
                mine[_ENTROPY] / tokens if tokens else 0.0,
            )

    def balance(self) -> None:
        """Run BALANCE: update the bias and loads of each router, once, in a step that is applied."""
        for layer, router in self.routers.items():
            if router.bias is None and router.loads is None:
                continue
            router.end_step(torch.tensor(self.last[layer].routed, device=router.weight.device))

    def forget(self) -> None:
        """Discard the numbers of the step so far."""
        self._waiting, self._counted = {}, {}
