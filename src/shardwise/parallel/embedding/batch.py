"""One batch on its way through the tables: what is known of its keys, and the node that waits for its gradients.

Autograd sees one node for all groups of tables, so that ranks cannot differ in the order in which groups come back.
It hands out vectors and keeps their gradients; nothing travels in it.

Shapes: N keys, B samples, F features, D width.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.parallel.embedding.group import TableGroup
from shardwise.parallel.embedding.store import Store
from shardwise.parallel.embedding.transfer import on_host
from shardwise.parallel.embedding.ways import Asked, Way
from shardwise.plan.errors import UsageError
from shardwise.plan.ragged import Ragged
from shardwise.plan.trace import Done


class Sequences(NamedTuple):
    """Vectors of a feature that is not pooled: sample b has ``values[offsets[b] : offsets[b + 1]]``."""

    values: Tensor
    """[N, D]."""
    offsets: Tensor
    """int64 [B + 1]."""


@dataclass
class Prepared:
    """A batch whose keys are where they are needed."""

    samples: int
    offsets: dict[str, Tensor]
    """Of the features that are not pooled."""
    asked: list[Asked]
    is_learning: bool = False
    """A forward pass that waits for gradients, or got them, ran on it."""
    gradients_came: bool = False
    weights: list[Tensor | None] = field(default_factory=list)
    """Of each group the weights of its keys where they want gradients: [N]."""
    ahead: Done | None = None
    """The ASK that prepared it, where that was not the forward pass itself."""


class Part(NamedTuple):
    """One group of tables on this rank."""

    tables: TableGroup
    way: Way
    store: Store


class BatchVectors(torch.autograd.Function):
    """Vectors pass; their gradients are kept. One node for all groups, so that ranks cannot differ in their order.

    Of keys with weights a pooled vector is Σ wᵢ·rowᵢ, so that dwᵢ = <gradient of the bag, rowᵢ>. What a mean divides by
    lies outside, in how the weights came about.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        parts: Sequence[Part],
        prepared: Prepared,
        learns: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """``tensors``: the weights of each group or None, then the vectors of all runs."""
        ctx.set_materialize_grads(False)
        ctx.place = (parts, prepared, learns)
        return tuple(output.view_as(output) for output in tensors[len(parts) :] if output is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        parts, prepared, learns = ctx.place
        if learns and prepared.gradients_came:
            raise UsageError(
                "embedding: a second backward pass through the same vectors; run the forward pass again for it"
            )
        prepared.gradients_came = learns
        gradients = iter(_where_rows_are(parts, grads))
        of_weights: list[Tensor | None] = []
        for part, asked, weights in zip(parts, prepared.asked, prepared.weights, strict=True):
            of_part = next(gradients)
            came = any(grad is not None for grad in of_part)
            if came and learns:
                part.way.keep(asked, of_part)
            wanted = came and weights is not None
            of_weights.append(part.way.of_weights(asked, of_part).to(weights.device) if wanted else None)
        return (None, None, None, None, *of_weights, *(None for _ in grads))


def _where_rows_are(parts: Sequence[Part], grads: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """The gradients of each part's runs; those of rows on the host have come there."""
    left: Iterator[Tensor | None] = iter(grads)
    found = [[next(left) for _ in part.tables.runs] for part in parts]
    at_host = [
        (of_part, run)
        for part, of_part in zip(parts, found, strict=True)
        for run, grad in enumerate(of_part)
        if grad is not None and grad.device != part.store.device
    ]
    came = on_host([grad for of_part, run in at_host if (grad := of_part[run]) is not None])
    for (of_part, run), grad in zip(at_host, came, strict=True):
        of_part[run] = grad
    return found


def features_on_host(features: Mapping[str, Ragged], names: Iterable[str]) -> Mapping[str, Ragged]:
    """The features that are named, with their parts on the host; weights keep where they come from."""
    away = [
        name
        for name in names
        if name in features and any(part is not None and part.device.type != "cpu" for part in features[name])
    ]
    if not away:
        return features
    parts = on_host([part for name in away for part in features[name][:2]])
    moved = dict(features)
    for name, values, offsets in zip(away, parts[::2], parts[1::2], strict=True):
        weights = features[name].weights
        moved[name] = Ragged(values, offsets, None if weights is None else weights.cpu())
    return moved


def by_feature(pooled: Tensor, asked: Asked, features: int, width: int) -> Tensor:
    """Vectors of one run as [B, F, D]: as they lie where they stand by sample, else a view across."""
    if asked.fused.by_sample:
        return pooled.view(asked.fused.samples, features, width)
    return pooled.view(features, asked.fused.samples, width).transpose(0, 1)
