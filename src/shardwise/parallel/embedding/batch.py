"""One batch in flight through the tables: the state of its keys, and the autograd node that receives its gradients.

Autograd sees one node for all groups of tables, so that ranks cannot differ in the order in which groups come back.
The node returns vectors and stores their gradients; it sends nothing.

Shapes: N keys, B samples, F features, D width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.base.errors import UsageError
from shardwise.base.ragged import Ragged
from shardwise.memory.streams import begin_down_freely, wait_for_copies_down
from shardwise.parallel.embedding.group import TableGroup
from shardwise.parallel.embedding.rows.store import RowStore
from shardwise.parallel.embedding.transfer import on_host
from shardwise.parallel.embedding.ways import KeyRequest, TableExchange
from shardwise.plan.trace import TraceRow


class SequenceVectors(NamedTuple):
    """Vectors of a feature that is not pooled: those of sample b are ``values[offsets[b] : offsets[b + 1]]``."""

    values: Tensor
    """Vectors of all keys: [N, D]."""
    offsets: Tensor
    """Start of each sample in ``values``, and the end: int64 [B + 1]."""


class AskedFeatures(NamedTuple):
    """A batch whose keys have been found and counted on this rank, before any was sent."""

    samples: int
    """Number of samples, B."""
    offsets: dict[str, Tensor]
    """Offsets of the features that are not pooled, by feature name."""
    asked: list[KeyRequest]
    """Keys of each group."""
    weights: list[Tensor | None]
    """Weights of the keys of each group if they require gradients, else None: [N]."""


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
    arriving: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Gradients of the runs of groups whose rows are on the host, by index of the group: on their way from a device."""
    weights: list[Tensor | None] = field(default_factory=list)
    """Weights of the keys of each group if they require gradients, else None: [N]."""
    ahead: list[TraceRow] = field(default_factory=list)
    """The INPUT_DIST that prepared the batch, and the READ of its rows; empty if the forward pass prepared it."""


class KeysAtHand:
    """The keys of one microbatch, exchanged before the model asks for the vectors of its features.

    The keys are used for the tensors that they were found in and for no others: a model that builds new features, or
    writes into the tensors, gets the vectors of what it built.

    Args:
        features: the features that the tables read.
        prepared: their keys.
    """

    def __init__(self, features: Mapping[str, Ragged], prepared: PreparedKeys):
        self.prepared = prepared
        self.is_taken = False
        """True once a forward pass has used the keys."""
        self._features = features
        self._versions = _versions_of(features)

    def is_of(self, features: Mapping[str, Ragged]) -> bool:
        """Return whether ``features`` has the same tensors, unchanged, and no training pass has used the keys yet."""
        if self.prepared.is_learning or not isinstance(features, Mapping):
            return False
        for name, mine in self._features.items():
            given = features.get(name)
            if given is None or any(a is not b for a, b in zip(mine, given, strict=True)):
                return False
        return _versions_of(self._features) == self._versions


def _versions_of(features: Mapping[str, Ragged]) -> list[int]:
    return [part._version for each in features.values() for part in each if part is not None]


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
        by_part = _by_part(parts, grads)
        if learns and all(weights is None for weights in prepared.weights):
            prepared.arriving = _begin_to_host(parts, by_part)
        else:
            _bring_to_rows(parts, by_part)
        of_weights: list[Tensor | None] = []
        for place, (part, asked, weights) in enumerate(
            zip(parts, prepared.asked, prepared.weights, strict=True)
        ):
            of_part = by_part[place]
            came = any(grad is not None for grad in of_part)
            if came and learns and place not in prepared.arriving:
                part.way.keep(asked, of_part)
            wanted = came and weights is not None
            of_weights.append(part.way.of_weights(asked, of_part).to(weights.device) if wanted else None)
        return (None, None, None, None, *of_weights, *(None for _ in grads))


def keep_arrived(parts: Sequence[PlacedGroup], passes: Sequence[PreparedKeys], device: torch.device) -> None:
    """Wait once for the gradients of all ``passes`` that are on their way to the host, and store them there."""
    if any(each.arriving for each in passes):
        wait_for_copies_down(device)
    for prepared in passes:
        for place, of_part in prepared.arriving.items():
            parts[place].way.keep(prepared.asked[place], of_part)
        prepared.arriving = {}


def _by_part(parts: Sequence[PlacedGroup], grads: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    left = iter(grads)
    return [[next(left) for _ in part.tables.runs] for part in parts]


def _away(
    parts: Sequence[PlacedGroup], by_part: Sequence[Sequence[Tensor | None]]
) -> list[tuple[int, int, Tensor]]:
    """Return (part, run, gradient) of the gradients on a device whose rows are on the host."""
    return [
        (place, run, grad)
        for place, (part, of_part) in enumerate(zip(parts, by_part, strict=True))
        for run, grad in enumerate(of_part)
        if grad is not None and grad.device != part.store.device
    ]


def _bring_to_rows(parts: Sequence[PlacedGroup], by_part: list[list[Tensor | None]]) -> None:
    """Move gradients to the host, which waits for them, if the part's rows are on the host."""
    away = _away(parts, by_part)
    for (place, run, _), there in zip(away, on_host([grad for *_, grad in away]), strict=True):
        by_part[place][run] = there


def _begin_to_host(
    parts: Sequence[PlacedGroup], by_part: Sequence[list[Tensor | None]]
) -> dict[int, list[Tensor | None]]:
    """Begin to copy gradients to the host in one transfer, and return those of each part whose rows are there.

    The numbers may be read after ``wait_for_copies_down``.
    """
    away = _away(parts, by_part)
    if not away:
        return {}
    flat = torch.cat([grad.reshape(-1) for *_, grad in away])
    coming = begin_down_freely(flat).split([grad.numel() for *_, grad in away])
    found = {place: list(by_part[place]) for place, *_ in away}
    for (place, run, grad), part in zip(away, coming, strict=True):
        found[place][run] = part.view(grad.shape)
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
