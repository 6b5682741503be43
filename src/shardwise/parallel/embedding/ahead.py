"""Features whose keys have been exchanged before the model asks for their vectors.

A model calls ``self.tables(batch["sparse"])`` with a mapping of features and is not to know that anything happens
earlier. So preparing a batch puts another mapping in the place of that one: the same features for anybody who reads
them, and with them what each collection has prepared. A collection takes its own from it; where it finds none (the
model built a new mapping, casts the weights otherwise, or asks a second time) it prepares on the spot, with the same
result.

    batch    {"dense": Tensor, "sparse": {"user": Ragged, ...}}
    ahead    {"dense": Tensor, "sparse": PreparedFeatures}

    found = find_features(batch, collections, cast)     # no traffic, so that ranks can compare what they found
    found.ask(collection, microbatch)                   # collective; what the Action ASK does
    found.batch
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch

from shardwise.plan.pytree import Laden, rebuilt
from shardwise.plan.ragged import Ragged

if TYPE_CHECKING:
    from shardwise.parallel.embedding.batch import Prepared

Features = Mapping[str, Ragged]


class Reader(Protocol):
    """A collection of tables, as far as it reads features."""

    @property
    def feature_names(self) -> list[str]:
        """All that it reads."""

    def prepare(self, features: Features) -> "Prepared":
        """Find the distinct keys and send them where they are needed. Collective."""


class PreparedFeatures(Mapping[str, Ragged], Laden):
    """Features of a batch, with what collections prepared of them.

    seen      the features as the collections will see them: floating weights in the dtype of their call
    readers   the collections that find all their features here
    """

    def __init__(self, features: Features, seen: Features, readers: Sequence[Reader]):
        self._features = features
        self._seen = seen
        self._dtypes = _weight_dtypes(seen)
        self.readers = readers
        self.prepared: dict[Reader, Prepared] = {}
        """By collection."""

    def carried(self) -> "Iterable[Prepared]":
        """The keys, by collection."""
        return self.prepared.values()

    def ask(self, reader: Reader) -> None:
        """Let one of the readers prepare. Collective."""
        self.prepared[reader] = reader.prepare(self._seen)
        if len(self.prepared) == len(self.readers):
            self._seen = {}

    def __getitem__(self, name: str) -> Ragged:
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def of(self, collection: Reader) -> "Prepared | None":
        """What ``collection`` prepared, if it can still be used for these features."""
        prepared = self.prepared.get(collection)
        if prepared is None or prepared.is_learning or _weight_dtypes(self) != self._dtypes:
            return None
        if torch.is_grad_enabled() and any(
            each.weights is not None and each.weights.requires_grad for each in self.values()
        ):
            return None  # prepared ahead, weights have lost where they come from
        return prepared

    def changed(self, change: Callable[[Any], Any]) -> "PreparedFeatures":
        """The same keys after ``change`` of each feature: another dtype of the weights."""
        fresh = PreparedFeatures({name: change(each) for name, each in self.items()}, {}, self.readers)
        fresh._dtypes, fresh.prepared = self._dtypes, self.prepared
        return fresh


@dataclass
class Found:
    """A batch with ``PreparedFeatures`` for mappings, which nobody has prepared yet."""

    batch: Any
    mappings: list[PreparedFeatures]
    """In the order in which they stand in the batch."""
    missing: list[str]
    """Features that a mapping lacks, though it has others of the same collection."""

    def read_by(self, reader: Reader) -> list[PreparedFeatures]:
        """The mappings that one collection reads: one for each microbatch."""
        return [each for each in self.mappings if reader in each.readers]

    def ask(self, reader: Reader, microbatch: int) -> None:
        """Let a collection prepare its features of one microbatch. Collective over its lane ahead: every rank has found
        the same collections in the same order, and asks in one order."""
        self.read_by(reader)[microbatch].ask(reader)

    def asked(self, reader: Reader, microbatch: int) -> "Prepared":
        """What came of it."""
        return self.read_by(reader)[microbatch].prepared[reader]


def find_features(batch: Any, collections: Sequence[Reader], cast: Callable[[Features], Features]) -> Found:
    """Every mapping of features in ``batch`` with the collections that find all of theirs in it.

    ``cast`` makes of features what the model will hand to its collections.
    """
    found = Found(batch, [], [])
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
    """Whether it is what a collection reads: features by their names."""
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(each, Ragged) for each in value.values())
    )


def _weight_dtypes(features: Features) -> list[torch.dtype | None]:
    return [None if each.weights is None else each.weights.dtype for each in features.values()]
