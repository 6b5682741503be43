"""One batch in flight through the tables: the state of its keys, and the autograd node that receives its gradients.

Autograd sees one node for all groups of tables, so that ranks cannot differ in the order in which groups come back.
The node returns vectors and stores their gradients; it sends nothing.

Shapes: N keys, B samples, F features, D width.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.base.errors import UsageError
from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.group import TableGroup
from shardwise.parallel.embedding.store import RowStore
from shardwise.parallel.embedding.transfer import on_host
from shardwise.parallel.embedding.ways import KeyRequest, TableExchange
from shardwise.plan.trace import TraceRow


class SequenceVectors(NamedTuple):
    """Vectors of a feature that is not pooled: those of sample b are ``values[offsets[b] : offsets[b + 1]]``."""

    values: Tensor
    """Vectors of all keys: [N, D]."""
    offsets: Tensor
    """Start of each sample in ``values``, and the end: int64 [B + 1]."""


@dataclass
class PreparedKeys:
    """A batch whose keys have been sent to the owners of their rows."""

    samples: int
    """Number of samples, B."""
    offsets: dict[str, Tensor]
    """Offsets of the features that are not pooled, by feature name."""
    asked: list[KeyRequest]
    """Keys of each group, with the state of their exchange."""
    is_learning: bool = False
    """True once a training forward pass has run on the batch."""
    gradients_came: bool = False
    """True once the backward pass has delivered gradients of the batch's vectors."""
    weights: list[Tensor | None] = field(default_factory=list)
    """Weights of the keys of each group if they require gradients, else None: [N]."""
    ahead: TraceRow | None = None
    """The INPUT_DIST that prepared the batch; None if the forward pass prepared it."""


class PlacedGroup(NamedTuple):
    """One group of tables on this rank: its tables, their exchange and their rows."""

    tables: TableGroup
    way: TableExchange
    store: RowStore


class BatchVectors(torch.autograd.Function):
    """Autograd function that passes vectors through and stores their gradients for ``deliver``.

    One node serves all groups, so that ranks cannot differ in the order of the groups. For keys with weights a pooled
    vector is Σ wᵢ·rowᵢ, so that dwᵢ = <gradient of the bag, rowᵢ>. The divisor of a mean is applied when the weights
    are computed, outside this function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        parts: Sequence[PlacedGroup],
        prepared: PreparedKeys,
        learns: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return views of the vectors.

        ``tensors`` are the weights of each group or None, then the vectors of all runs.
        """
        ctx.set_materialize_grads(False)
        ctx.place = (parts, prepared, learns)
        return tuple(output.view_as(output) for output in tensors[len(parts) :] if output is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Store the gradients of the vectors and return those of the keys' weights."""
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


def _where_rows_are(
    parts: Sequence[PlacedGroup], grads: Sequence[Tensor | None]
) -> list[list[Tensor | None]]:
    """Return the gradients of each part's runs, moved to the host if the part's rows are on the host."""
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
    """Return the features with the named ones copied to the host; weights stay in the autograd graph."""
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


def by_feature(pooled: Tensor, asked: KeyRequest, features: int, width: int) -> Tensor:
    """Return the vectors of one run as [B, F, D]: without a copy, transposed if they lie by feature.

    Args:
        pooled: vectors of the run, [F·B, D].
        asked: keys of the batch.
        features: number of features of the run.
        width: numbers in a vector.
    """
    if asked.fused.by_sample:
        return pooled.view(asked.fused.samples, features, width)
    return pooled.view(features, asked.fused.samples, width).transpose(0, 1)
