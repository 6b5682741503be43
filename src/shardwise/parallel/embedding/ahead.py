"""Features whose keys have been exchanged before the model asks for their vectors.

A model calls ``self.tables(batch["sparse"])`` with a mapping of features, and its code must not depend on preparation.
Preparing a batch therefore replaces that mapping by another one: it has the same features for every reader, and it
carries what each collection has prepared. A collection takes its prepared keys from the mapping. If there are none (the
model built a new mapping, casts the weights otherwise, or asks a second time), the collection prepares during the
forward pass, with the same result.

    batch    {"dense": Tensor, "sparse": {"user": Ragged, ...}}
    ahead    {"dense": Tensor, "sparse": PreparedFeatures}

    found = find_features(batch, collections, cast)     # no traffic, so that ranks can compare what they found
    found.ask(collection, microbatch)                   # collective; the work of the Action INPUT_DIST
    found.batch
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch

from shardwise.base.pytree import Laden, rebuilt
from shardwise.base.ragged import Ragged

if TYPE_CHECKING:
    from shardwise.parallel.embedding.batch import PreparedKeys

Features = Mapping[str, Ragged]


class FeatureReader(Protocol):
    """Interface of a collection of tables, as far as it reads features."""

    @property
    def feature_names(self) -> list[str]:
        """Names of all features that the collection reads."""

    def prepare(self, features: Features) -> "PreparedKeys":
        """Find the distinct keys and send them to the owners of their rows. Collective."""


class PreparedFeatures(Mapping[str, Ragged], Laden):
    """Features of a batch, with what collections have prepared of them.

    Args:
        features: the features, as they stand in the batch.
        seen: the features as the collections will see them, with floating weights in the dtype of their call.
        readers: the collections that find all their features in the mapping.
    """

    def __init__(self, features: Features, seen: Features, readers: Sequence[FeatureReader]):
        self._features = features
        self._seen = seen
        self._dtypes = _weight_dtypes(seen)
        self.readers = readers
        self.prepared: dict[FeatureReader, PreparedKeys] = {}
        """Prepared keys by collection."""

    def carried(self) -> "Iterable[PreparedKeys]":
        """Return the prepared keys of every collection."""
        return self.prepared.values()

    def ask(self, reader: FeatureReader) -> None:
        """Let one of the readers prepare its features. Collective."""
        self.prepared[reader] = reader.prepare(self._seen)
        if len(self.prepared) == len(self.readers):
            self._seen = {}

    def __getitem__(self, name: str) -> Ragged:
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def of(self, collection: FeatureReader) -> "PreparedKeys | None":
        """Return what ``collection`` has prepared, or None if it cannot be used for these features any more."""
        prepared = self.prepared.get(collection)
        if prepared is None or prepared.is_learning or _weight_dtypes(self) != self._dtypes:
            return None
        if torch.is_grad_enabled() and any(
            each.weights is not None and each.weights.requires_grad for each in self.values()
        ):
            return None  # weights that were prepared ahead have lost their autograd history
        return prepared

    def changed(self, change: Callable[[Any], Any]) -> "PreparedFeatures":
        """Return the same keys after ``change`` of each feature, for another dtype of the weights."""
        fresh = PreparedFeatures({name: change(each) for name, each in self.items()}, {}, self.readers)
        fresh._dtypes, fresh.prepared = self._dtypes, self.prepared
        return fresh


@dataclass
class BatchFeatures:
    """A batch whose mappings of features have become ``PreparedFeatures``, before any collection has prepared them."""

    batch: Any
    mappings: list[PreparedFeatures]
    """Mappings in the order in which they stand in the batch."""
    missing: list[str]
    """Features that a mapping lacks although it has others of the same collection."""

    def read_by(self, reader: FeatureReader) -> list[PreparedFeatures]:
        """Return the mappings that one collection reads: one for each microbatch."""
        return [each for each in self.mappings if reader in each.readers]

    def ask(self, reader: FeatureReader, microbatch: int) -> None:
        """Let a collection prepare its features of one microbatch. Collective over the lane for keys ahead.

        Every rank must have found the same collections in the same order, and must call this method in one order.
        """
        self.read_by(reader)[microbatch].ask(reader)

    def asked(self, reader: FeatureReader, microbatch: int) -> "PreparedKeys":
        """Return the keys that a collection has prepared of one microbatch."""
        return self.read_by(reader)[microbatch].prepared[reader]


def find_features(
    batch: Any, collections: Sequence[FeatureReader], cast: Callable[[Features], Features]
) -> BatchFeatures:
    """Find every mapping of features in ``batch``, with the collections that find all of their features in the mapping.

    Args:
        batch: any nesting of containers.
        collections: the collections of the model.
        cast: converts features to the form that the model will pass to its collections.
    """
    found = BatchFeatures(batch, [], [])
    names = [set(each.feature_names) for each in collections]

    def walk(value: Any) -> Any:
        if isinstance(value, Ragged):
            return value
        if are_features(value):
            readers = [each for each, its in zip(collections, names, strict=True) if its <= value.keys()]
            found.missing += [
                name for its in names if its & value.keys() for name in sorted(its - value.keys())
            ]
            if not readers:
                return value
            found.mappings.append(PreparedFeatures(value, cast(value), readers))
            return found.mappings[-1]
        return rebuilt(value, walk)

    found.batch = walk(batch)
    return found


def are_features(value: Any) -> TypeGuard[dict[str, Ragged]]:
    """Return whether ``value`` is what a collection reads: a dictionary of features by name."""
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(each, Ragged) for each in value.values())
    )


def _weight_dtypes(features: Features) -> list[torch.dtype | None]:
    return [None if each.weights is None else each.weights.dtype for each in features.values()]
