"""Features whose keys have been exchanged before the model asks for their vectors.

A model calls ``self.tables(batch["sparse"])`` with a mapping of features and is not to know that anything happens
earlier. So preparing a batch puts another mapping in the place of that one: the same features for anybody who reads
them, and with them what each collection has prepared. A collection takes its own from it; where it finds none (the
model built a new mapping, casts the weights otherwise, or asks a second time) it prepares on the spot, with the same
result.

    batch    {"dense": Tensor, "sparse": {"user": Ragged, ...}}
    ahead    {"dense": Tensor, "sparse": PreparedFeatures}
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.plan.ragged import Ragged

if TYPE_CHECKING:
    from shardwise.parallel.embedding.batch import Prepared
    from shardwise.parallel.embedding.collection import EmbeddingCollection

Features = Mapping[str, Ragged]


class PreparedFeatures(Mapping[str, Ragged]):
    """Features of a batch, with what collections prepared of them.

    seen    the features as the collections saw them: on their device, floating weights in the dtype of their call
    """

    def __init__(
        self, features: Features, seen: Features, prepared: "Mapping[EmbeddingCollection, Prepared]"
    ):
        self._features = features
        self._dtypes = _weight_dtypes(seen)
        self.prepared = prepared
        """By collection."""

    def __getitem__(self, name: str) -> Ragged:
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def of(self, collection: "EmbeddingCollection") -> "Prepared | None":
        """What ``collection`` prepared, if it can still be used for these features."""
        prepared = self.prepared.get(collection)
        if prepared is None or prepared.is_learning or _weight_dtypes(self) != self._dtypes:
            return None
        return prepared

    def changed(self, change: Callable[[Any], Any]) -> "PreparedFeatures":
        """The same keys after ``change`` of each feature: another device, or another dtype of the weights."""
        fresh = PreparedFeatures({name: change(each) for name, each in self.items()}, {}, self.prepared)
        fresh._dtypes = self._dtypes
        return fresh


def prepare_ahead(
    batch: Any, collections: "Sequence[EmbeddingCollection]", cast: Callable[[Features], Features]
) -> Any:
    """``batch`` with every mapping of features prepared by the collections that find all of theirs in it.

    ``cast`` makes of features what the model will hand to its collections. Collective over their lane ahead: every
    rank brings batches of one structure.
    """
    if isinstance(batch, Ragged):
        return batch
    if isinstance(batch, dict):
        if batch and all(isinstance(each, Ragged) for each in batch.values()):
            readers = [each for each in collections if batch.keys() >= set(each.feature_names)]
            if not readers:
                return batch
            seen = cast(batch)
            return PreparedFeatures(batch, seen, {each: each.prepare(seen) for each in readers})
        return {key: prepare_ahead(inner, collections, cast) for key, inner in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(prepare_ahead(inner, collections, cast) for inner in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(prepare_ahead(inner, collections, cast) for inner in batch)
    return batch


def _weight_dtypes(features: Features) -> list[torch.dtype | None]:
    return [None if each.weights is None else each.weights.dtype for each in features.values()]
